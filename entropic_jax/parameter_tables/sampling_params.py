"""Sampling parameters of one sequence: the table that every interface is derived from.

The command line, the HTTP schema, `sampling.parameters`, the engine and the documentation read the fields of
`SamplingParams`. A new parameter needs a field here, one in `state.Sampling` if it is applied on the device,
and the code that applies it. Names are vLLM's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .structured_outputs import StructuredOutputsParams
from .table import (
    LARGEST_INT,
    Flag,
    Number,
    ParameterError,
    Strings,
    Table,
    TokenBiases,
    TokenIds,
    parameter,
    parameters_of,
    refuses_unknown,
    short,
)

DEVICE, HOST, ENGINE, OUTPUT = "device", "host", "engine", "output"
"""Who applies a parameter: the sampler, per row; the host side of any generation; the serving engine alone;
the code that writes the answer."""

_PROBABILITY = Number(float, 0, 1, above_low=True)
_PENALTY = Number(float, -2, 2)
LARGEST_VOCABULARY = 2**20  # tokens
RANDOM_SEED = -1  # stands for one that is drawn anew
_LARGE = 1000  # beyond it, a temperature or a divisor of logits makes no difference


INSTEAD = {
    "best_of": "use n, and choose by cumulative_logprob",
    "do_sample": "temperature=0 is greedy",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "num_return_sequences": "use n",
    "stop_sequences": "use stop",
    "use_beam_search": "there is no beam search; use n, and choose by cumulative_logprob",
}
"""Replacements for parameters of vLLM and Transformers."""


@refuses_unknown(INSTEAD)
@dataclass(frozen=True, kw_only=True)
class SamplingParams(Table):
    """How to continue a prompt. Every default is off, except `max_tokens` and `temperature`.

    `min_tokens` is at most `max_tokens`. Raises ParameterError, a ValueError, which names the parameter, the
    accepted values and the value. A parameter that does not exist is a TypeError, which suggests another.

    >>> SamplingParams(temperature=0.7, stop="END").stop
    ('END',)
    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
    entropic_jax.parameter_tables.table.ParameterError: top_p must be a number above 0 and at most 1; got 0
    >>> SamplingParams(max_new_tokens=8)
    Traceback (most recent call last):
    TypeError: SamplingParams has no parameter max_new_tokens; did you mean max_tokens?
    """

    max_tokens: int = parameter(
        256, Number(int, 1, LARGEST_INT), "most tokens to generate", unit="tokens", scope=HOST
    )
    temperature: float = parameter(
        1.0, Number(float, 0, _LARGE), "divides the logits; 0 is greedy", scope=DEVICE
    )
    top_k: int = parameter(
        0, Number(int, -1, LARGEST_INT), "sample from this many tokens only; 0 and -1 are off", scope=DEVICE
    )
    top_p: float = parameter(
        1.0,
        _PROBABILITY,
        "sample from the likeliest tokens that hold this probability; 1 is off",
        scope=DEVICE,
    )
    min_p: float = parameter(
        0.0,
        Number(float, 0, 1),
        "drop tokens less likely than this fraction of the likeliest; 0 is off",
        scope=DEVICE,
    )
    typical_p: float = parameter(
        1.0,
        _PROBABILITY,
        "sample from the most typical tokens that hold this probability; 1 is off",
        scope=DEVICE,
    )
    top_n_sigma: float = parameter(
        0.0,
        Number(float, 0, _LARGE),
        "keep tokens within this many standard deviations of the largest logit; 0 is off",
        scope=DEVICE,
    )
    epsilon_cutoff: float = parameter(
        0.0, Number(float, 0, 1), "drop tokens less likely than this; 0 is off", scope=DEVICE
    )
    eta_cutoff: float = parameter(
        0.0,
        Number(float, 0, 1),
        "drop tokens less likely than this and than its root times e to the power of minus the entropy; "
        "0 is off",
        scope=DEVICE,
    )
    top_h: float = parameter(
        1.0,
        _PROBABILITY,
        "sample from the likeliest tokens whose entropy is at most this fraction of that of all; 1 is off",
        scope=DEVICE,
    )
    xtc_probability: float = parameter(
        0.0,
        Number(float, 0, 1),
        "how often tokens above xtc_threshold are dropped, all but the least likely of them; 0 is off",
        scope=DEVICE,
    )
    xtc_threshold: float = parameter(
        0.1,
        Number(float, 0, 0.5),
        "the probability from which on tokens are dropped by xtc_probability",
        scope=DEVICE,
    )
    repetition_penalty: float = parameter(
        1.0,
        Number(float, 1 / _LARGE, _LARGE),
        "divides the logits of tokens in the prompt or the text; 1 is off",
        scope=DEVICE,
    )
    presence_penalty: float = parameter(
        0.0,
        _PENALTY,
        "subtracted from the logits of tokens in the text; 0 is off",
        scope=DEVICE,
    )
    frequency_penalty: float = parameter(
        0.0,
        _PENALTY,
        "subtracted from the logits of tokens in the text, once per occurrence; 0 is off",
        scope=DEVICE,
    )
    dry_multiplier: float = parameter(
        0.0,
        Number(float, 0, 100),
        "subtracted from the logit of a token that would go on repeating a run of the latest 256 tokens, "
        "times dry_base for each token of the run above dry_allowed_length; 0 is off",
        scope=DEVICE,
    )
    dry_base: float = parameter(
        1.75, Number(float, 1, 10), "growth of the penalty of dry_multiplier with each token", scope=DEVICE
    )
    dry_allowed_length: int = parameter(
        2,
        Number(int, 1, 32),
        "the shortest run that dry_multiplier penalises",
        unit="tokens",
        scope=DEVICE,
    )
    logit_bias: Mapping[int, float] = parameter(
        {}, TokenBiases(-100, 100, 300), "added to the logits of these tokens; -inf bans one", scope=HOST
    )
    seed: int | None = parameter(
        None,
        Number(int, -(2**63), 2**63 - 1, optional=True),
        "seed of the random draws, modulo 2³¹; random if omitted or -1",
        scope=HOST,
    )
    stop: str | Sequence[str] = parameter(
        (), Strings(64, 1024), "the text ends before the first of these strings", scope=HOST
    )
    stop_token_ids: Sequence[int] = parameter(
        (), TokenIds(16), "the text ends at the first of these tokens", scope=HOST
    )
    include_stop_str_in_output: bool = parameter(
        False, Flag(), "keep the stop string or token that ended the text", scope=HOST
    )
    ignore_eos: bool = parameter(False, Flag(), "continue past the model's end-of-text token", scope=HOST)
    min_tokens: int = parameter(
        0,
        Number(int, 0, LARGEST_INT),
        "nothing ends the text before it has this many",
        unit="tokens",
        scope=HOST,
    )
    allowed_token_ids: Sequence[int] | None = parameter(
        None,
        TokenIds(LARGEST_VOCABULARY, optional=True),
        "sample from these tokens only; null allows all",
        scope=ENGINE,
    )
    bad_words: str | Sequence[str] = parameter(
        (), Strings(256, 256), "the text has none of these, matched as tokenized on their own", scope=ENGINE
    )
    n: int = parameter(
        1,
        Number(int, 1, 128),
        "continuations of each prompt; continuation k draws with seed + k",
        scope=OUTPUT,
    )
    logprobs: int | None = parameter(
        None,
        Number(int, 0, 20, optional=True),
        "report each token's log-probability and those of this many likeliest tokens",
        unit="tokens",
        scope=OUTPUT,
    )
    prompt_logprobs: int | None = parameter(
        None,
        Number(int, 0, 20, optional=True),
        "report the same for each token of the prompt but the first",
        unit="tokens",
        scope=OUTPUT,
    )

    # A constraint on the text. Command line and HTTP API have forms of their own for it.
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Check every parameter and bring it into its normal form."""
        super().__post_init__()
        stated = self.structured_outputs
        if stated is not None and not isinstance(stated, StructuredOutputsParams):
            message = f"structured_outputs must be StructuredOutputsParams or None; got {short(stated)}"
            raise ParameterError(message, "structured_outputs")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "seed", normal_seed(self.seed))
        check_min_tokens(self.min_tokens, self.max_tokens)


