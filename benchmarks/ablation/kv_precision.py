"""Keys and values in narrower dtypes: quality, and time of a step."""

from entropic_jax.analysis import ablation
from entropic_jax.analysis.studies import Row, Workload, interleave
from entropic_jax.state import State
from entropic_jax.state.cache import default_page_size

CONFIGURATIONS = [(name, kind) for kind in ("float32", "bfloat16", "int8") for name in ("off", "full-lossy")]


def prefilled(workload: Workload, name: str, kind: str, texts: list[list[int]], room: int) -> State:
    """A state after prefill into pages of one dtype, ready to run under a preset.

    Args:
        workload: model and text.
        name: the name of the preset.
        kind: dtype of keys and values.
        texts: token ids of each row.
        room: positions after them.
    """
    setting = workload.preset(name)
    size = (setting.page_policy.page_size if setting.page_policy else None) or default_page_size()
    state = ablation.prefill(workload.subject, texts, room, page_size=size, dtype=kind)
    return ablation.resume(state, setting.controller, setting.page_policy, size)


def kv_precision(workload: Workload, context: int, seed: int, quick: bool) -> list[Row]:
    """Bits per byte of the last tokens of held-out windows, for every dtype and preset."""
    sequences, scored = (2, 32) if quick else (4, 256)
    texts = workload.windows(sequences, context, 100 + seed)
    rows = []
    for name, kind in CONFIGURATIONS[:: 5 if quick else 1]:
        state = prefilled(workload, name, kind, [t[:-scored] for t in texts], scored + 1)
        controller = workload.preset(name).controller
        outcome = ablation.forced(workload.subject, controller, state, [t[-scored:] for t in texts])
        rows.append(
            {
                "preset": f"{name}, {kind}",
                "context": context,
                "seed": seed,
                "bits_per_byte": workload.bits_per_byte(outcome.surprisal),
                "kept": float(outcome.kept[:, 1:].mean()),
                "bytes_read": float(outcome.bytes_read.mean()),
            }
        )
    return rows


def kv_precision_speed(workload: Workload, context: int, quick: bool) -> list[Row]:
    """Milliseconds a token of one sequence, dtypes and presets taking turns."""
    steps, repeat = (4, 2) if quick else (8, 24)
    texts = workload.windows(1, context, 3)
    presets, states = {}, {}
    for name, kind in CONFIGURATIONS[:: 5 if quick else 1]:
        presets[f"{name}, {kind}"] = workload.preset(name)
        states[f"{name}, {kind}"] = prefilled(workload, name, kind, texts, (repeat + 2) * steps)
    return interleave(dict.fromkeys(presets, workload.subject), presets, states, context, steps, repeat)
