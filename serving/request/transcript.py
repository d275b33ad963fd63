"""Transcript of one generation: incremental detokenization, stop strings and per-token traces."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from . import Request

FinishReason = Literal["stop", "length", "error", "abort"]

# What the trace of a step says of a token, in the order in which programs stack it; `state.Trace` explains.
TRACE_FIELDS = (
    "entropy",
    "varentropy",
    "tempered_entropy",
    "tempered_varentropy",
    "surprisal",
    "temperature",
    "dropped_mass_limit",
    "kept_fraction",
    "dropped_mass",
    "entropic_time",
    "cost",
    "num_drafted",
    "from_draft",
)


class Alternative(NamedTuple):
    """A token that could have been, with its log-probability (natural) before temperature and truncation."""

    id: int
    logprob: float


class Detokenizer(Protocol):
    """Text of one sequence, piece by piece; incomplete characters wait for the token that ends them."""

    def push(self, token: int) -> str:
        """The text that this token completes."""

    def flush(self) -> str:
        """The text that was still waiting."""


class Token(NamedTuple):
    """One token with the text that became certain with it, and what was measured when it was chosen."""

    id: int
    text: str
    metrics: Mapping[str, float]  # entropies in nats
    finish_reason: FinishReason | None = None  # set on the last token only
    logprob: float | None = None  # before temperature and truncation, where it was asked for
    top: tuple[Alternative, ...] = ()  # the likeliest, in order; the token itself may be among them


class Usage(NamedTuple):
    """How many tokens a generation took and made."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """A finished generation; the lists of `trace` are as long as `token_ids`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    trace: dict[str, list[float]]
    error: str | None = None

    @property
    def num_drafted(self) -> int:
        """Drafted tokens that were verified."""
        return int(sum(self.trace.get("num_drafted", ())))

    @property
    def num_accepted(self) -> int:
        """Tokens that were drafted and accepted."""
        return int(sum(self.trace.get("from_draft", ())))

    @property
    def passes(self) -> int:
        """Passes of the model that the tokens took; one a token without drafts."""
        return len(self.token_ids) - self.num_accepted

    def as_json(self) -> dict[str, Any]:
        """A tree of what JSON can hold; a number that is not finite becomes null."""
        tree = asdict(self)
        tree["usage"] = {**self.usage._asdict(), "total_tokens": self.usage.total_tokens}
        tree["trace"] = {
            name: [value if math.isfinite(value) else None for value in values]
            for name, values in self.trace.items()
        }
        tree |= {name: getattr(self, name) for name in ("passes", "num_drafted", "num_accepted")}
        if self.error is None:
            del tree["error"]
        return tree


