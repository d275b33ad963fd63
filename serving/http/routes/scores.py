"""`/score` and `/rerank`: how well texts fit each other, by log-probabilities or by embeddings.

By log-probabilities, the score of a query q and a document d is exp(mean log p(qᵢ | d, q₁ … qᵢ₋₁)), the
geometric mean of the probabilities of the query's tokens after the document, in (0, 1].

Source: Sachan et al., Improving Passage Retrieval with Zero-Shot Question Generation (2022; arXiv
2204.07496), section 2.1. Differs from the paper: no instruction stands between document and query, and the
exponential is returned.
"""

import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.interface import EngineRequest
from ...request import Request as TextRequest
from ..frontend import RETRY, Frontend, FrontendError, refusals
from ..protocol.embeddings import Ranking, RerankBody, ScoreBody, ScoreList, ScoringBody
from . import generation, pooling, preparation, rendering, unknown_fields
from .errors import documented

ERRORS = documented(400, 401, 404, 408, 413, 429, 500, 503)


def router(frontend: Frontend) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["embeddings"])

    async def score(body: ScoreBody, http: Request) -> Response:
        return await unknown_fields.warn(http, body, await _score(frontend, body, http))

    async def rerank(body: RerankBody, http: Request) -> Response:
        return await unknown_fields.warn(http, body, await _rerank(frontend, body, http))

    for path in ("/score", "/v1/score"):
        summary = "Scores of pairs of texts"
        routes.post(path, summary=summary, response_model=ScoreList, responses=ERRORS)(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        summary = "Documents by their relevance for a query"
        routes.post(path, summary=summary, response_model=Ranking, responses=ERRORS)(rerank)
    return routes


async def _score(frontend: Frontend, body: ScoreBody, http: Request) -> Response:
    model, (first, second) = frontend.check_model(body.model), body.sides()
    scored = await _scores(frontend, body, http, ("text_1", first), ("text_2", second))
    if scored is None:
        return Response(status_code=499)
    scores, used = scored
    head = rendering.head_of(preparation.identifier("score", None), "list", model)
    data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
    return rendering.answered({**head, "data": data, "usage": used})


async def _rerank(frontend: Frontend, body: RerankBody, http: Request) -> Response:
    model, documents = frontend.check_model(body.model), body.texts()
    scored = await _scores(frontend, body, http, ("query", [body.query]), ("documents", documents))
    if scored is None:
        return Response(status_code=499)
    scores, used = scored
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({} if body.return_documents is False else {"document": {"text": documents[index]}})
        for index in order[: body.top_n or None]
    ]
    name = preparation.identifier("rerank", None)
    return rendering.answered({"id": name, "model": model, "results": results, "usage": used})


async def _scores(
    frontend: Frontend,
    body: ScoringBody,
    http: Request,
    queries: tuple[str, list[str]],
    documents: tuple[str, list[str]],
) -> tuple[list[float], dict[str, int]] | None:
    """The score of each document, and the usage; None if the client has disconnected.

    Args:
        frontend: whose engine computes them.
        body: says how.
        http: the request.
        queries: a field, and its texts: one for all documents, or one for each.
        documents: the same for the documents.
    """
    frontend.check_able()
    if body.scoring == "embedding":
        return await _cosines(frontend, body, http, queries, documents)
    longest = frontend.model.context - 1
    separated = [text + body.separator for text in documents[1]]
    before = await pooling.tokens_of(frontend, http, body, documents[0], separated, longest)
    after = await pooling.tokens_of(frontend, http, body, *queries, longest, special=False)
    after = after * len(before) if len(after) == 1 else after
    prompts = [tuple(document + query) for document, query in zip(before, after, strict=True)]
    if (length := max(map(len, prompts))) > longest:
        message = f"{documents[0]} and {queries[0]} must have at most {longest} tokens together; got {length}"
        raise FrontendError(400, message, documents[0])
    lengths = [len(query) for query in after]
    logprobs = await _mean_logprobs(frontend, http, body, prompts, lengths)
    read = sum(map(len, prompts))
    usage = {"prompt_tokens": read, "total_tokens": read}
    return None if logprobs is None else ([math.exp(logprob) for logprob in logprobs], usage)


async def _cosines(
    frontend: Frontend,
    body: ScoringBody,
    http: Request,
    queries: tuple[str, list[str]],
    documents: tuple[str, list[str]],
) -> tuple[list[float], dict[str, int]] | None:
    """The cosine of the embeddings of each document and its query. Arguments and result as for `_scores`."""
    frontend.check_base_model(body.model)
    longest = frontend.engine.embedding_limits.tokens
    first = await pooling.tokens_of(frontend, http, body, *queries, longest)
    second = await pooling.tokens_of(frontend, http, body, *documents, longest)
    vectors = await pooling.embedded(frontend, http, [*first, *second], body.pooling)
    if vectors is None:
        return None
    vectors = pooling.unit(vectors)
    cosines = (vectors[: len(first)] * vectors[len(first) :]).sum(1)
    read = sum(map(len, (*first, *second)))
    return cosines.tolist(), {"prompt_tokens": read, "total_tokens": read}


async def _mean_logprobs(
    frontend: Frontend,
    http: Request,
    body: ScoringBody,
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
) -> list[float] | None:
    """The mean log-probability of the last tokens of each prompt, in nats; None if the client has left.

    Args:
        frontend: submits the prompts, whose log-probabilities prefill computes.
        http: the request, whose client may leave.
        body: names the model, or an adapter.
        prompts: token ids.
        lengths: how many tokens at the end of each prompt count.
    """
    name = preparation.identifier("score", None)
    engine_requests = [
        EngineRequest(
            id=f"{name}-{index}",
            request=TextRequest(prompt=prompt, max_tokens=1),
            control=frontend.settings.control._replace(preset="off", gains=()),
            timeout=frontend.settings.request_timeout,
            prompt_logprobs=0,
            adapter=frontend.adapter(body.model),
        )
        for index, prompt in enumerate(prompts)
    ]
    with refusals():
        streams = frontend.submit(preparation.private(frontend, http, engine_requests))
    choices: list[Any] = [
        generation.Choice(index, prompt, stream)
        for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
    ]
    deltas = await generation.unless_gone(http, generation.finished(frontend, choices, silent=True))
    if deltas is None:
        return None
    means = []
    for delta, length in zip(deltas, lengths, strict=True):
        logprobs = [token.logprob for token in delta.prompt[-length:]]
        if len(logprobs) < length or None in logprobs:
            message = "not all scores were computed: the server is shutting down or going to sleep"
            raise FrontendError(503, message, retry_after=RETRY)
        means.append(sum(logprob or 0.0 for logprob in logprobs) / length)
    return means
