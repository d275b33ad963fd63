"""Table of the benchmark of compilation."""

from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table

MEASURED_CODE = (
    "entropic_jax/analysis/ahead_of_time.py",
    "entropic_jax/attention",
    "entropic_jax/loop.py",
    "entropic_jax/mesh",
    "entropic_jax/phases",
    "entropic_jax/state",
    "models/decoder.py",
    "models/layer_stack.py",
    "models/layers.py",
    "models/sharding.py",
)
FORMS = ("unrolled", "scanned")
HEADER = ["layers", "tracing and lowering, s", "compiling, s", "temporaries of a chip, MiB", "code, MiB"]


def tables(results: dict[str, Any]) -> list[Table]:
    """One row for each form of the step."""
    rows = []
    for form in FORMS:
        measured = results["forms"][form]
        seconds = (f"{measured[name]:.1f}" for name in ("lowering_seconds", "compiling_seconds"))
        sizes = (f"{measured[name] / 2**20:.0f}" for name in ("temporary_bytes", "code_bytes"))
        rows.append([form, *seconds, *sizes])
    title = (
        f"Compiling a decode step of Llama 3.1's shape {results['shape']}, {results['rows']} rows, for "
        f"{results['topology']}"
    )
    return [(title, HEADER, rows)]


def notes(results: dict[str, Any]) -> list[str]:
    """The machine that compiled, and what was compiled."""
    versions = results["forms"][FORMS[0]]
    compilers = f"libtpu {versions['libtpu']} with JAX {versions['jax']}"
    return [
        f"Compiled on {results['cpu']} by {compilers}, {results['date']}. Each once, in its own process.",
        "Preset `off`, weights and KV cache of bfloat16, divided over all chips of the topology.",
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit of the table."""
    return stamp([results], MEASURED_CODE)
