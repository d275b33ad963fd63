"""Dashboard at `/`, with a content security policy that confines it to this server."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

FOLDER = Path(__file__).resolve().parents[1] / "dashboard"
INLINE = re.compile(rb"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL)


def policy(page: bytes = b"") -> str:
    """A Content-Security-Policy that allows only this server's files and the scripts inside the page."""
    sources: dict[bytes, list[str]] = {b"script": ["'self'"], b"style": ["'self'"]}
    for kind, text in INLINE.findall(page):
        if text.strip():
            digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
            sources[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(sources[b'script'])}",
            f"style-src {' '.join(sources[b'style'])}",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def headers(page: bytes = b"") -> dict[str, str]:
    """Headers of every part of the page."""
    return {
        "Content-Security-Policy": policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


class Assets(StaticFiles):
    """The files that the page loads."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a file with the headers of the page."""

        async def guarded(message) -> None:
            if message["type"] == "http.response.start":
                page_headers = [(k.lower().encode(), v.encode()) for k, v in headers().items()]
                message["headers"] = [*message["headers"], *page_headers]
            await send(message)

        await super().__call__(scope, receive, guarded)


def install(app: FastAPI) -> None:
    """Serve the page at `/` and its files under `/dashboard/`; a line of text where they were left out."""
    routes = APIRouter(include_in_schema=False)
    index = FOLDER / "index.html"

    @routes.get("/")
    async def page() -> Response:
        try:
            text = index.read_bytes()
        except OSError:
            text = b"<!doctype html><title>entropic</title><p>The API is at <a href=v1/models>/v1</a>."
        return HTMLResponse(text, headers=headers(text))

    app.include_router(routes)
    if FOLDER.is_dir():
        app.mount("/dashboard", Assets(directory=FOLDER), name="dashboard")
