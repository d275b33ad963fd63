"""`POST /v1/embeddings`."""

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..frontend import Frontend, FrontendError
from ..protocol.embeddings import EmbeddingList, EmbeddingsBody
from . import pooling, preparation, rendering, unknown_fields
from .errors import documented


def router(frontend: Frontend) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["embeddings"])

    @routes.post(
        "/v1/embeddings",
        summary="Embeddings of texts: pooled hidden states",
        response_model=EmbeddingList,
        responses=documented(400, 401, 404, 408, 413, 429, 500, 503),
    )
    async def embeddings(body: EmbeddingsBody, http: Request) -> Response:
        return await unknown_fields.warn(http, body, await _answer(frontend, body, http))

    return routes


async def _answer(frontend: Frontend, body: EmbeddingsBody, http: Request) -> Response:
    frontend.check_able()
    model, limits = frontend.check_base_model(body.model), frontend.engine.embedding_limits
    if body.dimensions is not None and body.dimensions > limits.dimensions:
        message = f"dimensions must be between 1 and {limits.dimensions}; got {body.dimensions}"
        raise FrontendError(400, message, "dimensions")
    special = body.add_special_tokens is not False
    texts = await pooling.tokens_of(frontend, http, body, "input", body.texts(), limits.tokens, special)
    vectors = await pooling.embedded(frontend, http, texts, body.pooling)
    if vectors is None:
        return Response(status_code=499)
    head = rendering.head_of(preparation.identifier("embd", None), "list", model)
    read = sum(map(len, texts))
    used = {"prompt_tokens": read, "total_tokens": read}
    pool = frontend.pools.for_text(4 * vectors.size)
    return await frontend.run_in(pool, lambda: _rendered(body, vectors, {**head, "usage": used}))


def _rendered(body: EmbeddingsBody, vectors: np.ndarray, head: dict[str, Any]) -> Response:
    """The response with the vectors, cut, normalised and encoded as the body says."""
    vectors = vectors[:, : body.dimensions]
    if body.normalize is not False:
        vectors = pooling.unit(vectors)
    encode = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
    data = [
        {"object": "embedding", "index": index, "embedding": encode(vector)}
        for index, vector in enumerate(vectors)
    ]
    return rendering.answered({**head, "data": data})


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
