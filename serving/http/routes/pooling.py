"""Texts to token ids, and those to embeddings, for the routes that embed or compare texts."""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
from starlette.requests import Request as HttpRequest

from ...engine.engine_call import EngineStoppedError
from ...engine.interface import Pooling
from ...request import RequestError
from ..frontend import Frontend, FrontendError, refusals
from ..protocol.embeddings import PooledBody
from . import generation
from .preparation import size_of


async def tokens_of(
    frontend: Frontend,
    http: HttpRequest,
    body: PooledBody,
    name: str,
    texts: Sequence[str | Sequence[int]],
    longest: int,
    special: bool = True,
) -> list[list[int]]:
    """The token ids of each text. FrontendError for one that is too long, and for too many of them.

    Args:
        frontend: whose model and limits hold.
        http: the request, whose size decides which threads work on it.
        body: says how many tokens to keep of each text.
        name: the name of the field that holds the texts.
        texts: texts, or token ids.
        longest: tokens of a text, at most.
        special: add the special tokens that the model expects around a text.
    """
    model, most = frontend.model, frontend.settings.limits.sequences

    def encode(text: str | Sequence[int]) -> list[int]:
        if isinstance(text, str) and body.truncate_prompt_tokens is None:
            model.check_length(text)
        tokens = model.encode(text, special, name) or (model.beginning() if special else [])
        tokens = tokens[-(body.truncate_prompt_tokens or 0) :]
        if not 0 < len(tokens) <= longest:
            raise RequestError(f"{name} must have between 1 and {longest} tokens; got {len(tokens)}", name)
        return tokens

    def encode_all() -> list[list[int]]:
        if len(texts) > most:
            raise RequestError(f"{name} must have at most {most} texts; got {len(texts)}", name)
        return [encode(text) for text in texts]

    with refusals():
        return await frontend.run_in(frontend.pools.for_text(size_of(http)), encode_all)


async def embedded(
    frontend: Frontend, http: HttpRequest, texts: list[list[int]], pooling: Pooling
) -> np.ndarray | None:
    """Pooled hidden states of texts, float32 `[texts, dimensions]`; None if the client has disconnected.

    Args:
        frontend: whose engine embeds.
        http: the request, whose client may leave.
        texts: token ids of each text.
        pooling: the pooling of the hidden states.

    Raises:
        FrontendError: The request took too long (408), or the result is not finite (500).
    """
    frontend.check_not_abandoned()
    if (failure := frontend.engine.failure()) is not None and not frontend.engine.serves():
        raise FrontendError(503, f"the engine has failed: {failure}")
    stop, seconds = threading.Event(), frontend.settings.request_timeout
    work = frontend.run_in(frontend.pools.embeddings, frontend.engine.embed, texts, pooling, stop)
    frontend.embedding_stops.add(stop)
    try:
        with refusals():
            async with asyncio.timeout(seconds):
                embeddings = await generation.unless_gone(http, work)
    except EngineStoppedError as error:
        raise FrontendError(503, str(error)) from None
    except TimeoutError:
        raise FrontendError(408, f"the request took longer than its timeout of {seconds:g} s") from None
    finally:
        ended_by_server = stop.is_set()
        stop.set()
        frontend.embedding_stops.discard(stop)
    if ended_by_server:
        frontend.check_able()
    if embeddings is None:
        return None
    if not np.isfinite(embeddings.vectors).all():
        raise FrontendError(500, "the model computed hidden states that are not finite")
    frontend.metrics.engines[embeddings.rank].prompt_tokens.inc(sum(map(len, texts)))
    return embeddings.vectors


def unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors float32 `[n, dimensions]` scaled to length 1; zeros stay zeros."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)
