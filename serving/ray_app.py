"""The application for `serve run entropic_jax.serving.ray_app:app`.

ENTROPIC_SERVE_ARGUMENTS holds the arguments of `entropic serve`, as in a shell. The address is Ray Serve's.
"""

import os
import shlex

from .cli import parsed, serve

ARGUMENTS = "ENTROPIC_SERVE_ARGUMENTS"

app = serve.fleet_application(parsed(["serve", *shlex.split(os.environ.get(ARGUMENTS, ""))]))
