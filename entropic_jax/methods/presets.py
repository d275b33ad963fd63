"""Presets of control: which of the scales micro, meso and macro are on, by name.

`off` is plain decoding. `micro` controls temperature, `meso` drafts tokens and verifies them, `macro`
schedules sequences; `full` does all three. `meso` is lossless: its tokens are those of `off`, and those of
`full` are those of `micro`. `meso-lossy` leaves pages of the KV cache unread instead, which changes the
text: those whose attention mass is at most ε in all, the same ε at every step. `full-lossy` is `micro`,
`meso-lossy` and `macro`. `paper` is `full-lossy` with the two laws that the paper prints as formulas, the
temperature law and the priority, as printed. Everything else in it is `full-lossy`: pages, ε, the prior and
every limit but T_max, since the printed law heats. The paper prints no formula for ε, and its guards (a
least number of blocks B_min, an entropy floor H_min, rate limits) are in the law of `meso-lossy` too. To
change one law alone, use `micro` with `law="paper"` or `macro` with `schedule="paper"`.

Differs from the paper: its meso scale serves from pruned pages, and from fewer where the entropy is low.
Here only the presets `meso-lossy`, `full-lossy` and `paper` do, with a fixed ε: what a step loses depends
on its own entropy, which is known after its pages have been read, and hardly on that of the step before. An
ε that follows the step before is an option, `lowest_dropped_mass_limit`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ..attention.page_selection import Selection, SelectionRules
from ..control.controller import Chain, chain
from ..control.entropy_drop import AR1, PRIOR
from ..control.laws import LAWS, SCHEDULES
from ..control.pruning import Pruning
from ..parameter_tables.control_gains import (
    CALIBRATED,
    MACRO,
    MICRO,
    PRESETS,
    PRUNING,
    SCALES,
    ControlGains,
    check_limits,
)
from ..parameter_tables.speculation_names import OFF, drafter_of
from ..parameter_tables.table import AUTO, Choice, ParameterError
from ..state.cache import default_page_size

# Small pages expose keys that the mean key of a large page hides. The sink and the newest pages are always
# kept. The lowest layer attends to everything, so it needs only a part of it. Page lists are made at
# every step: older lists miss facts that a question has just made relevant.
RULES = SelectionRules(sink_pages=4, recent_pages=8, min_pages=16, bound_weight=0.5)
FINE_PAGES = Selection(dense_layers=0, first_layer_scale=30.0, rules=RULES, page_size=16)
# On TPUs and GPUs, where starting a copy costs as much as some hundred positions: the same least numbers of
# positions, in the pages that the kernels take.
WIDE_PAGES = replace(
    FINE_PAGES,
    rules=RULES._replace(sink_pages=1, recent_pages=2, min_pages=3),
    page_size=128,
)
PAPER_GAINS = ("target_entropy",)  # the laws of `paper` have no others
PAPER_HIGHEST_TEMPERATURE = 1.2  # T_max of the preset `paper`, whose temperature law heats
TEMPERATURE_GAINS = ("target_entropy", "lowest_temperature", "highest_temperature")


@dataclass(frozen=True, kw_only=True)
class Gains(ControlGains):
    """The gains of a preset as numbers, which no longer leave anything to a calibration."""

    prior: AR1 = PRIOR  # of H₁ along a sequence, for the scheduling law

    def __post_init__(self) -> None:
        """Check every gain. Raises ParameterError."""
        super().__post_init__()
        for name in CALIBRATED:
            if getattr(self, name) == AUTO:
                raise ParameterError(f"{name} must be a number; got {AUTO!r}", name)


class Preset(NamedTuple):
    """Arguments of `loop.start` and `loop.generate` that a preset sets.

    The argument `speculator` of both is `speculation.make_speculator(preset.speculate, rows)`.
    """

    controller: Chain
    page_policy: Any  # an `attention.page_selection.PagePolicy` (a protocol), or None to read every page
    width: int | None  # sequences that advance in a step; None is all
    speculate: str = OFF  # the drafter, a name of `speculation_names.DRAFTERS`


def pruned_pages(platform: str | None = None) -> Selection:
    """The page policy of presets that leave pages unread.

    Args:
        platform: `cpu`, `gpu` or `tpu`; None is that of the default device.

    >>> pruned_pages("cpu").page_size, pruned_pages("tpu").page_size
    (16, 128)
    """
    return WIDE_PAGES if default_page_size(platform) == WIDE_PAGES.page_size else FINE_PAGES


def preset(
    name: str, width: int | None = None, gains: Gains | None = None, platform: str | None = None
) -> Preset:
    """The controller, page policy, width and drafter of a preset.

    Args:
        name: one of `PRESETS`.
        width: most sequences that advance in a step. Without it, or without the macro scale, all advance.
        gains: settings of the laws; None is the defaults.
        platform: where it runs, see `pruned_pages`.

    Raises:
        ValueError: for an unknown preset, temperature law or schedule.

    >>> preset("off").controller == chain()
    True
    """
    gains = gains or Gains()
    Choice(PRESETS).check("preset", name)
    laws: list[Any] = []
    page_policy, scales = None, SCALES[name]
    if name == "paper":
        gains = gains.replace(law="paper", schedule="paper", highest_temperature=PAPER_HIGHEST_TEMPERATURE)
    if MICRO in scales:
        laws.append(temperature_law(gains))
    if PRUNING in scales:
        laws.append(pruning_law(gains))
        page_policy = pruned_pages(platform)
    if MACRO in scales and width:
        law = SCHEDULES[gains.schedule]
        has_prior = "prior" in {field.name for field in fields(law)}
        laws.append(law(width, prior=gains.prior) if has_prior else law(width))
    return Preset(chain(*laws), page_policy, width if MACRO in scales else None, drafter_of(name))


def temperature_law(gains: Gains) -> Any:
    """The temperature law named by `gains.law`, with those gains that are fields of its class.

    A law that keeps its published constants whatever the gains say has a class attribute
    `fixed_gains = True`.
    """
    return LAWS[gains.law](**{name: getattr(gains, name) for name in gains_of_law(gains.law)})


def gains_of_law(name: str) -> tuple[str, ...]:
    """The gains that a temperature law has; the others change nothing.

    >>> gains_of_law("mirostat"), gains_of_law("edt")
    (('target_entropy',), ())
    """
    law: Any = LAWS[name]
    if getattr(law, "fixed_gains", False):
        return ()
    names = {field.name for field in fields(law)}
    return tuple(gain for gain in TEMPERATURE_GAINS if gain in names)


def pruning_law(gains: Gains) -> Pruning:
    """The pruning law with the limits in `gains`: without a lowest limit, ε is fixed after the first tokens.

    Raises:
        ParameterError: where the lowest limit is above the limit.

    >>> pruning_law(Gains(dropped_mass_limit=0.05)).lowest_dropped_mass_limit
    0.05
    """
    check_limits(gains.asdict())
    lowest = gains.lowest_dropped_mass_limit
    return Pruning(
        dropped_mass_limit=gains.dropped_mass_limit,
        lowest_dropped_mass_limit=gains.dropped_mass_limit if lowest is None else lowest,
        low_entropy=gains.low_entropy,
        high_entropy=gains.high_entropy,
    )
