"""`python -m entropic_jax`: the `entropic` command line."""

import sys

from .serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
