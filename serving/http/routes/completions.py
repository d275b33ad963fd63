"""`POST /v1/completions`."""

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.interface import Delta, EngineRequest
from ...request import Request as GenerationRequest
from ...request import RequestError, infilling
from ..frontend import Frontend
from ..protocol.completion import Completion, CompletionBody
from . import generation, logprobs, preparation, rendering, unknown_fields
from .errors import documented

DEFAULT_TOKENS = 16
STREAMED: dict[int | str, dict[str, Any]] = {200: {"model": Completion, "content": {"text/event-stream": {}}}}


def router(frontend: Frontend) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/v1/completions",
        summary="Continue text or tokens",
        responses=STREAMED | documented(400, 401, 404, 408, 413, 429, 500, 503),
    )
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await unknown_fields.warn(http, body, await _answer(frontend, body, http))

    return routes


async def _answer(frontend: Frontend, body: CompletionBody, http: Request) -> Response:
    """The response to a request, whole or as a stream."""
    model = frontend.check_model(body.model)
    name = preparation.identifier("cmpl", body.request_id)
    silent = body.max_tokens == 0
    choices = await preparation.start(frontend, http, body, lambda: _prepare(frontend, body, name))
    head = rendering.head_of(name, "text_completion", model)

    def render(choice, delta):
        return [_rendered(frontend, body, choice, delta)]

    if body.stream:
        news = generation.arriving(frontend, choices, silent)
        if body.candidates > body.choices:
            news = _chosen(frontend, body, choices, silent)
        source = generation.events(choices, body, head, render, news)
        return generation.EventStream(source, frontend, choices)
    deltas = await generation.unless_gone(http, generation.finished(frontend, choices, silent))
    if deltas is None:
        return Response(status_code=499)
    answers = [
        _rendered(frontend, body, choice, delta)
        for choice, delta in _best(body, list(zip(choices, deltas, strict=True)))
    ]
    return rendering.answered({**head, "choices": answers, "usage": generation.finish(choices, deltas)})


def _prepare(
    frontend: Frontend, body: CompletionBody, name: str
) -> tuple[list[EngineRequest], list[tuple[Sequence[int], EngineRequest | None]]]:
    """The engine requests of a body, and the prompt and the request of every text.

    A text that consists of its prompt only has no request.
    """
    limits = frontend.settings.limits
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    count = body.candidates
    prompts = body.prompts()
    if len(prompts) * count > limits.sequences:
        raise RequestError(
            f"prompt must ask for at most {limits.sequences} texts; got {len(prompts) * count}", "prompt"
        )
    if not prompts[0] and not isinstance(prompts[0], str):
        raise RequestError("prompt must not be empty; got []", "prompt")
    num_logprobs = body.logprobs if body.logprobs is not None or count == body.choices else 0
    requested = [body.logprobs if body.echo else None, body.prompt_logprobs]
    of_prompt = max((number for number in requested if number is not None), default=None)
    requests, places = [], []
    for prompt in prompts:
        tokens = _tokens(frontend, body, prompt)
        requests += preparation.requests_of(frontend, body, tokens, count, most)
        places += [tokens] * count
    if body.suffix:
        requests = [_ended_by_format(frontend, request) for request in requests]
    engine_requests = preparation.engine_requests_of(frontend, body, requests, name, num_logprobs, of_prompt)
    if most == 0 and of_prompt is None:
        return [], [(tokens, None) for tokens in places]
    return engine_requests, list(zip(places, engine_requests, strict=True))


def _tokens(frontend: Frontend, body: CompletionBody, prompt: str | list[int]) -> tuple[int, ...]:
    """The tokens behind which a text is written: a prompt, with its suffix if there is one."""
    model, special = frontend.model, body.add_special_tokens is not False
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        model.check_length(prompt + (body.suffix or ""))
    if not body.suffix:
        read = model.encode(prompt, special) or model.beginning()
        return tuple(read)[-(body.truncate_prompt_tokens or 0) :]
    form = infilling.check(model.infilling)
    for name in ("echo", "truncate_prompt_tokens"):
        if value := getattr(body, name):
            raise RequestError(f"{name} must be absent with suffix; got {value}", name)
    return tuple(form.prompt(model.encode(prompt, False), body.suffix, special))


def _ended_by_format(frontend: Frontend, request: GenerationRequest) -> GenerationRequest:
    """A request that the tokens which end the middle of a text end as well."""
    ends = infilling.check(frontend.model.infilling).ends
    return dataclasses.replace(request, stop_token_ids=(*request.stop_token_ids, *ends))


def _rendered(
    frontend: Frontend, body: CompletionBody, choice: generation.Choice, delta: Delta
) -> Mapping[str, Any]:
    """A choice of the answer, or its next chunk."""
    model, first = frontend.model, not choice.begun
    choice.begun = True
    name = logprobs.naming(model, body.return_tokens_as_token_ids)
    text = "".join(token.text for token in delta.tokens)
    if first and body.echo:
        text = model.tokenizer.decode(choice.prompt) + text
    answer: dict[str, Any] = {
        "index": choice.index,
        "text": text,
        "logprobs": None,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
        **rendering.entropic(body, delta),
    }
    if body.logprobs is not None:
        prompt = delta.prompt if body.echo else ()
        answer["logprobs"] = logprobs.of_completion(prompt, delta.tokens, body.logprobs, choice.offset, name)
    if body.prompt_logprobs is not None and delta.prompt:
        answer["prompt_logprobs"] = logprobs.of_prompt(delta.prompt, body.prompt_logprobs, name)
    if body.return_token_ids:
        answer["token_ids"] = [token.id for token in delta.tokens]
        answer["prompt_token_ids"] = list(choice.prompt) if first else None
    choice.offset += len(text)
    return answer


async def _chosen(
    frontend: Frontend, body: CompletionBody, choices: Sequence[generation.Choice], silent: bool
) -> AsyncIterator[tuple[generation.Choice, Delta]]:
    """The best texts, each in one chunk, once all are complete."""
    deltas = await generation.finished(frontend, choices, silent)
    for pair in _best(body, list(zip(choices, deltas, strict=True))):
        yield pair


def _best(
    body: CompletionBody, deltas: list[tuple[generation.Choice, Delta]]
) -> list[tuple[generation.Choice, Delta]]:
    """The `n` texts of each prompt with the highest mean log-probability, if `best_of` is larger."""
    count = body.candidates
    if count == body.choices:
        return deltas

    def likelihood(pair: tuple[generation.Choice, Delta]) -> float:
        tokens = pair[1].tokens
        return sum(token.logprob or 0.0 for token in tokens) / max(1, len(tokens))

    kept = []
    for place in range(0, len(deltas), count):
        kept += sorted(deltas[place : place + count], key=likelihood, reverse=True)[: body.choices]
    for index, (choice, _) in enumerate(kept):
        choice.index = index
    return kept
