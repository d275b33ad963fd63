"""State of one request in the engine, as the host knows it: its text, its place in a row, its metrics."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..request import Request
from ..request.transcript import TRACE_FIELDS, Token, Transcript, Usage
from .adapters import NO_ADAPTER
from .interface import Alternative, Delta, EngineRequest, Grammar, PromptToken
from .output_stream import QueuedOutputStream
from .prefix_cache import PageHash, root_hash
from .row_controllers import RowGains

# Cost of prefilling one token relative to decoding one: a decode step reads all weights for one token a row.
PREFILL_TOKEN_COST = 0.25
SLOWNESS_KEPT = 0.8  # of the seconds of a slow plan, with each later one
WAITING, PREFILL, DECODE, ENDED = "waiting", "prefill", "decode", "ended"
ENTROPY, TEMPERATURE, KEPT, TIME, COST, DRAFTED, ACCEPTED = (
    TRACE_FIELDS.index(name)
    for name in (
        *("entropy", "temperature", "kept_fraction", "entropic_time", "cost"),
        *("num_drafted", "from_draft"),
    )
)


class TokenMetrics(Mapping[str, float]):
    """The metrics of one token by name, a lazy view of one step of a launch."""

    __slots__ = ("_metrics", "_step")

    def __init__(self, metrics: np.ndarray, step: int) -> None:
        """`metrics` float32 `[len(TRACE_FIELDS), steps]` of the row."""
        self._metrics, self._step = metrics, step

    def __getitem__(self, name: str) -> float:
        try:
            return float(self._metrics[TRACE_FIELDS.index(name), self._step])
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(TRACE_FIELDS)

    def __len__(self) -> int:
        return len(TRACE_FIELDS)


class Sequence:
    """A request in the engine. Only the engine's thread changes it.

    Args:
        engine_request: what the client asked for.
        output_stream: takes the deltas.
        prompt: token ids.
        transcript: turns sampled tokens into the completion.
        row_gains: control of its row.
        grammar: takes the place of the request's own and constrains at least as much; None for the
            request's own.
    """

    def __init__(
        self,
        engine_request: EngineRequest,
        output_stream: QueuedOutputStream,
        prompt: tuple[int, ...],
        transcript: Transcript,
        row_gains: RowGains,
        grammar: Grammar | None = None,
    ) -> None:
        self.engine_request, self.output_stream = engine_request, output_stream
        self.prompt, self.transcript, self.row_gains = prompt, transcript, row_gains
        self.stop_tokens: tuple[int, ...] = ()
        self.context_key: Callable[[int], tuple[int, ...]] = lambda length: ()  # of the model
        stated = engine_request.logprobs
        self.logprobs = self.request.logprobs if stated is None else stated  # None: none are reported
        self.stage = WAITING
        self.generated: list[int] = []
        # A grammar's mask is known for the next token alone, so a constrained sequence does not branch.
        self.grammar = engine_request.grammar if grammar is None else grammar
        self.plan: Any = None  # the `grammars.Plan` made last
        self.planning: Any = None  # the `grammar_planner.Planning` that is under way
        self.plan_seconds = math.inf  # that its recent plans took, at most
        self.plan_cost = 0.0  # seconds of a processor that its recent plans took, at most
        self.costly_plans = 0  # plans so far that cost more than a grammar may, again and again
        self.retracted = False  # tokens were drawn under a guessed mask that was wrong, and drawn again
        self.branches = 0 if self.grammar is not None else row_gains.branches  # 0: no search

        # Its row.
        self.row = -1
        self.epoch = 0  # counts admissions and departures: results of an earlier epoch are discarded
        self.prefill_tokens: tuple[int, ...] = ()  # prefilled into the row, and the token decoded after them
        self.num_prefilled = 0  # of them, given to the device
        self.prefill_time = 0.0  # when its last prefill chunk was launched, by `time.perf_counter`
        self.num_replay_tokens = 0  # generated tokens to be replayed step by step after prefill
        self.num_replayed = 0  # of them, collected from the device
        self.num_scheduled = 0  # decode steps given to the device
        self.saved_row: Any = None  # control state, ledger and history from before its preemption
        self.preemptions = 0

        # Its pages.
        self.adapter = NO_ADAPTER
        self.page_hashes: list[PageHash] = []  # of the prompt's full pages
        self.cached_tokens = 0  # of the prompt, found in the prefix cache at the first admission
        self.private_pages = False  # a sparse method wrote them, so no other sequence may share them
        self.compression_pending = False

        # Logprobs of the prompt.
        self.prompt_scores: list[tuple[float, tuple[Alternative, ...]]] = []
        self.prompt_scored = engine_request.prompt_logprobs is None  # none requested, or all computed

        # Times of `time.perf_counter`, and the scheduler's round at arrival.
        self.arrival_time = time.perf_counter()
        self.arrival_round = 0.0
        self.admitted_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

        # Metrics, in the order of TRACE_FIELDS.
        self.metric_sums = np.zeros(len(TRACE_FIELDS))
        self.last_metrics = np.zeros(len(TRACE_FIELDS), np.float32)
        self.cost = 0.0  # roofline seconds, with those of branches and tokens taken back
        self.entropic_priority = 0.0  # π at the last ranking

    @property
    def request(self) -> Request:
        """Prompt and sampling parameters."""
        return self.engine_request.request

    @property
    def root_hash(self) -> PageHash:
        """The hash before the first page of its text."""
        salt = self.engine_request.cache_salt or ""
        return root_hash(self.context_key(len(self.prompt)), self.adapter.id, salt)

    @property
    def remaining_work(self) -> float:
        """Work left if all tokens are generated that may be, in decoded tokens."""
        prefill = 0 if self.generated else len(self.prompt)
        return PREFILL_TOKEN_COST * prefill + self.request.max_tokens - len(self.generated)

    @property
    def work_done(self) -> float:
        """Work so far, in decode steps: prefill counts from the first token on, accepted drafts do not."""
        prefill = len(self.prompt) - self.cached_tokens if self.generated else 0
        return PREFILL_TOKEN_COST * prefill + len(self.generated) - self.num_accepted

    @property
    def max_length(self) -> int:
        """Positions that it holds in the end if all tokens are generated that may be."""
        return len(self.prompt) + self.request.max_tokens

    def slack(self, timestamp: float) -> float:
        """The fraction of the time to its deadline that is left, in [0, 1]; 1 without a deadline."""
        deadline = self.engine_request.deadline
        if deadline is None:
            return 1.0
        return min(1.0, max(0.0, 1 - (timestamp - self.arrival_time) / max(deadline, 1e-3)))

    def rounds_waited(self, rounds: float) -> float:
        """Rounds of admissions since it began to wait; 0 while it has a row."""
        return rounds - self.arrival_round if self.row < 0 else 0.0

    def needs_replay(self, exact: bool) -> bool:
        """Whether prefill would not reproduce its state, so that its tokens must be replayed step by step.

        `exact`: the engine promises the same bits, which prefill of other chunks would not give.
        """
        length = len(self.prompt)
        alike = self.context_key(length) == self.context_key(length + len(self.generated))
        return exact or self.retracted or self.row_gains.pruning or self.private_pages or not alike

    def note_planning(self, seconds: float) -> None:
        """Take note of the seconds that a plan, or its check, took; a slow one counts for some time."""
        before = 0.0 if math.isinf(self.plan_seconds) else self.plan_seconds
        self.plan_seconds = max(seconds, SLOWNESS_KEPT * before)

    @property
    def num_drafted(self) -> int:
        """Drafted tokens that were verified for it."""
        return int(self.metric_sums[DRAFTED])

    @property
    def num_accepted(self) -> int:
        """Its tokens that were drafted and accepted."""
        return int(self.metric_sums[ACCEPTED])

    @property
    def ended(self) -> bool:
        """Whether it has finished or was ended."""
        return self.stage == ENDED

    def describe(self, timestamp: float) -> dict[str, Any]:
        """Its entry of the engine's snapshot, entropies in nats. Any thread may call."""
        return {
            "id": self.engine_request.id,
            "state": self.stage,
            "prompt_tokens": len(self.prompt),
            "tokens": len(self.generated),
            "priority": self.entropic_priority,
            "entropy": float(self.last_metrics[ENTROPY]),
            "temperature": float(self.last_metrics[TEMPERATURE]),
            "kept_fraction": float(self.last_metrics[KEPT]),
            "entropic_time": float(self.last_metrics[TIME]),
            "preemptions": self.preemptions,
            "waited": (self.admitted_time or timestamp) - self.arrival_time,
        }

    def append(
        self, tokens: list[int], metrics: np.ndarray, sums: np.ndarray | None, top_logprobs: Any
    ) -> list[Token]:
        """Append generated tokens, up to the one that ends the text.

        Args:
            tokens: at least one.
            metrics: float32 `[len(TRACE_FIELDS), steps]`, of the tokens.
            sums: the sums of the metrics over all tokens, None where they are not known.
            top_logprobs: arrays of `TopLogprobs`, the first axis being the steps; None without logprobs.

        Returns:
            The tokens whose text is final now.
        """
        final: list[Token] = []
        count = 0
        for step, token in enumerate(tokens):
            logprob, top = (None, ()) if top_logprobs is None else self._logprobs(top_logprobs, step)
            final += self.transcript.add(token, TokenMetrics(metrics, step), logprob, top)
            count += 1
            if self.transcript.finish_reason is not None:
                break
        self.generated += tokens[:count]
        self.metric_sums += metrics[:, :count].sum(1) if sums is None or count < len(tokens) else sums
        self.last_metrics = metrics[:, count - 1]
        return final

    def _logprobs(self, top_logprobs: Any, step: int) -> tuple[float, tuple[Alternative, ...]]:
        logprob, token, values = top_logprobs
        return float(logprob[step]), alternatives(token[step], values[step], self.logprobs or 0)

    def delta(self, tokens: list[Token] | tuple[Token, ...] = (), **fields: Any) -> Delta:
        """A delta of these tokens; with usage and summary if the text has ended."""
        reason = self.transcript.finish_reason
        if reason is None:
            return Delta(tuple(tokens), **fields)
        return Delta(
            tuple(tokens),
            finish_reason=reason,
            stop_reason=self.transcript.stop_reason,
            error=self.transcript.error,
            usage=Usage(len(self.prompt), len(self.generated)),
            cached_tokens=self.cached_tokens,
            summary=self.summary(),
            param=self.failed_param,
            **fields,
        )

    @property
    def failed_param(self) -> str | None:
        """The field of the request that states a constraint which no text can satisfy."""
        failure = None if self.grammar is None else self.grammar.failure
        return None if failure is None else failure.param

    def summary(self) -> dict[str, float]:
        """Metrics of the sequence so far; entropies in nats, times in seconds."""
        count, timestamp = max(len(self.generated), 1), time.perf_counter()
        summary = {
            "entropic_time": float(self.last_metrics[TIME]),
            "mean_entropy": float(self.metric_sums[ENTROPY] / count),
            "kept_fraction": float(self.metric_sums[KEPT] / count) if self.generated else 1.0,
            "cost": self.cost if self.branches else float(self.metric_sums[COST]),
            "queue_time": (self.admitted_time or timestamp) - self.arrival_time,
            "preemptions": self.preemptions,
            "passes": len(self.generated) - self.num_accepted,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
        }
        if self.admitted_time is not None and self.first_token_time is not None:
            summary["prefill_time"] = self.first_token_time - self.admitted_time
        return summary

    def scored_prompt(self, detokenizer: Any) -> tuple[PromptToken, ...]:
        """The tokens of the prompt with their logprobs."""
        scores = [(None, ()), *self.prompt_scores]
        return tuple(
            PromptToken(token, detokenizer.push(token), logprob, top)
            for token, (logprob, top) in zip(self.prompt, scores, strict=True)
        )


def alternatives(tokens: np.ndarray, logprobs: np.ndarray, count: int) -> tuple[Alternative, ...]:
    """The likeliest tokens with their log-probabilities.

    Args:
        tokens: int32 `[k]`, the likeliest first.
        logprobs: float32 `[k]`, their log-probabilities.
        count: how many are reported, at most k.
    """
    return tuple(map(Alternative, tokens[:count].tolist(), logprobs[:count].tolist()))
