"""Tables of the benchmark of slices: what fits, the least time of a step, and the compiled programs."""

from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table
from .workload import CHUNK, CONTEXT, DRAFTED, PROMPTS, ROWS

MEASURED_CODE = (
    "entropic_jax/analysis",
    "entropic_jax/loop.py",
    "entropic_jax/mesh",
    "entropic_jax/phases",
    "entropic_jax/pallas/grouped_matmul",
    "entropic_jax/pallas/paged_attention",
    "models/decoder.py",
    "models/experts.py",
    "models/layer_stack.py",
    "models/layers.py",
    "models/sharding.py",
)
MIB, GIB = 2**20, 2**30


def tables(results: dict[str, Any]) -> list[Table]:
    """Three tables."""
    cases = results["cases"]
    return [fitting(cases), rooflines(cases), programs(cases)]


def fitting(cases: list[dict[str, Any]]) -> Table:
    """The named list of what fits, and what does elsewhere."""
    header = ["model", "slice", "weights", f"sequences of {CONTEXT} that fit", "remarks"]
    rows = []
    for case in cases:
        weights = (case["dtypes"][2] or case["dtypes"][0]) if case["fits"] else "none"
        larger = f"{ROWS} fit on {case['first_slice'] or 'none of those that are known'}"
        failed = [name for name, program in case.get("programs", {}).items() if "error" in program]
        remark = f"not compiled: {', '.join(failed)}" if failed else ""
        cells = [case["model"], case["slice"], weights, str(case.get("sequences", 0))]
        rows.append([*cells, remark if case["fits"] else larger])
    return f"The first of bfloat16, int8 and int4 in which {ROWS} sequences fit", header, rows


def rooflines(cases: list[dict[str, Any]]) -> Table:
    """Bytes and operations of a step, and the time that they take at least."""
    header = ["model", "slice", "weights, GiB", "KV cache, GiB", "GFLOP", "collectives", "MiB of them"]
    header += ["weights, ms", "KV cache, ms", "collectives, ms", "sum, ms", "tokens/s"]
    rows = []
    for case in filter(lambda case: case["fits"], cases):
        parts = case["milliseconds"]
        exchanged = of_the_compiler(case)
        rows.append(
            [
                case["model"],
                case["slice"],
                f"{case['weight_bytes'] / GIB:.2f}",
                f"{case['kv_bytes'] / GIB:.2f}",
                f"{case['flops'] / 1e9:.0f}",
                str(sum(number for _, number, _ in exchanged)),
                f"{sum(size for *_, size in exchanged) / MIB:.1f}",
                *(f"{parts[name]:.2f}" for name in ("weights", "kv_cache", "collectives")),
                f"{sum(parts.values()):.2f}",
                f"{case['tokens_per_second']:.0f}",
            ]
        )
    return f"A chip's part of a decode step: {ROWS} sequences of {CONTEXT} positions", header, rows


def of_the_compiler(case: dict[str, Any]) -> list[Any]:
    """The collectives of the compiled decode step, or by shapes where it was not compiled."""
    return case["programs"].get("decode off", {}).get("collectives", case["collectives"])


def programs(cases: list[dict[str, Any]]) -> Table:
    """The compiler's report on each program."""
    header = ["model", "slice", "program, preset", "arguments, GiB", "temporaries, MiB"]
    header += ["collectives", "MiB of them", "largest gather, KiB", "compiled in, s"]
    rows = []
    for case in filter(lambda case: case["fits"], cases):
        for name, program in case["programs"].items():
            begin = [case["model"], case["slice"], name.replace(" ", ", ")]
            if "error" in program:
                rows.append([*begin, program["error"], *("" for _ in header[4:])])
                continue
            exchanged = program["collectives"]
            rows.append(
                [
                    *begin,
                    f"{program['argument_bytes'] / GIB:.2f}",
                    f"{program['temporary_bytes'] / MIB:.0f}",
                    str(sum(number for _, number, _ in exchanged)),
                    f"{sum(size for *_, size in exchanged) / MIB:.1f}",
                    f"{program['largest_gather'] / 1024:.0f}",
                    f"{program['seconds']:.0f}",
                ]
            )
    return "Compiled programs, bytes of one chip", header, rows


def notes(results: dict[str, Any]) -> list[str]:
    """Notes on the figures and the compilers."""
    versions = results["versions"]
    compilers = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [
        f"{compilers}; nothing ran on a TPU or GPU.",
        "Times follow from the public figures of chips; a collective has a latency for each hop.",
        "Weights are those of a chip; of a mixture, the time counts the experts that rows choose.",
        f"A verification is of {DRAFTED} drafted tokens a row, a prefill of {PROMPTS} × {CHUNK} tokens.",
        "Programs that the last table lacks were not begun within the time of the run.",
        "A verification has a branch for each of three widths, of which one runs; collectives are of all.",
        "Experts are divided over as many groups of chips as divide them.",
        *(f"Not compiled, so by shapes alone: {reason}." for reason in results["not_compiled"].values()),
    ]


def stamps(results: dict[str, Any]) -> dict[str, str]:
    """Date and commit of the run; for what compiled programs say, of the runs that compiled them."""
    programs = [program for case in results["cases"] for program in case.get("programs", {}).values()]
    runs = {program["commit"]: program for program in programs if "commit" in program}
    compiled = stamp([results, *runs.values()], MEASURED_CODE)
    first, *others = (title for title, *_ in tables(results))
    return {first: stamp([results], MEASURED_CODE), **dict.fromkeys(others, compiled)}
