"""Serves a model over HTTP with the OpenAI and vLLM APIs and the control loop on.

    entropic serve            python serving/server.py            python -m entropic_jax.serving.server

All three take the same options. The server itself is `entropic_jax.serving.http.process`.
"""

import os
import sys

if __name__ == "__main__":
    if not __package__:  # run as a file: import from the checkout, not from this folder
        folder = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [os.path.dirname(folder), *(path for path in sys.path if path != folder)]

    from entropic_jax.serving.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
