"""A server over the real engine and the embedded model, for the clients that people use."""

import contextlib
from collections.abc import Iterator
from typing import Any

from serving.generation import EMBEDDED
from serving.http import served_model
from serving.http.frontend import Frontend
from serving.http.settings import Settings

from .live import Live, serving


@contextlib.contextmanager
def real_server(settings: Settings | None = None, **options: Any) -> Iterator[Live]:
    """Serve the embedded model while the block runs; `options` are the engine's."""
    from serving.engine import engine
    from serving.engine.options import EngineOptions

    small: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "warmup": "none"}
    made = engine.start(EMBEDDED, EngineOptions(**{**small, **options}))
    try:
        model = served_model.describe(made.model, str(EMBEDDED), ("embedded",), made.context)
        with serving(Frontend(made, model, settings or Settings(port=0))) as live:
            live.engine, live.model = made, model
            yield live
    finally:
        made.close()
