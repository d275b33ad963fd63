"""Tables of the ablation, gathered from its studies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entropic_jax.analysis import tables as shared_tables

from ..harness.preset_names import NOTE, with_current_names
from ..harness.provenance import stamp, withdraw
from ..harness.tables import Table
from . import study_tables, summary_tables

MEASURED_CODE = ("entropic_jax", "models")
# Commits whose preset `paper` had other pages than `meso-lossy`, and a formula of ε that is not the paper's.
WITHDRAWN = {
    "Stress: wrong logits and a biased entropy": (
        "the arm `bare` has other pages than `guarded`, without sink pages and with one recent page, so the "
        "difference says nothing of the guards of ε."
    ),
}
NOTES = (
    "`off`: plain sampling, dense attention.",
    "`paper`: `full-lossy` with temperature law and priority as printed.",
    "Intervals are of 95 % (Student's t) over seeds, turns or questions; *: p < 0.05, paired with `off`.",
    (
        "Teacher forcing uses no temperature and no schedule: `micro` and `macro` are `off`, `full-lossy` is "
        "`meso-lossy`."
    ),
    (
        "dτ/dC: nats of entropic time per roofline second (25 GB/s, 200 GFLOP/s), of one sequence, prompt "
        "included. τ is blind to damage: what a damaged prediction loses shows in the bits explained."
    ),
    (
        "Bits explained: by how much the model's code of the text is shorter than an adaptive order-0 code "
        "that has read the same prompt. Kept: fraction of keys and values read."
    ),
    "A question counts as answered when every token of the answer has more than half of the probability.",
    NOTE,
    "`meso-lossy, every n`: page lists are kept for n steps; the presets select pages at every step.",
    "Latency: launches of 8 steps, the configurations taking turns; p95 is over launches.",
    "Under load prompts are prefilled beforehand; 16 sequences arrive as a Poisson process for 4 rows.",
    "They arrive at the rate that `off` sustains; without the macro scale, first come is first served.",
    "Repeated: 8-grams generated within the last 128 tokens. Bigram JS: divergence from held-out text.",
)


def load(file: Path) -> dict[str, Any]:
    """The file of a run: the description of the machine, and the rows and runs of each study."""
    results: dict[str, Any] = {"studies": {}, "runs": {}, "seconds": 0.0}
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if "study" in entry:
            rows = with_current_names(entry["rows"], "preset", "arm")
            results["studies"].setdefault(entry["study"], []).extend(rows)
            results["seconds"] += entry["seconds"]
            run = {key: entry[key] for key in ("date", "commit", "recorded_in") if key in entry}
            runs = results["runs"].setdefault(entry["study"], [])
            runs += [] if run in runs else [run]
        else:
            results.update(entry)
    return results


STUDY_TABLES: dict[str, Callable[[list[dict[str, Any]]], Table]] = {
    "quality": shared_tables.quality,
    "information": shared_tables.information,
    "recall": study_tables.recalled,
    "selectors": study_tables.selectors,
    "page_rules": study_tables.page_rules,
    "speed": shared_tables.timed("Speed of the embedded model, one sequence"),
    "shape": study_tables.larger_model,
    "pages": study_tables.kv_precision,
    "load": shared_tables.load,
    "writing": shared_tables.writing,
    "guards": study_tables.guards,
    "stress": study_tables.stress,
    "held": study_tables.held,
    "estimators": study_tables.estimators,
}


def tables_with_studies(results: dict[str, Any]) -> list[tuple[Table, tuple[str, ...]]]:
    """Every table, and the studies that its figures come from."""
    studies = results["studies"]
    longest = max((r["context"] for r in studies.get("speed", [])), default=0)
    return [
        (summary_tables.targets(studies), ("speed", "shape", "quality", "information", "recall")),
        (shared_tables.paper_comparison(studies, longest), ("speed", "load", "quality", "information")),
        *((make(studies[name]), (name,)) for name, make in STUDY_TABLES.items() if studies.get(name)),
        (summary_tables.super_additivity(studies), ("speed", "load")),
    ]


def tables(results: dict[str, Any]) -> list[Table]:
    """Every table."""
    return [table for table, _ in tables_with_studies(results)]


def stamps(results: dict[str, Any]) -> dict[str, str]:
    """Date and commit of each table, by its title: studies are measured in runs of their own."""
    runs = results["runs"]
    lines = {
        table[0]: stamp([run for name in names for run in runs.get(name, [])], MEASURED_CODE)
        for table, names in tables_with_studies(results)
    }
    return withdraw(lines, WITHDRAWN)


def notes(results: dict[str, Any]) -> list[str]:
    """Machine, gains, and what the columns mean."""
    gains = ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in results["gains"].items()
    )
    load, minutes = results["load_average"], results["seconds"] / 60
    sentences = [
        f"{results['cpu']}, {results['date']}, load before the start {load:.1f}; {minutes:.0f} minutes.",
        f"Gains: {gains}; entropies in nats.",
        *NOTES,
    ]
    imposed = {r["context"]: r["imposed"] for r in results["studies"].get("shape", [])}
    if imposed:
        shares = ", ".join(f"{v:.2f} at {k}" for k, v in imposed.items())
        sentences.append(
            "25M model: random weights attend to everything, so the kept fraction of the layers that select "
            f"pages is imposed, as measured on the trained model at the nearest context ({shares}); the KV "
            "cache holds random numbers. Speed only. `-half`: weights, keys and values of bfloat16."
        )
    if results.get("versions"):
        sentences.append(
            "; ".join(f"{name}: {version}" for name, version in results["versions"].items()) + "."
        )
    return sentences
