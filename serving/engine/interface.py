"""Interface between a front end and the engine: requests go in, deltas come out until one finishes."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ..options.control_options import Control
from ..request import Request, RequestError
from ..request.transcript import Alternative, Token, Usage


class QueueFullError(Exception):
    """A queue is full; `retry_after` is the number of seconds after which to try again."""

    def __init__(self, retry_after: float, kind: str = "requests") -> None:
        super().__init__(f"the queue of {kind} is full; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class PromptToken(NamedTuple):
    """A token of the prompt, with its log-probability given the tokens before it (None for the first)."""

    id: int
    text: str
    logprob: float | None
    top: tuple[Alternative, ...] = ()


LONGEST_FREE_RUN = 64  # tokens for which a guess is used, at most


class FreeRun(NamedTuple):
    """A stretch of text in which a mask stays as it is, for certain or by a guess."""

    pausing: np.ndarray  # tokens that may end it, in bits like those of `Grammar.mask`
    tokens: int | None = None  # by a guess, so many others may come; None: for certain, any number


class Grammar(Protocol):
    """A constraint on the text of one sequence, which follows its tokens.

    `copy`, `forced`, `marks` and `free_run` let the engine plan ahead. They change how fast a text is
    generated, never the text; their defaults plan nothing.
    """

    @property
    def failure(self) -> RequestError | None:
        """Why no text can satisfy the constraint any more, once `mask` or `accept` has raised it."""

    def refuse(self, reason: str) -> Exception:
        """The error with which the engine ends the text, for a reason that follows "must be a grammar"."""
        return RuntimeError(f"it must be one {reason}")

    def mask(self) -> Any:
        """Bits int32 `[ceil(vocabulary / 32)]` of the tokens allowed next (as llguidance fills them)."""

    def accept(self, token: int) -> bool:
        """Take a token; False once nothing may follow it."""

    def copy(self) -> "Grammar | None":
        """The same state, to be advanced apart from this one; None plans no tokens ahead."""
        return None

    def forced(self) -> Sequence[int]:
        """The tokens in which the text that must come next is usually written; () if none must."""
        return ()

    def marks(self) -> Mapping[int, bytes]:
        """The texts of the tokens that are marks: printable ASCII without letters and digits; {} for none."""
        return {}

    def free_run(self) -> FreeRun | None:
        """The stretch of text that begins here in which the mask stays as it is; None if there is none.

        Where it is certain, its set of tokens stays as it is, too, until one of them comes. Where it is a
        guess, the engine compares the masks, and has tokens drawn again whose mask was another. Called after
        `mask`.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One sequence to generate. An HTTP request with n > 1 is n of these, each with its own seed."""

    id: str
    request: Request  # prompt and sampling parameters
    control: Control = field(default_factory=Control)  # preset and gains of this sequence
    priority: int = 0  # smaller is served first
    deadline: float | None = None  # seconds from submission in which it should be done; raises its urgency
    timeout: float | None = None  # seconds from submission after which it ends with finish_reason "error"
    logprobs: int | None = None  # likeliest tokens to report with each token; None is `request.logprobs`
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    grammar: Grammar | None = None
    adapter: str | None = None  # name of the LoRA adapter; None: the model alone
    cache_salt: str | None = None  # only requests with the same one share cached prefixes


class Delta(NamedTuple):
    """New output of one request. The last has a `finish_reason`: "stop", "length", "error" or "abort"."""

    tokens: tuple[Token, ...] = ()  # final, in order; with Token.logprob and Token.top where requested
    prompt: tuple[PromptToken, ...] = ()  # once, before the first token, where prompt logprobs are requested
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    error: str | None = None
    usage: Usage | None = None  # with the last
    cached_tokens: int = 0  # tokens of the prompt found in the prefix cache
    # With the last: entropic_time, mean_entropy, kept_fraction, cost (roofline seconds), and the wall seconds
    # queue_time and, where there was one, prefill_time; and passes of the model that the tokens took, with
    # the drafted tokens verified and accepted in them (passes, num_drafted, num_accepted).
    summary: Mapping[str, float] = {}
    timed_out: bool = False  # with "error": the request's timeout has passed
    param: str | None = None  # with "error": the field of the request that is at fault, if it is one


Pooling = Literal["mean", "last"]  # of the hidden states of a text: over its tokens, or of the last one


SleepMode = Literal["abort", "wait"]  # what happens to running requests: they end, or are waited for


class EmbeddingLimits(NamedTuple):
    """Limits of `Engine.embed`, and the size of its embeddings."""

    tokens: int  # of a text, at most
    dimensions: int  # of an embedding


class Embeddings(NamedTuple):
    """The result of `Engine.embed`."""

    vectors: np.ndarray  # float32 [texts, dimensions]
    rank: int = 0  # of the engine that has computed them


class PrefixCacheReset(NamedTuple):
    """The result of emptying the prefix cache."""

    released_pages: int  # given back to the pool
    pages_in_use: int  # that running sequences hold, and that stay cached


class OutputStream(Protocol):
    """The output of one request as it is generated."""

    engine_request: EngineRequest
    rank: int  # which of several data-parallel engines has the request; 0 where there is one

    def __iter__(self) -> Iterator[Delta]:
        """The deltas as they come, for threads; the last has a finish_reason."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The same for an event loop, which it does not block."""

    def cancel(self) -> None:
        """End the request now, wherever it is; its pages are freed, its last delta says "abort"."""


