"""Measurements of stability: temperature laws along real text, and sweeps of the loop in generation."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from entropic_jax import models
from entropic_jax.analysis import ablation, stability
from entropic_jax.analysis.ablation import Subject
from entropic_jax.calibration import load_calibration
from entropic_jax.calibration.record import Calibration
from entropic_jax.control import chain
from entropic_jax.control.pruning import Pruning
from entropic_jax.control.temperature import Exact, Integral, Normalised, Paper
from entropic_jax.methods.presets import FINE_PAGES

from ..harness.held_out_text import module_tokens

STEPS = 48  # tokens of each level of a sweep
PROMPT = 768  # tokens; 48 pages, of which at least 16 are read
REPLAYED = 64  # tokens over which contraction is measured
CLIPS = dict(lowest_temperature=0.3, highest_temperature=1.5)
SET_POINTS = (0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # H*, nats
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # ε_max
TEMPERATURE_LAWS = {
    "paper": lambda target: Paper(target, rate=0.1, **CLIPS),
    "integral": lambda target: Integral(target, rate=0.1, **CLIPS),
    "normalised": lambda target: Normalised(target, **CLIPS),
    "exact": lambda target: Exact(target, **CLIPS),
}
DEAD_BANDS = {"pruning": 0.0, "pruning, dead band 0.1": 0.1}  # `Pruning.hysteresis`
FIELDS = {  # what is kept of a sweep, fields of `stability.SWEPT`
    "H*": ("tempered_entropy", "temperature", "entropy"),
    "ε_max": ("dropped_mass_limit", "kept_fraction", "entropy"),
}
WIDE = dict(lowest_temperature=1e-3, highest_temperature=1e5)  # clips that no replay reaches
REPLAYED_LAWS = {
    "paper, η 0.02": lambda target: Paper(target, rate=0.02, **WIDE),
    "integral, η 0.02": lambda target: Integral(target, rate=0.02, **WIDE),
    "integral, η 0.1": lambda target: Integral(target, rate=0.1, **WIDE),
    "integral, η 0.5": lambda target: Integral(target, rate=0.5, **WIDE),
    "normalised, ρ 0.3": lambda target: Normalised(target, **WIDE),
    "exact": lambda target: Exact(target, **WIDE),
}


def measure(folder: Path, rows: int, steps: int, console: Console) -> dict[str, Any]:
    """Everything the benchmark measures, as numbers and lists.

    Args:
        folder: the folder of the model, with its calibration.
        rows: repetitions, each with a prompt and a seed.
        steps: tokens of each level of a sweep.
        console: where progress is printed.
    """
    model, calibration = models.load(folder, "float32"), load_calibration(folder)
    subject = Subject(model.decoder, model.params, calibration.temperature)
    stream = np.array(module_tokens(folder / "tokenizer.json"), np.int32)
    starts = np.random.default_rng(0).integers(0, len(stream) - PROMPT - REPLAYED, rows)
    texts = np.stack([stream[s : s + PROMPT + REPLAYED] for s in starts])
    levels = max(len(SET_POINTS), len(BUDGETS))
    # Rows differ in their prompts and seeds; all arms begin with the same state.
    state = ablation.prefill(subject, texts[:, :PROMPT].tolist(), 2 * steps * levels + REPLAYED)
    contraction = {}
    for name, law in REPLAYED_LAWS.items():
        contraction[name] = along_text(subject, as_arrays(law(calibration.target_entropy)), state, texts)
        console.print(f"contraction: {name}", highlight=False)
    sweeps = {}
    for name, series in controllers(calibration).items():
        begun = ablation.resume(state, series[0], FINE_PAGES)
        measured = stability.measure_hysteresis(subject.decoder, subject.params, series, begun, steps)
        kept = FIELDS[name.partition(":")[0]]
        sweeps[name] = {
            branch: {field: np.round(reached[field], 4).tolist() for field in kept}
            for branch, reached in measured._asdict().items()
        }
        console.print(f"sweep: {name}", highlight=False)
    return {
        "model": folder.name,
        "rows": rows,
        "steps": steps,
        "prompt": PROMPT,
        "set_points": list(SET_POINTS),
        "contraction": contraction,
        "sweeps": sweeps,
    }


def controllers(calibration: Calibration) -> dict[str, list[Any]]:
    """The levels of every sweep, by its name: temperature and pruning act together in all of them."""
    limits = dict(low_entropy=calibration.low_entropy, high_entropy=calibration.high_entropy)

    def prune(budget, dead_band=0.0):
        return Pruning(budget, hysteresis=dead_band, **limits)

    series = {
        f"H*: {name}": [chain(law(target), prune(0.1)) for target in SET_POINTS]
        for name, law in TEMPERATURE_LAWS.items()
    }
    steady = TEMPERATURE_LAWS["normalised"](calibration.target_entropy)
    for name, dead_band in DEAD_BANDS.items():
        series[f"ε_max: {name}"] = [chain(steady, prune(budget, dead_band)) for budget in BUDGETS]
    return {name: [as_arrays(controller) for controller in levels] for name, levels in series.items()}


def as_arrays(controller: Any) -> Any:
    """The controller with its gains as arrays, so that other gains do not retrace."""
    return jax.tree.map(lambda gain: jnp.asarray(gain, type(gain)), controller)


def along_text(subject: Subject, law: Any, state: Any, texts: np.ndarray) -> dict[str, Any]:
    """How a small distance in ln T changes along held-out text: forward mode through `replay`.

    Args:
        subject: the model.
        law: the temperature law.
        state: the state after the prefill of the prompts.
        texts: int32 `[rows, PROMPT + REPLAYED]`.
    """
    begun, tokens = ablation.resume(state, law), jnp.asarray(texts[:, PROMPT:])
    measured = stability.temperature_sensitivity(subject.decoder, subject.params, law, begun, tokens)
    rates = stability.contraction_rates(measured)
    return {
        "rates": np.round(rates, 4).tolist(),
        "distance": np.abs(np.asarray(measured.slope)[-1]).tolist(),
    }
