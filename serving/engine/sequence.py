"""What the host knows of one job: its text so far, where it is, what was measured of it."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..transcript import TRACE_FIELDS, Token, Transcript, Usage
from .interface import Alternative, Delta, EngineRequest, PromptToken
from .output_stream import QueuedOutputStream
from .prefix_cache import PageHash
from .row_controllers import RowGains

# What a token of a prompt takes, as a part of one that is generated, for which weights are read once more.
PROMPT_TOKEN = 0.25
WAITING, PREFILL, DECODE, ENDED = "waiting", "prefill", "decode", "ended"
ENTROPY, TEMPERATURE, KEPT, CERTIFICATE, TIME, COST = (
    TRACE_FIELDS.index(name)
    for name in ("entropy", "temperature", "kept_fraction", "certificate", "entropic_time", "cost")
)


class TokenMetrics(Mapping[str, float]):
    """What was measured when a token was chosen: one column of a launch, read when it is asked for."""

    __slots__ = ("_column", "_step")

    def __init__(self, column: np.ndarray, step: int) -> None:
        """`column` float32 `[len(MEASURES), steps]` of the row."""
        self._column, self._step = column, step

    def __getitem__(self, name: str) -> float:
        try:
            return float(self._column[TRACE_FIELDS.index(name), self._step])
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(TRACE_FIELDS)

    def __len__(self) -> int:
        return len(TRACE_FIELDS)


class Sequence:
    """A job in the engine. Only the engine's thread changes it."""

    def __init__(
        self,
        engine_request: EngineRequest,
        output_stream: QueuedOutputStream,
        prompt: tuple[int, ...],
        transcript: Transcript,
        row_gains: RowGains,
    ) -> None:
        self.engine_request, self.output_stream, self.prompt, self.transcript, self.row_gains = (
            engine_request,
            output_stream,
            prompt,
            transcript,
            row_gains,
        )
        self.stage = WAITING
        self.generated: list[int] = []
        self.row = -1
        self.epoch = 0  # counts placements: what came of an earlier one is not ours any more
        self.prefill_tokens: tuple[int, ...] = ()  # what the row reads before it runs, and the token after it
        self.num_prefilled = 0  # positions of it given to the device
        self.num_replay_tokens = 0  # tokens that the row is told again after that, instead of drawing them
        self.num_scheduled = 0  # tokens that it was given steps for
        self.num_replayed = 0  # tokens told again that have come back
        self.parked: Any = None  # state of the row when it was preempted
        self.prompt_keys: list[PageHash] = []
        self.used: list[PageHash] = []  # of the prefix cache
        self.cached_tokens = 0
        self.prompt_scores: list[tuple[float, tuple[Alternative, ...]]] = []
        self.scored = engine_request.prompt_alternatives is None  # or what was asked of the prompt is known
        self.arrival = time.perf_counter()
        self.arrival_round = 0.0
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.preemptions = 0
        self.sums = np.zeros(len(TRACE_FIELDS))
        self.last = np.zeros(len(TRACE_FIELDS), np.float32)
        self.certificate = 0.0
        self.priority = 0.0  # π when it was last looked at

        self.stops: tuple[int, ...] = ()
        self.private = False  # its pages are not what others would make of the same text
        self.pending = False  # its prompt is still to be compressed
        self.spent = 0.0  # roofline seconds, branches and tokens taken back included
        # What a grammar allows is known for the next token alone.
        self.branches = (
            0 if engine_request.grammar is not None else row_gains.branches
        )  # 0: it does not search

    @property
    def left(self) -> float:
        """What is left to compute, if all tokens are generated that may be, in tokens generated."""
        unread = 0 if self.generated else len(self.prompt)
        return PROMPT_TOKEN * unread + self.engine_request.request.max_tokens - len(self.generated)

    @property
    def most(self) -> int:
        """Positions that it holds in the end, if all tokens are generated that may be."""
        return len(self.prompt) + self.engine_request.request.max_tokens

    def slack(self, now: float) -> float:
        """The share of the time to its deadline that is left, 1 without one."""
        deadline = self.engine_request.deadline
        return 1.0 if deadline is None else min(1.0, max(0.0, 1 - (now - self.arrival) / max(deadline, 1e-3)))

    def waited(self, rounds: float) -> float:
        """Rounds of admissions since it began to wait."""
        return rounds - self.arrival_round if self.row < 0 else 0.0

    def replays(self, exact: bool) -> bool:
        """Whether reading its text would not make of it what its steps made: it is told its tokens again."""
        return exact or self.row_gains.pruning or self.private

    @property
    def ended(self) -> bool:
        return self.stage == ENDED

    def describe(self, now: float) -> dict[str, Any]:
        """What may be shown of it, entropies in nats; another thread than the engine's may call."""
        return {
            "id": self.engine_request.id,
            "state": self.stage,
            "prompt_tokens": len(self.prompt),
            "tokens": len(self.generated),
            "priority": self.priority,
            "entropy": float(self.last[ENTROPY]),
            "temperature": float(self.last[TEMPERATURE]),
            "kept_fraction": float(self.last[KEPT]),
            "entropic_time": float(self.last[TIME]),
            "preemptions": self.preemptions,
            "waited": (self.admitted or now) - self.arrival,
        }

    def extend(
        self, tokens: list[int], column: np.ndarray, sums: np.ndarray | None, tops: Any
    ) -> list[Token]:
        """Enter tokens and their measures `[len(MEASURES), steps]`; returns those that are settled.

        `sums` of the measures over the tokens are taken as they are, unless the text ends before the last.
        """
        settled: list[Token] = []
        add, taken = self.transcript.add, 0
        for step, token in enumerate(tokens):
            if tops is None:
                settled += add(token, TokenMetrics(column, step))
            else:
                settled += add(token, TokenMetrics(column, step), *self._alternatives(tops, step))
            taken += 1
            if self.transcript.finish_reason is not None:
                break
        self.generated += tokens[:taken]
        self.sums += column[:, :taken].sum(1) if sums is None or taken < len(tokens) else sums
        self.last = column[:, taken - 1]
        if self.row_gains.pruning:
            self.certificate = max(self.certificate, float(column[CERTIFICATE, :taken].max()))
        return settled

    def _alternatives(self, tops: Any, step: int) -> tuple[float, tuple[Alternative, ...]]:
        logprob, token, values = tops
        return float(logprob[step]), alternatives(
            token[step], values[step], self.engine_request.alternatives or 0
        )

    def delta(self, tokens: list[Token] | tuple[Token, ...] = (), **given: Any) -> Delta:
        """News; with the last, the account."""
        reason = self.transcript.finish_reason
        if reason is None:
            return Delta(tuple(tokens), **given)
        return Delta(
            tuple(tokens),
            finish_reason=reason,
            stop_reason=self.transcript.stop_reason,
            error=self.transcript.error,
            usage=Usage(len(self.prompt), len(self.generated)),
            cached_tokens=self.cached_tokens,
            summary=self.summary(),
            **given,
        )

    def summary(self) -> dict[str, float]:
        """What became of the whole sequence; entropies in nats, times in seconds."""
        count, now = max(len(self.generated), 1), time.perf_counter()
        found = {
            "entropic_time": float(self.last[TIME]),
            "mean_entropy": float(self.sums[ENTROPY] / count),
            "kept_fraction": float(self.sums[KEPT] / count) if self.generated else 1.0,
            "certificate": self.certificate,
            "cost": self.spent if self.branches else float(self.sums[COST]),
            "queue_time": (self.admitted or now) - self.arrival,
            "preemptions": float(self.preemptions),
        }
        if self.admitted is not None and self.first_token is not None:
            found["prefill_time"] = self.first_token - self.admitted
        return found

    def prompt_tokens(self, detokenizer: Any) -> tuple[PromptToken, ...]:
        """The prompt with what was asked of it."""
        scores = [(None, ()), *self.prompt_scores]
        return tuple(
            PromptToken(token, detokenizer.push(token), logprob, top)
            for token, (logprob, top) in zip(self.prompt, scores, strict=True)
        )


def alternatives(tokens: np.ndarray, logprobs: np.ndarray, count: int) -> tuple[Alternative, ...]:
    """The first `count` of the likeliest tokens."""
    return tuple(map(Alternative, tokens[:count].tolist(), logprobs[:count].tolist()))
