"""A server with the real engine and a shallow model, for tests with third-party clients."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entropic_jax.serving.http import served_model
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Settings
from tests.shallow_model import shallow_model

from .live import Live, serving


@contextlib.contextmanager
def real_server(
    settings: Settings | None = None, directory: Path | None = None, **options: Any
) -> Iterator[Live]:
    """Serve a model under the name `embedded` while the block runs.

    Args:
        settings: of the server.
        directory: of the model; the first layers of the embedded one by default.
        options: options of the engine.
    """
    from entropic_jax.serving.engine.options import EngineOptions
    from entropic_jax.serving.engine.start import start

    directory = shallow_model() if directory is None else directory
    small: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "warmup": "none"}
    llm_engine = start(directory, EngineOptions(**{**small, **options}))
    try:
        model = served_model.describe(llm_engine.model, str(directory), ("embedded",), llm_engine.context)
        with serving(Frontend(llm_engine, model, settings or Settings(port=0))) as live:
            live.engine, live.model = llm_engine, model
            yield live
    finally:
        llm_engine.close()
