"""Serve a model over HTTP, as OpenAI and vLLM do, with the control loop on.

    entropic serve            python serving/server.py            python -m serving.server

all take the same options. What serves is `serving.http.process`.
"""

import os
import sys

if __name__ == "__main__":
    if not __package__:  # run as a file: its folder is no place to import from
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    from serving.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
