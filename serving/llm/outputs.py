"""Results of offline generation: one `RequestOutput` per prompt, with the entropic trace of every token."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..engine.interface import OutputStream, PromptToken
from ..request.transcript import FinishReason, Token

Decode = Callable[[list[int]], str]


class Logprob(NamedTuple):
    """A token's log-probability (natural) before temperature and truncation."""

    logprob: float
    rank: int | None  # 1 for the likeliest token; None beyond the number that was requested, unlike in vLLM
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    `finish_reason` is "stop", "length", or "error", which `error` explains. `stop_reason` is the stop string
    or the stop token of the request that ended the text. `logprobs`, where they were requested, has one
    mapping per token, from token ids to their log-probabilities: the likeliest tokens and the sampled one.
    `summary` is that of the whole text: `entropic_time` and `mean_entropy` (nats), `kept_fraction` (of the KV
    cache that was read), `cost` (roofline seconds), `queue_time` and `prefill_time` (seconds), and the counts
    `passes`, `num_drafted`, `num_accepted` and `preemptions`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    summary: Mapping[str, float] = field(default_factory=dict, repr=False)
    metrics: Sequence[Mapping[str, float]] = field(default=(), repr=False)  # of each token

    @functools.cached_property
    def trace(self) -> dict[str, list[float]]:
        """The measurements of every token by name, each list as long as `token_ids`.

        `entropy` (nats, before temperature), `temperature`, `kept_fraction`, `entropic_time` and the other
        fields of `entropic_jax.Trace`.
        """
        names = tuple(self.metrics[0]) if self.metrics else ()
        return {name: [metrics[name] for metrics in self.metrics] for name in names}

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of all tokens together; None unless `logprobs` were requested."""
        if self.logprobs is None:
            return None
        return sum(line[token].logprob for line, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """The continuations of one prompt. `prompt` is None where token ids were given.

    `prompt_logprobs`, where they were requested, has for each token of the prompt what
    `CompletionOutput.logprobs` has; None for the first token, before which there is none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended, as they have in what `LLM` returns; a field in vLLM."""
        return all(output.finish_reason is not None for output in self.outputs)


class Result(NamedTuple):
    """The result of one sequence."""

    completion: CompletionOutput
    cached_tokens: int  # of its prompt, found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None


def result_of(stream: OutputStream, decode: Decode) -> Result:
    """The result of a sequence that has ended.

    Args:
        stream: its output.
        decode: the text of token ids.
    """
    deltas = list(stream)
    tokens = [token for delta in deltas for token in delta.tokens]
    prompt = [token for delta in deltas for token in delta.prompt]
    last, engine_request = deltas[-1], stream.engine_request
    completion = CompletionOutput(
        index=0,
        text="".join(token.text for token in tokens),
        token_ids=[token.id for token in tokens],
        finish_reason=last.finish_reason,  # type: ignore[arg-type]
        stop_reason=last.stop_reason,
        error=last.error,
        logprobs=None
        if engine_request.request.logprobs is None
        else [logprobs_of(token, decode) for token in tokens],
        summary=last.summary,
        metrics=[token.metrics for token in tokens],
    )
    scored = None
    if engine_request.prompt_logprobs is not None:
        scored = [None if token.logprob is None else logprobs_of(token, decode) for token in prompt]
    return Result(completion, last.cached_tokens, scored)


def logprobs_of(token: Token | PromptToken, decode: Decode) -> dict[int, Logprob]:
    """The log-probabilities of a token and of the likeliest ones in its place, by id.

    Args:
        token: with its own and those of the alternatives.
        decode: the text of token ids.
    """
    line = {
        alternative.id: Logprob(alternative.logprob, rank, decode([alternative.id]))
        for rank, alternative in enumerate(token.top, 1)
    }
    if token.id not in line:
        assert token.logprob is not None
        line[token.id] = Logprob(token.logprob, None, decode([token.id]))
    return line
