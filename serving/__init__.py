"""The command line and the server: requests in, text and measurements out."""

from importlib import metadata

if __name__ == "serving":  # the folder of a checkout, found on the path instead of through the package
    raise ImportError("serving is part of entropic_jax: import entropic_jax.serving", name=__name__)


def version() -> str:
    """The version of the package as installed."""
    try:
        return metadata.version("entropic_jax")
    except metadata.PackageNotFoundError:  # run from its source
        return "0"