def normal_seed(seed: int | None) -> int | None:
    """The seed modulo 2³¹, as the device takes it; None, as in vLLM, for -1: draw one anew.

    >>> normal_seed(2**31 + 5), normal_seed(-2), normal_seed(-1)
    (5, 2147483646, None)
    """
    return None if seed is None or seed == RANDOM_SEED else seed % 2**31


def check_min_tokens(min_tokens: int, max_tokens: int, limit: str = "max_tokens") -> None:
    """Raises ParameterError if a text must have more tokens than it may have.

    Args:
        min_tokens: as `SamplingParams` has it.
        max_tokens: as `SamplingParams` has it, or 0.
        limit: the user's name for `max_tokens`.
    """
    if min_tokens > max_tokens:
        message = f"min_tokens must be at most {limit}, {max_tokens}; got {min_tokens}"
        raise ParameterError(message, "min_tokens")


PARAMETERS = {line.name: line for line in parameters_of(SamplingParams)}
"""Every sampling parameter by name."""

DEVICE_PARAMETERS = {line.name: line for line in parameters_of(SamplingParams, (DEVICE,))}
"""Parameters that `state.Sampling` holds, one number per row."""

IN_GENERATION_CONFIG = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_h",
    "repetition_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
)


def recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a model's generation_config.json recommends.

    >>> recommended({"temperature": 0.6, "top_p": None, "eos_token_id": 2})
    {'temperature': 0.6}
    >>> recommended({"temperature": 0.6, "do_sample": False})
    {'temperature': 0.0}
    """
    if generation_config.get("do_sample") is False:
        return {"temperature": 0.0}
    stated = {name: generation_config.get(name) for name in IN_GENERATION_CONFIG}
    return {name: value for name, value in stated.items() if value is not None}
