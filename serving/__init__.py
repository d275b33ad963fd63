"""The command line and the server: requests in, text and measurements out."""

if __name__ == "serving":  # the folder of a checkout, found on the path instead of through the package
    raise ImportError("serving is part of entropic_jax: import entropic_jax.serving", name=__name__)
