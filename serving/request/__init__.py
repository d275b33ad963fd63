"""Generation requests: a prompt and its sampling parameters.

`chat_template` makes the prompt of a conversation, `transcript` records the text that is generated for it.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from entropic_jax.parameter_tables.sampling_params import HOST, SamplingParams
from entropic_jax.parameter_tables.table import (
    LARGEST_INT,
    Number,
    ParameterError,
    check_unicode,
    parameter,
    short,
)


class RequestError(ParameterError):
    """A request that cannot be served; the message and `param` are for its sender."""


@dataclass(frozen=True, kw_only=True)
class Request(SamplingParams):
    """A prompt, as text or token ids, and how to continue it.

    Raises RequestError, which names the field, the accepted values and the value.
    """

    prompt: str | Sequence[int]
    seed: int = parameter(
        0, Number(int, -(2**63), 2**63 - 1), "of the random draws, modulo 2³¹; -1 draws one anew", scope=HOST
    )

    def __post_init__(self) -> None:
        """Check every field and bring it into its normal form."""
        try:
            super().__post_init__()
            prompt = _prompt(self.prompt)
        except ParameterError as error:
            raise RequestError(str(error), error.param) from None
        if self.seed is None:  # -1 was stated
            object.__setattr__(self, "seed", secrets.randbelow(2**31))
        object.__setattr__(self, "prompt", prompt)

    @classmethod
    def of(cls, prompt: str | Sequence[int], params: SamplingParams, seed: int = 0) -> "Request":
        """The request of a prompt.

        Args:
            prompt: text or token ids.
            params: the parameters of sampling.
            seed: for params without one.
        """
        values: dict[str, Any] = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
        values["seed"] = seed if params.seed is None else params.seed
        return cls(prompt=prompt, **values)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        check_unicode("prompt", value)
        return value
    if isinstance(value, Sequence) and all(
        type(token) is int and 0 <= token <= LARGEST_INT for token in value
    ):
        return tuple(value)
    raise RequestError(f"prompt must be a string or a list of token ids; got {short(value)}", "prompt")
