"""The command line and the server: requests in, text and measurements out."""

from importlib import metadata


def version() -> str:
    """The version of the package as installed."""
    try:
        return metadata.version("entropic_jax")
    except metadata.PackageNotFoundError:  # run from its source
        return "0"
