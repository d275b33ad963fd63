"""The extension: what a request may ask of the control loop, and what it is told of it."""

from typing import Annotated, Literal

from pydantic import Field

from ...control_options import Control
from .fields import Answer, Body

PresetName = Literal["off", "micro", "meso", "macro", "full", "entropix", "entropix-as-released", "dslider"]
LawName = Literal["paper", "integral", "normalised", "exact", "mirostat", "edt", "dynatemp"]
Nats = Annotated[float, Field(ge=0, le=100)]
NatsOrAuto = Nats | Literal["auto"]
Clip = Annotated[float, Field(gt=0, le=1000)]
Branches = Annotated[int, Field(ge=1, le=64)]
Mass = Annotated[float, Field(ge=0, lt=1)]
# Names of the command line, and of the gains behind them.
GAINS = {
    "law": "law",
    "target_entropy": "target_entropy",
    "lowest_temperature": "lowest_temperature",
    "highest_temperature": "highest_temperature",
    "dropped_mass_limit": "dropped_mass_limit",
    "lowest_dropped_mass_limit": "lowest_dropped_mass_limit",
    "low_entropy": "low_entropy",
    "high_entropy": "high_entropy",
    "branches": "branches",
}


class Entropic(Body):
    """Control by entropy for this request; what is left out is as the server was started.

    Entropies are in nats; "auto" takes what the calibration of the model found.
    """

    preset: PresetName | None = Field(
        None, description="which scales of control are on, or the sampler of a server that has it"
    )
    law: LawName | None = Field(None, description="of temperature")
    target_entropy: NatsOrAuto | None = Field(None, description="held by the law of temperature")
    lowest_temperature: Clip | None = Field(None, description="no law goes below")
    highest_temperature: Clip | None = Field(None, description="no law goes above")
    dropped_mass_limit: Mass | None = Field(None, description="most attention mass to leave unread")
    lowest_dropped_mass_limit: Mass | None = Field(
        None, description="the same, however uncertain the model is"
    )
    low_entropy: NatsOrAuto | None = Field(None, description="at and below which `dropped_mass_limit` holds")
    high_entropy: NatsOrAuto | None = Field(
        None, description="at and above which `lowest_dropped_mass_limit` holds"
    )
    branches: Branches | None = Field(
        None,
        description="of entropix: continuations that are compared, at most as many as the server compares",
    )
    trace: bool = Field(False, description="give every token's measures in the answer")

    def control(self, default: Control) -> Control:
        """The server's control with what this request changes."""
        gains = dict(default.gains)
        for name, gain in GAINS.items():
            if (value := getattr(self, name)) is not None:
                gains[gain] = value if isinstance(value, str | int) else float(value)
        return default._replace(preset=self.preset or default.preset, gains=tuple(gains.items()))


class Trace(Answer):
    """What was measured at each token, in lists as long as the tokens of this object."""

    token_ids: list[int]
    text: list[str]
    entropy: list[float | None]
    temperature: list[float | None]
    kept_fraction: list[float | None]
    surprisal: list[float | None]


class EntropicResult(Answer):
    """What a choice came to on entropic time; entropies in nats."""

    entropic_time: float | None = None
    mean_entropy: float | None = None
    kept_fraction: float | None = None
    certificate: float | None = None
    trace: Trace | None = None


TRACED = (
    "entropy",
    "tempered_entropy",
    "temperature",
    "kept_fraction",
    "surprisal",
    "entropic_time",
    "dropped_mass_limit",
)
