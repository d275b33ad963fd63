"""Keys and values of fewer bits: what they cost in quality, and what a step takes."""

from entropic_jax.analysis import ablation
from entropic_jax.analysis.studies import Material, Row, take_turns
from entropic_jax.cache import default_page_size
from entropic_jax.state import State

WAYS = [(name, kind) for kind in ("float32", "bfloat16", "int8") for name in ("off", "full")]


def begin(material: Material, name: str, kind: str, texts: list[list[int]], room: int) -> State:
    """A state that has read the texts into pages of a kind, about to run under a preset."""
    way = material.preset(name)
    size = (way.page_policy.page_size if way.page_policy else None) or default_page_size()
    state = ablation.read(material.subject, texts, room, page_size=size, dtype=kind)
    return ablation.resume(state, way.controller, way.page_policy, size)


def pages(material: Material, context: int, seed: int, quick: bool) -> list[Row]:
    """Bits per byte of the last tokens of held-out windows, for every kind of page and preset."""
    sequences, scored = (2, 32) if quick else (4, 256)
    texts = material.windows(sequences, context, 100 + seed)
    rows = []
    for name, kind in WAYS[:: 5 if quick else 1]:
        state = begin(material, name, kind, [t[:-scored] for t in texts], scored + 1)
        controller = material.preset(name).controller
        found = ablation.forced(material.subject, controller, state, [t[-scored:] for t in texts])
        rows.append(
            {
                "preset": f"{name}, {kind}",
                "context": context,
                "seed": seed,
                "bits_per_byte": material.bits_per_byte(found.surprisal),
                "kept": float(found.kept[:, 1:].mean()),
                "bytes_read": float(found.bytes_read.mean()),
            }
        )
    return rows


def pages_speed(material: Material, context: int, quick: bool) -> list[Row]:
    """Milliseconds a token of one sequence, the kinds of page and the presets taking turns."""
    steps, repeat = (4, 2) if quick else (8, 24)
    texts = material.windows(1, context, 3)
    ways, states = {}, {}
    for name, kind in WAYS[:: 5 if quick else 1]:
        ways[f"{name}, {kind}"] = material.preset(name)
        states[f"{name}, {kind}"] = begin(material, name, kind, texts, (repeat + 2) * steps)
    return take_turns(dict.fromkeys(ways, material.subject), ways, states, context, steps, repeat)
