"""What one generation is asked for, and what is accepted in each of its fields."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


class RequestError(ValueError):
    """A request that cannot be served; the message is meant for whoever made it."""


class Limit(NamedTuple):
    """The numbers a field accepts: between `low` and `high`, of which `low` may be excluded."""

    kind: type
    low: float
    high: float = math.inf
    above_low: bool = False

    def __str__(self) -> str:
        """The accepted values in words, to end a sentence with."""
        noun = "integers" if self.kind is int else "finite numbers"
        if self.low == -math.inf:
            return noun
        low = f"above {self.low:g}" if self.above_low else f"of at least {self.low:g}"
        return f"{noun} {low}" + ("" if self.high == math.inf else f" and at most {self.high:.10g}")

    def check(self, name: str, value: Any) -> Any:
        """The value as a number of this kind; a RequestError if it is not one that is accepted."""
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        right = not isinstance(value, bool) and (
            whole if self.kind is int else isinstance(value, int | float)
        )
        if not (
            right
            and math.isfinite(value)
            and self.low <= value <= self.high
            and not (self.above_low and value == self.low)
        ):
            raise RequestError(f"{name} is {value!r}; accepted are {self}")
        return self.kind(value)


LIMITS = {
    "max_tokens": Limit(int, 1, 2**31 - 1),
    "temperature": Limit(float, 0),
    "top_k": Limit(int, 0, 2**31 - 1),
    "top_p": Limit(float, 0, 1, above_low=True),
    "min_p": Limit(float, 0, 1),
    "typical_p": Limit(float, 0, 1, above_low=True),
    "top_n_sigma": Limit(float, 0),
    "repetition_penalty": Limit(float, 0, above_low=True),
    "presence_penalty": Limit(float, -math.inf),
    "frequency_penalty": Limit(float, -math.inf),
    "seed": Limit(int, 0, 2**31 - 1),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it; every sampling field is off at its default.

    `prompt` is text or token ids. `top_k` 0, `top_p` 1, `min_p` 0, `typical_p` 1, `top_n_sigma` 0 and
    `repetition_penalty` 1 are off, `temperature` 0 is greedy. The text ends before the first of the `stop`
    strings or of the `stop_token_ids`, with it if `include_stop`; nothing ends it before `min_tokens` are
    there. Raises RequestError, which names the field, its value and what is accepted.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False

    def __post_init__(self) -> None:
        """Check every field and bring it into its one form."""
        for name, limit in LIMITS.items():
            object.__setattr__(self, name, limit.check(name, getattr(self, name)))
        object.__setattr__(self, "prompt", _prompt(self.prompt))
        object.__setattr__(self, "stop", _stop(self.stop))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "min_tokens", Limit(int, 0, 2**31 - 1).check("min_tokens", self.min_tokens))
        object.__setattr__(self, "stop_token_ids", _tokens("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; accepted are true and false")


FIELDS = tuple(field.name for field in fields(Request))


def _prompt(value: Any) -> str | tuple[int, ...]:
    return value if isinstance(value, str) else _tokens("prompt", value, "a string and a list of token ids")


def _tokens(name: str, value: Any, accepted: str = "lists of token ids") -> tuple[int, ...]:
    if isinstance(value, Sequence) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise RequestError(f"{name} is {_short(value)}; accepted are {accepted}")


def _stop(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, Sequence) and all(isinstance(string, str) and string for string in strings):
        return tuple(strings)
    raise RequestError(f"stop is {_short(value)}; accepted are a string that is not empty and a list of such")


def _logit_bias(value: Any) -> dict[int, float]:
    if isinstance(value, Mapping):
        try:
            pairs = {int(token): float(bias) for token, bias in value.items()}
        except (TypeError, ValueError):
            pairs = {-1: 0.0}  # refused below
        if all(token >= 0 and not math.isnan(bias) and bias < math.inf for token, bias in pairs.items()):
            return pairs
    raise RequestError(
        f"logit_bias is {_short(value)}; accepted are pairs of a token id, at least 0, and a number below inf"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
