"""Stress tests of the loop: miscalibrated logits, biased entropy, and entropy estimated from top-k."""

from typing import Any

import jax
import numpy as np

from entropic_jax import chain, entropy
from entropic_jax.analysis import ablation
from entropic_jax.analysis.studies import Row, Workload, interleave, set_up
from entropic_jax.attention.page_selection import Selection
from entropic_jax.calibration import teacher_forced
from entropic_jax.control.controller import pytree, update_rows
from entropic_jax.control.estimation import ESTIMATORS, Estimated
from entropic_jax.control.presets import FINE_PAGES, Preset, preset
from entropic_jax.control.pruning import Pruning
from entropic_jax.pallas.paged_attention import SelectionRules

SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)
BIASES = (-1.0, 1.0)  # nats
HEAD = 50  # logits that an estimator sees
SCORED = 192
# Page selection without guards: no sink, only the newest page always kept, no bound beside the mean key.
BARE = Selection(
    "value",
    SelectionRules(sink_pages=0, recent_pages=1, min_pages=0, bound_weight=0.0),
    dense_layers=0,
    page_size=FINE_PAGES.page_size,
)


@pytree
class Biased:
    """A controller that receives an entropy with a constant error of `bias` nats."""

    controller: Any
    bias: Any

    def init(self, action: Any) -> Any:
        return self.controller.init(action)

    def update(self, signal: Any, action: Any, state: Any) -> tuple[Any, Any]:
        wrong = signal._replace(entropy=signal.entropy + self.bias)
        return update_rows(self.controller, wrong, action, state)


def scaled(workload: Workload, scale: float) -> ablation.Subject:
    """The model with its logits multiplied, by way of the norm before the output projection."""
    params = dict(workload.subject.params)
    params["norm"] = jax.tree.map(lambda x: x * scale, params["norm"])
    return workload.subject._replace(params=params)


def stress(workload: Workload, context: int, seed: int, quick: bool) -> list[Row]:
    """Quality against dense attention and kept fraction, by scale of the logits and bias of the entropy."""
    gains = workload.gains
    texts = workload.windows(4, context, 300 + seed)
    bounds = {
        name: getattr(gains, name)
        for name in ("dropped_mass_limit", "lowest_dropped_mass_limit", "low_entropy", "high_entropy")
    }
    guarded = Pruning(**bounds)
    bare = Pruning(**bounds, patience=0, smoothing=1.0, rate=1.0)
    arms = {
        "dense": (chain(), None),
        "guarded": (chain(Biased(guarded, 0.0)), FINE_PAGES),
        "bare": (chain(Biased(bare, 0.0)), BARE),
    }
    rows = []
    for scale in SCALES[1:3] if quick else SCALES:
        subject = scaled(workload, scale)
        state = ablation.read(subject, [t[:-SCORED] for t in texts], SCORED + 1)
        for bias in (0.0, *BIASES) if scale == 1.0 else (0.0,):
            for name, (law, page_policy) in arms.items():
                if law.controllers:
                    law = chain(Biased(law.controllers[0].controller, bias))
                resumed = ablation.resume(state, law, page_policy)
                outcome = ablation.forced(subject, law, resumed, [t[-SCORED:] for t in texts])
                rows.append(
                    {
                        "arm": name,
                        "scale": scale,
                        "bias": bias,
                        "seed": seed,
                        "bits_per_byte": workload.bits_per_byte(outcome.surprisal),
                        "kept": float(outcome.kept[:, 1:].mean()),
                        "unsteady": float(np.abs(np.diff(outcome.dropped_mass_limit, axis=1)).mean()),
                    }
                )
    return rows


def held(workload: Workload, seed: int, quick: bool) -> list[Row]:
    """How closely each temperature law holds the entropy when the logits are scaled."""
    tokens = 32 if quick else 128
    gains, rows = workload.gains, []
    prompts = workload.windows(4, 128, 400 + seed)
    for scale in SCALES[1:4:2] if quick else SCALES:
        subject = scaled(workload, scale)
        state = ablation.read(subject, prompts, tokens)
        for law in ("normalised", "paper") if quick else ("normalised", "integral", "exact", "paper"):
            setting = preset("micro", None, gains.replace(law=law))
            clips = gains.lowest_temperature, gains.highest_temperature
            outcome = ablation.write(
                subject, setting, set_up(state, setting), target=gains.target_entropy, clips=clips
            )
            rows.append(
                {
                    "law": law,
                    "scale": scale,
                    "seed": seed,
                    "error": outcome.error,
                    "clipped": outcome.clipped,
                    "temperature": outcome.temperature,
                }
            )
    return rows


def estimators(workload: Workload, context: int, seed: int, quick: bool) -> list[Row]:
    """Exact entropy and its estimators in the loop: agreement, kept fraction, quality and time."""
    texts = workload.windows(4, context, 600 + seed)
    state = ablation.read(workload.subject, [t[:-SCORED] for t in texts], SCORED + 1)
    tails = [t[-SCORED:] for t in texts]
    full = workload.preset("full")
    belief = workload.subject.belief_temperature

    def with_estimator(kind: str) -> Preset:
        if kind == "exact":
            return full
        return full._replace(controller=chain(Estimated(full.controller, kind, HEAD, belief)))

    presets = {kind: with_estimator(kind) for kind in ("exact", *(("upper",) if quick else ESTIMATORS))}
    agreement = correlations(workload, texts[: 1 if quick else 2])
    steps, repeat = 8, 3 if quick else 12
    single = ablation.read(workload.subject, texts[:1], (repeat + 2) * steps)
    states = {kind: set_up(single, setting) for kind, setting in presets.items()}
    times = interleave(dict.fromkeys(presets, workload.subject), presets, states, context, steps, repeat)
    rows = []
    for kind, setting in presets.items():
        outcome = ablation.forced(workload.subject, setting.controller, set_up(state, setting), tails)
        milliseconds = [r["milliseconds"] for r in times if r["preset"] == kind]
        rows.append(
            {
                "estimator": kind,
                "seed": seed,
                "bits_per_byte": workload.bits_per_byte(outcome.surprisal),
                "kept": float(outcome.kept[:, 1:].mean()),
                "milliseconds": float(np.median(milliseconds)),
                **agreement.get(kind, {"correlation": 1.0, "error": 0.0}),
            }
        )
    return rows


def correlations(workload: Workload, texts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Pearson's correlation with the exact entropy, and the mean absolute error in nats, on real logits."""
    subject = workload.subject
    exact: list[np.ndarray] = []
    seen: dict[str, list[np.ndarray]] = {kind: [] for kind in ESTIMATORS}

    @jax.jit
    def measured(logits: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = logits / subject.belief_temperature
        top = entropy.top_k_summary(logits, HEAD)
        return entropy.entropy_statistics(logits).entropy, {
            kind: make(top) for kind, make in ESTIMATORS.items()
        }

    for _, logits, targets in teacher_forced(subject.decoder, subject.params, texts):
        exact_values, parts = jax.device_get(measured(logits))
        exact.append(exact_values[targets >= 0])
        for kind, values in parts.items():
            seen[kind].append(values[targets >= 0])
    true = np.concatenate(exact)
    joined = {kind: np.concatenate(parts) for kind, parts in seen.items()}
    return {
        kind: {
            "correlation": float(np.corrcoef(true, x)[0, 1]),
            "error": float(np.abs(true - x).mean()),
        }
        for kind, x in joined.items()
    }
