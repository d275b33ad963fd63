"""The ablation axis: which scales of control are on, by name.

`off` is plain sampling; `micro`, `meso` and `macro` switch one scale on; `full` all three; `paper` all three
with every law as printed.
"""

from typing import Any, NamedTuple

from ..attention.page_selection import Selection
from ..pallas.paged_attention import Rules
from .controller import Chain, chain
from .pruning import PaperPruning, Pruning
from .scheduling import PRIOR, SCHEDULES, Moments
from .temperature import LAWS

PRESETS = ("off", "micro", "meso", "macro", "full", "paper")
# Small pages find what a large page's mean key hides; the sink and the newest are kept whole. In the first
# layer attention is spread over everything. Lists that outlive their step miss facts just asked for.
RULES = Rules(sink=4, recent=8, least=16, guard=0.5)
FINE = Selection(dense_layers=0, first_layer_scale=30.0, rules=RULES, page_size=16)
UNTARGETED = ("edt", "dynatemp")  # laws without a set-point


class Gains(NamedTuple):
    """What a preset can be given instead of its defaults; entropies in nats."""

    law: str = "normalised"  # of temperature, a name of `LAWS`
    target_entropy: float = 1.0  # H*, held by the law
    lowest_temperature: float = 0.3  # T_min
    highest_temperature: float = 1.2  # T_max
    dropped_mass_limit: float = 0.03  # ε_max: most attention mass to leave unread
    lowest_dropped_mass_limit: float = 0.012  # ε_min, however uncertain
    low_entropy: float = 0.3  # H₁ at and below which `dropped_mass_limit` may stay unread
    high_entropy: float = 2.5  # H₁ at and above which only `lowest_dropped_mass_limit` may
    schedule: str = "entropic"  # a name of `SCHEDULES`
    prior: Moments = PRIOR  # of H₁ along a sequence, for the schedule


class Preset(NamedTuple):
    """What `start` and `generate` take."""

    controller: Chain
    page_policy: Any  # a `attention.page_selection.PagePolicy`; None reads everything
    width: int | None  # sequences that advance in a step; None is all


def preset(name: str, width: int | None = None, gains: Gains | None = None) -> Preset:
    """The controller, page selection and width behind a name of `PRESETS`.

    `width` is how many sequences a step may advance; without it, or without the macro scale, all do. Raises
    ValueError for a name that is not known.

    >>> preset("off").controller == chain()
    True
    """
    gains = gains or Gains()
    for argument, value, accepted in (
        ("name", name, PRESETS),
        ("law", gains.law, tuple(LAWS)),
        ("schedule", gains.schedule, tuple(SCHEDULES)),
    ):
        if value not in accepted:
            raise ValueError(f"{argument} is {value!r}; accepted are {', '.join(accepted)}")
    laws: list[Any] = []
    page_policy = None
    if name == "paper":
        laws += [
            LAWS["paper"](target_entropy=gains.target_entropy),
            PaperPruning(entropy_threshold=gains.high_entropy),
        ]
        laws += [SCHEDULES["paper"](width)] if width else []
        return Preset(chain(*laws), Selection(dense_layers=0), width)  # as printed: coarse blocks, no guards
    if name in ("micro", "full"):
        laws.append(temperature(gains))
    if name in ("meso", "full"):
        least = min(gains.lowest_dropped_mass_limit, gains.dropped_mass_limit)
        laws.append(
            Pruning(
                dropped_mass_limit=gains.dropped_mass_limit,
                lowest_dropped_mass_limit=least,
                low_entropy=gains.low_entropy,
                high_entropy=gains.high_entropy,
            )
        )
        page_policy = FINE
    if name in ("macro", "full") and width:
        law = SCHEDULES[gains.schedule]
        laws.append(law(width, prior=gains.prior) if gains.schedule == "entropic" else law(width))
    return Preset(chain(*laws), page_policy, width if name in ("macro", "full") else None)


def temperature(gains: Gains) -> Any:
    """The law of temperature that the gains name."""
    law = LAWS[gains.law]
    if gains.law in UNTARGETED:
        return law()
    if gains.law == "mirostat":
        return law(target_entropy=gains.target_entropy)
    return law(
        target_entropy=gains.target_entropy,
        lowest_temperature=gains.lowest_temperature,
        highest_temperature=gains.highest_temperature,
    )
