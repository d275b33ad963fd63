"""Serves a model over HTTP with the OpenAI and vLLM APIs and the control loop on.

    entropic serve            python serving/server.py            python -m entropic_jax.serving.server

All three take the same options. The server itself is `entropic_jax.serving.http.process`.
"""

import os
import sys

if __name__ == "__main__":
    if not __package__:  # run as a file: import from the checkout, not from this folder
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    from entropic_jax.serving.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
