"""Preparation of generation requests: from a body to engine requests, submitted."""

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from entropic_jax.parameter_tables.sampling_params import check_min_tokens

from ...engine import grammar_forms
from ...engine.grammar_forms import Constraint
from ...engine.interface import EngineRequest
from ...request import Request, RequestError
from ...request.token_ids import check_parameters
from .. import log
from ..frontend import Frontend, refusals
from ..protocol.chat import ChatBody
from ..protocol.sampling import ObjectFormat, SamplingBody, SchemaFormat
from ..worker_pools import LONG
from .generation import Choice


def identifier(prefix: str, request_id: str | None) -> str:
    """The id of an answer, derived from the request id."""
    return f"{prefix}-{request_id or log.request_id.get() or uuid.uuid4().hex}"


def sampling_fields(frontend: Frontend, body: SamplingBody) -> dict[str, Any]:
    """The sampling parameters of a body. RequestError for stop strings or tokens that the server refuses.

    Args:
        frontend: whose model and limits hold.
        body: holds the parameters.
    """
    most = frontend.settings.limits.stops
    if isinstance(body.stop, list) and len(body.stop) > most:
        raise RequestError(f"stop must have at most {most} strings; got {len(body.stop)}", "stop")
    fields = body.sampling(dict(frontend.model.defaults))
    check_parameters(fields, frontend.model.vocabulary)
    return fields


def requests_of(
    frontend: Frontend, body: SamplingBody, prompt: Sequence[int], count: int, most: int
) -> list[Request]:
    """Requests for one prompt, which differ in their seed. RequestError for a field that is out of range.

    Args:
        frontend: whose model and limits hold.
        body: holds the sampling parameters.
        prompt: token ids, at least one and fewer than the model's context.
        count: number of requests.
        most: tokens to generate at most; the context may leave room for fewer.
    """
    context = frontend.model.context
    if not 0 < len(prompt) < context:
        raise RequestError(
            f"prompt must have between 1 and {context - 1} tokens, one less than the model's maximum context "
            f"length of {context} tokens; got {len(prompt)}",
            "prompt",
        )
    fields = sampling_fields(frontend, body)
    min_tokens = fields.get("min_tokens", 0)
    if body.min_tokens is not None:  # a default of the server gives way
        newer = getattr(body, "max_completion_tokens", None) is not None
        with refusals():
            check_min_tokens(min_tokens, most, "max_completion_tokens" if newer else "max_tokens")
    max_tokens = max(1, min(most, context - len(prompt)))
    fields["min_tokens"] = min(min_tokens, max_tokens)
    first = body.first_seed()
    return [
        Request(prompt=prompt, max_tokens=max_tokens, seed=(first + k) % 2**31, **fields)
        for k in range(count)
    ]


def engine_requests_of(
    frontend: Frontend,
    body: SamplingBody,
    requests: Sequence[Request],
    name: str,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> list[EngineRequest]:
    """The engine requests, each with its own state of the body's grammar, if it has one.

    Args:
        frontend: supplies the default control, the timeout and the grammars.
        body: holds control, priority, deadline and grammar.
        requests: prompts with their sampling parameters.
        name: id of the answer, with which the ids of the engine requests begin.
        logprobs: alternatives reported per generated token; None reports no log-probabilities.
        prompt_logprobs: the same per token of the prompt.
    """
    default = frontend.settings.control
    constraint = constraint_of(frontend, body)
    return [
        EngineRequest(
            id=f"{name}-{index}",
            request=request,
            control=default if body.entropic is None else body.entropic.control(default, request.temperature),
            priority=body.priority or 0,
            deadline=body.deadline,
            timeout=frontend.settings.request_timeout,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if constraint is None else frontend.grammars.compile(*constraint),
            adapter=frontend.adapter(body.model),
            cache_salt=body.cache_salt,
        )
        for index, request in enumerate(requests)
    ]


def private(
    frontend: Frontend, http: HttpRequest, engine_requests: Sequence[EngineRequest]
) -> list[EngineRequest]:
    """The engine requests, whose cached prefixes only requests with the same API key find.

    Who may find a prefix sees from `cached_tokens`, or the time, that it has been sent before.

    Args:
        frontend: its settings hold the keys, and whether they share prefixes.
        http: the request, whose owner the gate has set.
        engine_requests: with the salts that their requests state.
    """
    settings = frontend.settings
    if len(set(settings.api_keys)) < 2 or settings.share_prefix_cache:
        return list(engine_requests)
    owner = http.state.owner  # None for a batch from before the server had keys
    key = "" if owner is None else owner.hex()
    return [
        dataclasses.replace(request, cache_salt=f"{key}:{request.cache_salt or ''}")
        for request in engine_requests
    ]


def constraint_of(frontend: Frontend, body: SamplingBody) -> Constraint | None:
    """The field that constrains the text, and the grammar it stands for."""
    if isinstance(body, ChatBody) and (constraint := frontend.tool_calling.constraint(body)) is not None:
        return constraint
    form = body.response_format
    if isinstance(form, ObjectFormat):
        return Constraint("response_format", grammar_forms.any_object("response_format"))
    if isinstance(form, SchemaFormat):
        name = "response_format.json_schema"
        return Constraint(name, grammar_forms.from_schema(name, form.json_schema.schema_))
    if body.structured_outputs is None:
        return None
    return grammar_forms.constraint_of(body.structured_outputs.params, body.name_of)


async def start(
    frontend: Frontend,
    http: HttpRequest,
    body: SamplingBody,
    prepare: Callable[[], tuple[list[EngineRequest], list[tuple[Sequence[int], EngineRequest | None]]]],
) -> list[Choice]:
    """Prepare engine requests and submit them.

    Args:
        frontend: submits the engine requests.
        http: the request, whose size decides which threads prepare it.
        body: the body of the request.
        prepare: returns the engine requests, and for every text its prompt and its engine request. Runs in a
            thread, since long prompts take their time.
    """
    frontend.check_able()
    pools, size, compiled = frontend.pools, size_of(http), None
    with refusals():
        if body.constrains or (isinstance(body, ChatBody) and body.calls_tools):
            frontend.check_room(pools.for_text(size))
            constraint = await frontend.run_in(pools.for_constraint(size), constraint_of, frontend, body)
            if constraint is not None and frontend.grammars.is_hard(constraint.grammar):
                # Both pools that it needs, so that none is refused after a long wait.
                frontend.check_room(pools.grammars, pools.for_text(size))
                compiled = await frontend.run_in(pools.grammars, frontend.grammars.prepare, constraint)
        engine_requests, plan = await frontend.run_in(
            pools.for_text(size), prepare, admitted=compiled is not None
        )
        output_streams = dict(
            zip(
                (engine_request.id for engine_request in engine_requests),
                frontend.submit(private(frontend, http, engine_requests)),
                strict=True,
            )
        )
    return [
        Choice(index, prompt, None if engine_request is None else output_streams[engine_request.id])
        for index, (prompt, engine_request) in enumerate(plan)
    ]


def size_of(http: HttpRequest) -> int:
    """Bytes of the body; that of a body which does not say counts as long."""
    stated = http.headers.get("content-length", "")
    return int(stated) if stated.isdecimal() else LONG
