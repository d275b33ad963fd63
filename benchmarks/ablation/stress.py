"""Stress tests of the loop: scaled logits under the temperature laws, and entropy estimated from top-k."""

import jax
import numpy as np

from entropic_jax import chain, entropy
from entropic_jax.analysis import ablation
from entropic_jax.analysis.studies import Row, Workload, interleave, set_up
from entropic_jax.calibration import teacher_forced
from entropic_jax.control.estimation import ESTIMATORS, Estimated
from entropic_jax.methods.presets import Preset, preset

SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)
HEAD = 50  # logits that an estimator sees
SCORED = 192
LOWEST_PART = 0.4  # ε_min over ε_max, where ε follows the entropy
HIGHEST_TEMPERATURE = 1.2  # texts are written at T = 1, and a law that cannot heat holds no set-point


def scaled(workload: Workload, scale: float) -> ablation.Subject:
    """The model with its logits multiplied, by way of the norm before the output projection."""
    params = dict(workload.subject.params)
    params["norm"] = jax.tree.map(lambda x: x * scale, params["norm"])
    return workload.subject._replace(params=params)


def held(workload: Workload, seed: int, quick: bool) -> list[Row]:
    """How closely each temperature law holds the entropy when the logits are scaled."""
    tokens = 32 if quick else 128
    rows = []
    prompts = workload.windows(4, 128, 400 + seed)
    for scale in SCALES[1:4:2] if quick else SCALES:
        subject = scaled(workload, scale)
        state = ablation.prefill(subject, prompts, tokens)
        for law in ("normalised", "paper") if quick else ("normalised", "integral", "exact", "paper"):
            gains = workload.gains.replace(law=law, highest_temperature=HIGHEST_TEMPERATURE)
            setting = preset("micro", None, gains)
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
    """Exact entropy and its estimators in the loop: agreement, kept fraction, quality and time.

    Args:
        workload: model and text.
        context: tokens of a window.
        seed: the seed of the text.
        quick: a single estimator.
    """
    texts = workload.windows(4, context, 600 + seed)
    state = ablation.prefill(workload.subject, [t[:-SCORED] for t in texts], SCORED + 1)
    tails = [t[-SCORED:] for t in texts]
    limit = workload.gains.dropped_mass_limit
    full = preset("full-lossy", None, workload.gains.replace(lowest_dropped_mass_limit=LOWEST_PART * limit))
    belief = workload.subject.belief_temperature

    def with_estimator(kind: str) -> Preset:
        if kind == "exact":
            return full
        return full._replace(controller=chain(Estimated(full.controller, kind, HEAD, belief)))

    presets = {kind: with_estimator(kind) for kind in ("exact", *(("upper",) if quick else ESTIMATORS))}
    agreement = correlations(workload, texts[: 1 if quick else 2])
    steps, repeat = 8, 3 if quick else 12
    single = ablation.prefill(workload.subject, texts[:1], (repeat + 2) * steps)
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
