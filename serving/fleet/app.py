"""The application for `serve run entropic_jax.serving.fleet.app:app`.

ENTROPIC_SERVE_ARGUMENTS holds the arguments of `entropic serve`, as in a shell. The address is Ray Serve's.
"""

import os
import shlex

from ..cli import parsed, serve
from .deployment import application

ARGUMENTS = "ENTROPIC_SERVE_ARGUMENTS"

options = parsed(["serve", *shlex.split(os.environ.get(ARGUMENTS, ""))])
options.replicas = options.replicas or 1
app = application(options, serve.fleet_settings(options), serve.frontend_of)
