"""A server over a scripted engine with a folder for files, and requests to it."""

import contextlib
import json

import httpx2

from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Limits, Settings

from .live import serving
from .scripted_engine import ScriptedEngine


@contextlib.contextmanager
def server(served, folder, **settings):
    """A server over a scripted engine, with a folder for files."""
    engine = ScriptedEngine(served)
    with serving(Frontend(engine, served, Settings(port=0, files_dir=str(folder), **settings))) as live:
        live.engine = engine
        yield live


def ask(live, method, path, key="one", type_of=None, **fields):
    headers = {"Authorization": f"Bearer {key}"} | ({"Content-Type": type_of} if type_of else {})
    return httpx2.request(method, live.url + path, headers=headers, timeout=60, **fields)


def upload(live, content, key="one", **fields):
    content = content if isinstance(content, bytes) else b"\n".join(json.dumps(x).encode() for x in content)
    form = {"purpose": "batch", **fields}
    return ask(live, "POST", "/v1/files", key, files={"file": ("in.jsonl", content)}, data=form)


def bounded_server(served, folder):
    """A server with two keys, and little room for files."""
    return server(served, folder, api_keys=("one", "two"), limits=Limits(file_bytes=200_000))
