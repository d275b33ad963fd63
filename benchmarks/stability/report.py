"""Tables of the benchmark of stability."""

from typing import Any

import numpy as np

from entropic_jax.analysis.stability import Gap, Hysteresis, branch_gap
from entropic_jax.analysis.statistics import Estimate

from ..harness.provenance import stamp
from ..harness.tables import Table

MEASURED_CODE = (
    "entropic_jax/analysis/stability.py",
    "entropic_jax/control/temperature.py",
    "entropic_jax/control/pruning.py",
    "entropic_jax/phases",
    "models",
)
SHOWN = {  # the fields of a sweep that the tables show, with the number of digits
    "H*": {"tempered_entropy": ("H_T, nats", 3), "temperature": ("T", 3), "entropy": ("H₁, nats", 3)},
    "ε_max": {"dropped_mass_limit": ("ε", 4), "kept_fraction": ("pages read", 3), "entropy": ("H₁, nats", 3)},
}


def tables(results: dict[str, Any]) -> list[Table]:
    """Contraction, the gaps between the branches, and the branches of the printed law beside another."""
    return [contraction(results), *gaps(results), *branches(results)]


def contraction(results: dict[str, Any]) -> Table:
    """The factor of a small distance in ln T for each step along held-out text."""
    lines = []
    for name, measured in results["contraction"].items():
        rates, distance = np.array(measured["rates"]), np.array(measured["distance"])
        share = lambda flags: f"{100 * np.mean(flags):.0f}"
        lines.append(
            [
                name,
                f"{np.median(rates):.3f} ({np.quantile(rates, 0.05):.3f}–{np.quantile(rates, 0.95):.3f})",
                share(np.abs(rates) > 1),
                share(rates == 1),
                f"{np.median(distance):.2g} ({distance.min():.2g}–{distance.max():.2g})",
            ]
        )
    head = [
        "law",
        "factor of a step: median (5–95 %)",
        "expand, %",
        "no step, %",
        "after the text: median (range)",
    ]
    return "Contraction of ln T along held-out text", head, lines


def gap_of(results: dict[str, Any], name: str, field: str) -> Gap:
    """The gap between the branches of a stored sweep."""
    sweep = {
        branch: {key: np.array(values) for key, values in fields.items()}
        for branch, fields in results["sweeps"][name].items()
    }
    return branch_gap(Hysteresis(**sweep), field)


def gaps(results: dict[str, Any]) -> list[Table]:
    """For each swept gain, the gap between the branches beside that of the control."""
    result = []
    for swept, fields in SHOWN.items():
        lines = []
        for name in results["sweeps"]:
            kind, _, law = name.partition(": ")
            for field, (label, digits) in fields.items() if kind == swept else ():
                gap = gap_of(results, name, field)
                lines.append([law, label, *(signed(e, digits) for e in gap)])
        head = [
            "law",
            "of",
            "down − up (95 %)",
            "up again − up",
            "noise: other seeds − up",
            "down − up again",
        ]
        result.append((f"Sweeps of {swept}: differences between sweeps, mean over levels", head, lines))
    return result


def signed(e: Estimate, digits: int) -> str:
    """A difference with the ends of its interval."""
    return f"{e.mean:+.{digits}f} ({e.low:+.{digits}f} … {e.high:+.{digits}f})".replace("-", "−")


def branches(results: dict[str, Any]) -> list[Table]:
    """The entropy reached at each set-point, law by law: mean over rows."""
    names = [name for name in results["sweeps"] if name.startswith("H*")]

    def mean(name, branch):
        return np.mean(results["sweeps"][name][branch]["tempered_entropy"], axis=1)

    columns = [(name, branch) for name in names for branch in ("up", "down")]
    head = ["H*", *(f"{name.partition(': ')[2]}, {branch}" for name, branch in columns)]
    values = np.stack([mean(*column) for column in columns], axis=1)
    lines = [
        [f"{target:g}", *(f"{value:.2f}" for value in row)]
        for target, row in zip(results["set_points"], values, strict=True)
    ]
    return [("H_T reached at each set-point, nats, by branch", head, lines)]


def notes(results: dict[str, Any]) -> list[str]:
    """The meaning of the figures, in words."""
    rows, steps, prompt = results["rows"], results["steps"], results["prompt"]
    return [
        (
            f"{results['model']} model, {rows} rows. Each has a prompt of {prompt} tokens of held-out code "
            "and a seed, and is an independent repetition."
        ),
        (
            f"A level of a sweep lasts {steps} tokens of one generation. What it reached is the mean over "
            "the second half."
        ),
        (
            "Temperature and pruning act together in every sweep. Down and up again both continue the first "
            "sweep, so they differ in their direction alone. The noise is that of the first sweep with other "
            "random bits."
        ),
        (
            "Contraction: derivative by forward mode through `replay`. H* is the calibrated one, the clips "
            "are out of reach. No step: it was withheld (V_T < 0.05) or limited."
        ),
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)