class Transcript:
    """The record of one generation while it grows.

    A token is handed out once its text is settled: text that may turn out to be the beginning of a stop
    string is held back with its token. Every token is handed out in the end, in order, those that a stop
    string cut off with their text removed.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer,
        prompt_tokens: int,
        eos: Collection[int] = (),
        keep: bool = True,
    ) -> None:
        """Start without a token.

        Args:
            request: whose completion it records.
            detokenizer: turns tokens into text as they come.
            prompt_tokens: length of the prompt.
            eos: tokens that end a text; they count as tokens but have no text.
            keep: whether measures are kept for the trace of the completion; else they are handed out and
                forgotten.
        """
        self.stop_reason: str | int | None = None  # the string or token of the request that ended it
        self.request = request
        self.detokenizer = detokenizer
        self.prompt_tokens = prompt_tokens
        self.eos = frozenset() if request.ignore_eos else frozenset(eos)
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._trace: dict[str, list[float]] = {}
        self._held: list[Token] = []
        self._held_text = ""
        self._overlaps = dict.fromkeys(request.stop, 0)  # of the text held back with each stop string
        self._keep = keep

    def add(
        self,
        token: int,
        metrics: Mapping[str, float],
        logprob: float | None = None,
        top: tuple[Alternative, ...] = (),
    ) -> list[Token]:
        """Record a sampled token; returns the tokens that are settled now, none or several.

        Args:
            token: sampled.
            metrics: measures of the token, by name.
            logprob: the logprob of the token, if reported.
            top: the likeliest tokens, if reported.
        """
        if self.finish_reason is not None:
            raise ValueError(f"no token can follow finish_reason {self.finish_reason!r}; got {token}")
        self._token_ids.append(token)
        for name, value in metrics.items() if self._keep else ():
            self._trace.setdefault(name, []).append(float(value))
        requested = token in self.request.stop_token_ids
        ended = (requested or token in self.eos) and self._may_end()
        silent = ended and not (requested and self.request.include_stop_str_in_output)
        text = "" if silent else self.detokenizer.push(token)
        new = Token(token, text, metrics, logprob=logprob, top=top)
        if not (ended or self._held or self.request.stop or len(self._token_ids) >= self.request.max_tokens):
            self._text.append(text)
            return [new]  # as below, but nothing can hold it back
        self._held.append(new)
        self._held_text += text
        if ended:
            self.stop_reason = token if requested else None
            return self.finish("stop")
        if self._cut_at_stop() or len(self._token_ids) >= self.request.max_tokens:
            return self.finish("length")  # unless it was cut
        return self._release(self._safe())

    def finish(self, reason: FinishReason, error: str | None = None) -> list[Token]:
        """End the text for a reason from outside, as a full context; returns the tokens held back."""
        if self.finish_reason is None and self._held:
            last, rest = self._held[-1], self.detokenizer.flush()
            self._held[-1] = last._replace(text=last.text + rest)
            self._held_text += rest
            self._cut_at_stop()
        self.finish_reason = self.finish_reason or reason
        self.error = self.error or error
        tokens = self._release(len(self._held))
        return [*tokens[:-1], tokens[-1]._replace(finish_reason=self.finish_reason)] if tokens else []

    def completion(self) -> Completion:
        """The record, once the text has ended."""
        if self.finish_reason is None:
            raise ValueError("the text must have ended before its completion is taken; finish_reason is None")
        return Completion(
            "".join(self._text),
            list(self._token_ids),
            self.finish_reason,
            Usage(self.prompt_tokens, len(self._token_ids)),
            {name: list(values) for name, values in self._trace.items()},
            self.error,
        )

    def _may_end(self) -> bool:
        """Whether the latest token is past those before which nothing ends the text."""
        return len(self._token_ids) > self.request.min_tokens

    def _cut_at_stop(self) -> bool:
        """Cut the text held back before the first stop string in it, if there is one."""
        if not self._may_end():
            return False
        text = self._held_text
        places = [(place, stop) for stop in self.request.stop if (place := text.find(stop)) >= 0]
        if not places:
            return False
        left, stop = min(places)
        left += len(stop) if self.request.include_stop_str_in_output else 0
        self.stop_reason = stop
        for i, token in enumerate(self._held):
            self._held[i] = token._replace(text=token.text[: max(left, 0)])
            left -= len(token.text)
        self.finish_reason = "stop"
        return True

    def _safe(self) -> int:
        """How many of the tokens held back cannot be part of a stop string any more."""
        if not self._may_end():
            return len(self._held)
        text, new = self._held_text, len(self._held[-1].text)
        for stop, before in self._overlaps.items():
            self._overlaps[stop] = _overlap(text, stop, before + new)
        waiting, end = max(self._overlaps.values(), default=0), 0
        for i, token in enumerate(self._held):
            end += len(token.text)
            if end > len(text) - waiting:
                return i
        return len(self._held)

    def _release(self, count: int) -> list[Token]:
        if not count:
            return []
        tokens, self._held = self._held[:count], self._held[count:]
        self._held_text = self._held_text[sum(len(token.text) for token in tokens) :]
        self._text += [token.text for token in tokens]
        return tokens


def _overlap(text: str, stop: str, most: int) -> int:
    """Length of the longest beginning of `stop`, short of all of it, that `text` ends with.

    Args:
        text: the text held back.
        stop: the stop string.
        most: the longest that is possible, as a token makes an overlap longer by its own text at most.
    """
    longest = min(len(text), len(stop) - 1, most)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