class Engine(Protocol):
    """The engine as a front end sees it. Every method may be called from any thread."""

    def submit(self, engine_request: EngineRequest) -> OutputStream:
        """Queue a request. Raises QueueFullError, or RequestError where the model cannot serve it."""

    def ready(self) -> bool:
        """Whether the warm-up is over; programs that it left out are compiled when they are first needed."""

    def serves(self) -> bool:
        """Whether most requests can run, if only with some of the programs; the others wait."""

    def failure(self) -> BaseException | None:
        """The exception that has stopped the engine, if any; a stopped engine must be replaced."""

    def snapshot(self) -> Mapping[str, Any]:
        """The state of the engine, as numbers and lists that JSON can hold.

        `running` and `waiting` count requests, `kv_usage` is in [0, 1]. Counted since the start are
        `preemptions`, `prefix_queries` and `prefix_hits` (tokens), `compilations` (after warm-up), and the
        fields of `entropix_branches.SearchCounts` and `output_collector.DraftCounts`. `work_done` since the
        start and `work_left` of the sequences in flight, as predicted from recent ones, are in decode steps.
        `longest_wait` for a first row and `longest_wait_allowed` are in rounds of admissions. `sequences` are
        those in flight, each with `id`, `state` ("waiting", "prefill", "decode"), `prompt_tokens`, `tokens`,
        `priority` (the scheduler's π), `entropy`, `entropic_time` and `waited` (seconds). `presets` are the
        names that requests may state. Where there are several `ranks`, `engines` are the snapshots of each,
        without `sequences`, and every sequence has the rank of its `engine`.
        """

    @property
    def ranks(self) -> int:
        """How many data-parallel engines there are behind this one; 1 if it is one itself."""

    def describe(self) -> Mapping[str, Any]:
        """The configuration of the engine and its model, as JSON can hold it; no part of it is secret."""

    def reset_prefix_cache(self) -> "Future[PrefixCacheReset]":
        """Drop the cached prefixes that no running sequence uses, between two steps of the engine.

        Raises RuntimeError where the engine has stopped.
        """

    def sleep(self, mode: SleepMode) -> "Future[None]":
        """Release the KV pool; requests wait until `wake_up`. Done once it is released.

        Running requests end at once, or are waited for. Raises RequestError where the engine cannot sleep,
        also through the result, and RuntimeError where it has stopped.
        """

    def wake_up(self) -> "Future[None]":
        """Allocate the KV pool again, and run what waits. RuntimeError where the engine has stopped."""

    def is_sleeping(self) -> bool:
        """Whether the KV pool is released."""

    def adapter_paths(self) -> Mapping[str, str]:
        """The directory of every LoRA adapter that requests may name, by its name."""

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, while requests run; returns once requests may name it.

        Args:
            name: the name that requests state.
            path: a directory in PEFT's format.

        Raises:
            RequestError: Adapters are off, the name is taken, no slot is free, or the directory is unusable.
            RuntimeError: The engine has stopped.
        """

    def unload_adapter(self, name: str) -> None:
        """Refuse further requests for a LoRA adapter; those that have it finish with it.

        Raises RequestError where no adapter has this name.
        """

    @property
    def embedding_limits(self) -> EmbeddingLimits:
        """The longest text that `embed` accepts, and the size of an embedding."""

    def embed(self, texts: list[list[int]], pooling: Pooling, stop: Event) -> Embeddings | None:
        """Pooled hidden states after the last norm, not normalised.

        It blocks its thread while requests go on, and runs at the least loaded of several `ranks`. Programs
        are compiled when they are first needed.

        Args:
            texts: token ids of each text.
            pooling: "mean" or "last".
            stop: ends the work between two launches when it is set; the result is None.

        Raises:
            RequestError: The engine cannot embed.
        """

    def close(self, drain: float | None = None, timeout: float | None = None) -> bool:
        """Accept no more requests, let those in flight run for up to `drain` seconds, then end them.

        Args:
            drain: None ends them at once.
            timeout: seconds to wait for the engine's threads, which may compile; None waits for their end.

        Returns:
            Whether the threads have ended.
        """
