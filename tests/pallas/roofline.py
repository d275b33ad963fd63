"""Static roofline of decode on TPUs: the bandwidth that the emitted instructions leave room for.

    python -m tests.pallas.roofline           # count with libtpu, store, write the table of docs/kernels.md
    python -m tests.pallas.roofline --show    # write the table from the stored counts
    python -m tests.pallas.roofline --print   # count, and print the counts as JSON

libtpu compiles `paged_attention.decode` for each chip and writes out its final bundles: instructions that a
core issues together, one bundle a cycle. In the loop over chunks of pages there are loops that start copies
and loops that take blocks into the softmax; everything else in it is counted once a chunk, whether or not a
predicate skips it. A core that issues a bundle in every cycle and never waits cannot be faster than that.
"""

import argparse
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.harness import provenance

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "benchmarks" / "results" / "kernels-roofline.json"
BEGIN, END = "<!-- roofline: written by python -m tests.pallas.roofline -->", "<!-- end of roofline -->"
KERNEL = "entropic_jax/pallas/paged_attention"
MEASURED_CODE = (
    *(f"{KERNEL}/{name}.py" for name in ("tpu", "tpu_softmax", "tpu_tile", "split_kv")),
    "tests/pallas/roofline.py",
)
PAGE = 128  # positions
HEAD_DIMS = (128, 64)
LISTS = (512, 2048, 8192)  # positions of a list
DELAY = 4  # bundles after a branch, which are always issued
BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s*(LB|PF|PB|LH|LE|CT)?:\s*[> ]*\{(.*)$")
BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")


class Chip(NamedTuple):
    """A core of a chip."""

    clock: float  # Hz: published peak over the FLOPs of its matrix units in a cycle
    cores: int  # that share the bandwidth


CHIPS = {"v5e": Chip(1.5e9, 1), "v6e": Chip(1.75e9, 1), "v5p": Chip(1.75e9, 2)}


class Counts(NamedTuple):
    """Bundles of decode, with the sizes that they belong to."""

    start_round: int  # of the loop that starts the copies of several pages
    start_page: int  # of the loop that starts those of a page
    wide_step: int  # of a step of the softmax over several blocks
    narrow_step: int  # of a step over a block
    chunk: int  # everything else, for each chunk
    unrolled: int  # pages in a round of starts
    block: int  # pages
    together: int  # blocks in a wide step
    pages: int  # of a chunk
    copies: int  # of a page

    def of_list(self, pages: int) -> int:
        """Bundles for a list of some pages.

        >>> Counts(8, 3, 50, 30, 100, 4, 4, 2, 32, 2).of_list(13)
        227
        """
        full, rest = divmod(pages, self.pages)
        return full * self._of_chunk(self.pages) + (self._of_chunk(rest) if rest else 0)

    def _of_chunk(self, pages: int) -> int:
        rounds, singles = divmod(pages, self.unrolled)
        wide, narrow = divmod(-(-pages // self.block), self.together)
        starts = rounds * self.start_round + singles * self.start_page
        return starts + wide * self.wide_step + narrow * self.narrow_step + self.chunk


class Loop(NamedTuple):
    """A loop of a program: its first bundle and its branch, and what it holds."""

    first: int
    last: int
    text: str

    @property
    def bundles(self) -> int:
        """Bundles of an iteration."""
        return self.last - self.first + 1 + DELAY

    def holds(self, pattern: str) -> int:
        """How often a pattern occurs in it."""
        return len(re.findall(pattern, self.text))


def loops(program: str) -> list[Loop]:
    """The loops in the text of final bundles. Raises ValueError for a loop without a branch."""
    bundles: list[tuple[str | None, str]] = []
    for line in program.splitlines():
        if match := BUNDLE.match(line):
            bundles.append((match[1], match[2]))
        elif bundles:
            bundles[-1] = (bundles[-1][0], f"{bundles[-1][1]}\n{line}")
    branches: dict[str, int] = {}
    for place, (_, text) in enumerate(bundles):
        branches.update({match[1]: place for match in BRANCH.finditer(text)})
    result = []
    for first, (label, text) in enumerate(bundles):
        if label != "LB":
            continue
        last = max((branches.get(x, -1) for x in re.findall(r"Start region (\d+)", text)), default=-1)
        if last < first:
            raise ValueError(f"the loop at bundle {first} has no branch")
        held = bundles[first : last + 1 + DELAY]
        result.append(Loop(first, last, "\n".join(text for _, text in held)))
    return result


START, PRODUCT = r"= dma\.hbm_to_vmem", r"\bv?matmul\."


def count(program: str, sizes: dict[str, int]) -> Counts:
    """The counts of a program; `sizes` are the other fields. Raises ValueError where its form is another."""
    candidates = [x for x in loops(program) if x.holds(START) and x.holds(PRODUCT)]
    if not candidates:
        raise ValueError("no loop both copies pages and multiplies")
    chunk = min(candidates, key=lambda x: x.bundles)
    inner = [x for x in loops(program) if chunk.first < x.first and x.last < chunk.last]
    starts = sorted(x.bundles for x in inner if x.holds(START))
    steps = sorted(x.bundles for x in inner if x.holds(PRODUCT))
    if (len(starts), len(steps)) != (2, 2):
        raise ValueError(f"a chunk must have two loops of copies and two of products; got {starts}, {steps}")
    rest = chunk.bundles - sum(starts) - sum(steps)
    return Counts(starts[1], starts[0], steps[1], steps[0], rest, **sizes)


def measure() -> dict[str, Any]:
    """Compile decode for every chip and head_dim, and count. libtpu must not have been loaded before."""
    folder = tempfile.mkdtemp()
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{flags} --xla_jf_dump_llo_pass_label_regex=final_bundles"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from entropic_jax.pallas.paged_attention import tpu
    from entropic_jax.pallas.paged_attention.cases import Case

    from . import programs
    from .compilers import compile_for_tpu

    counted: dict[str, Any] = {}
    for chip in CHIPS:
        for head_dim in HEAD_DIMS:
            case = Case(8, 8, 4, head_dim, PAGE, 64, kept=0.25, dtype="bfloat16")
            program = programs.decode(case, tpu.decode)
            for path in Path(folder).iterdir():
                path.unlink()
            compile_for_tpu(program.function, *program.arguments, generation=chip)
            (dump,) = Path(folder).glob("*-paged_decode*[0-9]-final_bundles.txt")
            block = tpu.BLOCK // PAGE
            pages = min(tpu.CHUNK_BYTES // bytes_of_page(head_dim), 64) // block * block
            sizes = dict(unrolled=tpu.UNROLLED, block=block, together=tpu.TOGETHER, pages=pages, copies=2)
            counted[f"{chip}-{head_dim}"] = count(dump.read_text("utf-8"), sizes)._asdict()
    run = provenance.describe_run(Console(stderr=True))
    return {"run": run, "libtpu": importlib.metadata.version("libtpu"), "counts": counted}


def bytes_of_page(head_dim: int) -> int:
    """Bytes of the keys and values of a page and a head, in bfloat16."""
    return 2 * PAGE * head_dim * 2


def bounds(stored: dict[str, Any]) -> dict[tuple[str, int, int], float]:
    """The bound on the share of the bandwidth, by chip, head_dim and positions of a list; at most 1."""
    from entropic_jax.analysis.chips import CHIPS as PUBLISHED
    from entropic_jax.state.ledger import HARDWARE

    result = {}
    for name, counts in stored["counts"].items():
        chip, head_dim = name.split("-")
        clock, cores = CHIPS[chip]
        bandwidth = float(HARDWARE[PUBLISHED[chip].hardware].bandwidth) / cores
        for positions in LISTS:
            pages = positions // PAGE
            seconds = Counts(**counts).of_list(pages) / clock
            rate = pages * bytes_of_page(int(head_dim)) / seconds
            result[chip, int(head_dim), positions] = min(1.0, rate / bandwidth)
    return result


def table(stored: dict[str, Any]) -> str:
    """The section of the document."""
    header = ["chip", "head_dim", "bytes of a page", "copies", "bundles to start a page"]
    header += [
        "bundles to attend to it",
        "bundles of a chunk besides",
        *(f"bound, lists of {n}" for n in LISTS),
    ]
    lines, shares = [header, ["---"] * len(header)], bounds(stored)
    for name, fields in stored["counts"].items():
        chip, head_dim = name.split("-")
        counts = Counts(**fields)
        start = counts.start_round / counts.unrolled
        attend = counts.wide_step / (counts.block * counts.together)
        row = [chip, head_dim, f"{bytes_of_page(int(head_dim))}", f"{counts.copies}", f"{start:.1f}"]
        row += [f"{attend:.1f}", f"{counts.chunk}"]
        lines.append([*row, *(f"{100 * shares[chip, int(head_dim), n]:.0f} %" for n in LISTS)])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    note = f"Counted with libtpu {stored['libtpu']}, bfloat16, pages of {PAGE}."
    stamp = f"*{provenance.stamp([stored['run']], MEASURED_CODE)}*"
    return f"{BEGIN}\n\n{stamp}\n\n{text}\n\n{note}\n\n{END}"


def main() -> None:
    """Count, store the counts, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="from the stored counts; compiles nothing")
    parser.add_argument("--print", action="store_true", help="print the counts and store nothing")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text("utf-8")) if options.show else measure()
    if options.print:
        json.dump(stored, sys.stdout)
        return
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    before, rest = DOCUMENT.read_text("utf-8").split(BEGIN)
    DOCUMENT.write_text(before + table(stored) + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
