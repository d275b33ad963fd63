"""What passes between a front end and the engine: a job goes in, deltas come out until one finishes it."""

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..control_options import Control
from ..request import Request
from ..transcript import Alternative, Token, Usage


class QueueFullError(Exception):
    """The engine takes no more jobs now; `retry_after` says in how many seconds it may."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class PromptToken(NamedTuple):
    """A token of the prompt: how likely it was after those before it. None for the first."""

    id: int
    text: str
    logprob: float | None
    top: tuple[Alternative, ...] = ()


class Grammar(Protocol):
    """What a text may be: follows the tokens of one sequence, and says which may come next."""

    def mask(self) -> Any:
        """Bits int32 `[ceil(vocabulary / 32)]` of the tokens allowed next (as llguidance fills them)."""

    def accept(self, token: int) -> bool:
        """Take a token; False once nothing may follow it."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One sequence to continue. A request with n > 1 is several jobs with seeds of their own."""

    id: str
    request: Request  # the prompt as token ids, and how to sample
    control: Control = field(default_factory=Control)  # preset and gains, per sequence
    priority: int = 0  # a smaller number goes first
    deadline: float | None = None  # seconds from submission in which it should be done; urgency rises
    timeout: float | None = None  # seconds from submission after which it is ended (finish_reason "error")
    alternatives: int | None = None  # most likely tokens to report beside each token; None: no logprobs
    prompt_alternatives: int | None = None  # the same of the prompt's tokens
    grammar: Grammar | None = None


class Delta(NamedTuple):
    """News of one job. The last has a `finish_reason`: "stop", "length", "error" or "abort"."""

    tokens: tuple[Token, ...] = ()  # settled, in order; Token.logprob and Token.top where asked for
    prompt: tuple[PromptToken, ...] = ()  # once, before the first token, where asked for
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    error: str | None = None
    usage: Usage | None = None  # with the last
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    # With the last: entropic_time, mean_entropy, kept_fraction, certificate, cost (roofline seconds), and the
    # wall seconds queue_time and, where there was one, prefill_time.
    summary: Mapping[str, float] = {}
    timed_out: bool = False  # with "error": the job's timeout has passed


class OutputStream(Protocol):
    """A job in the engine's hands."""

    engine_request: EngineRequest

    def __iter__(self) -> Iterator[Delta]:
        """The deltas, as they come; the last has a finish_reason. For threads."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The same in an event loop, which it does not block."""

    def cancel(self) -> None:
        """End the job now, wherever it is; its pages are returned, its last delta says "abort"."""


class Engine(Protocol):
    """The engine as a front end sees it. Every method may be called from any thread."""

    def submit(self, engine_request: EngineRequest) -> OutputStream:
        """Take a job. Raises QueueFullError, or RequestError where the model cannot serve it."""

    def ready(self) -> bool:
        """Whether the programs are compiled and jobs run at full speed."""

    def failure(self) -> BaseException | None:
        """What has ended the engine, where something has: it takes no more jobs, and has to be made anew."""

    def snapshot(self) -> Mapping[str, Any]:
        """What is going on, as numbers and lists that JSON can hold.

        `running` and `waiting` jobs, `kv_usage` in [0, 1], and since the start `preemptions`,
        `prefix_queries` and `prefix_hits` (tokens), `compilations` (after warm-up), `longest_wait` for a
        first row and `longest_wait_allowed`, both in rounds of admissions, and what searches came to
        (`entropix_branches.Tally`). `sequences` are those in flight, each with `id`, `state` ("waiting",
        "prefill", "decode"), `prompt_tokens`, `tokens`, `priority` (the scheduler's π), `entropy`,
        `entropic_time`, `waited` (seconds).
        """

    def close(self, drain: float | None = None) -> None:
        """Stop: take no more jobs, let those in flight run for up to `drain` seconds, then end them."""
