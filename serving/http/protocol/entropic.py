"""The `entropic` extension of requests and answers: control gains in, entropic time and traces out."""

from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from entropic_jax.parameter_tables.control_gains import GAINS, MACRO, PRESET_TABLE
from entropic_jax.parameter_tables.speculation_names import DRAFTERS
from entropic_jax.parameter_tables.table import Choice, Flag, Parameter

from ...options.control_options import (
    BRANCHES,
    LOWEST_TEMPERATURE,
    SAMPLERS,
    Control,
    check_preset,
    check_temperature,
)
from .fields import Answer, optional_fields

REQUEST_PRESETS = {name: line.help for name, line in PRESET_TABLE.items() if name != "paper"}
ACCEPTED_PRESETS = (*REQUEST_PRESETS, *SAMPLERS)
PRESET_HELP = (
    "; ".join(f"{name}: {text}" for name, text in REQUEST_PRESETS.items())
    + "; or the sampler of a server that was started with it"
)
BRANCHES_HELP = "of entropix: continuations to compare, at most as many as the server compares"
PER_REQUEST = (
    *(line for line in GAINS.values() if line.scope != MACRO),  # the engine has one schedule
    Parameter("branches", None, BRANCHES, "", BRANCHES_HELP, ""),
)
PRESET = Parameter("preset", None, Choice(ACCEPTED_PRESETS), "", PRESET_HELP, "")
SPECULATE_HELP = "off drafts no tokens for this request; otherwise the drafter of the server"
SPECULATE = Parameter("speculate", None, Choice(DRAFTERS), "", SPECULATE_HELP, "")
TRACE = Parameter("trace", False, Flag(), "", "return each token's trace with the answer", "")
FIELDS = {line.name: line for line in (PRESET, *PER_REQUEST, SPECULATE, TRACE)}
"""Every field of the object `entropic` in a request."""
GainFields: Any = optional_fields("GainFields", (PRESET, *PER_REQUEST, SPECULATE))


class Entropic(GainFields):
    """Control by entropy for this request; what is left out is as the server was started.

    "auto" takes the value of the model's calibration. An unknown field is refused, since a misspelled gain
    would otherwise be ignored silently.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    trace: bool | None = Field(False, description=TRACE.help)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, fields: Any) -> Any:
        """The object with no more than one unknown field, since an error for each might be millions."""
        unknown = [name for name in fields if name not in FIELDS] if isinstance(fields, dict) else []
        known = FIELDS.keys() | unknown[:1]
        return {name: value for name, value in fields.items() if name in known} if unknown else fields

    def control(self, default: Control, temperature: float) -> Control:
        """The server's control with what this request changes.

        Raises ParameterError for a gain of this request that its preset would ignore or its temperature
        contradicts. Gains that the server was started with are defaults: a preset takes those that it has a
        use for.

        Args:
            default: the server's control.
            temperature: the temperature that the request asks for.
        """
        gains: dict[str, Any] = {}
        for line in PER_REQUEST:
            if (value := getattr(self, line.name)) is not None:
                gains[line.name] = line.accepts.check(line.name, value)
        control = default._replace(preset=self.preset or default.preset, gains=tuple(gains.items()))
        check_preset(control)
        control = control._replace(
            speculate=self.speculate, gains=tuple({**dict(default.gains), **gains}.items())
        )
        if LOWEST_TEMPERATURE in gains:
            check_temperature(control, temperature)
        return control


class Trace(Answer):
    """Measurements of each token, in lists as long as the tokens of this object."""

    token_ids: list[int]
    text: list[str]
    entropy: list[float | None]
    tempered_entropy: list[float | None]
    temperature: list[float | None]
    kept_fraction: list[float | None]
    surprisal: list[float | None]
    entropic_time: list[float | None]
    dropped_mass_limit: list[float | None]
    from_draft: list[float | None]  # 1 where the token was drafted and accepted


class EntropicResult(Answer):
    """Summary of a choice in entropic time; entropies in nats."""

    entropic_time: float | None = None
    mean_entropy: float | None = None
    kept_fraction: float | None = None
    cost: float | None = None  # roofline seconds
    passes: int | None = None  # of the model, that the tokens took
    num_drafted: int | None = None  # drafted tokens that were verified in them
    num_accepted: int | None = None  # and accepted
    trace: Trace | None = None


TRACED = tuple(name for name in Trace.model_fields if name not in ("token_ids", "text"))  # of each token
