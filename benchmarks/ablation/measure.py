"""What each scale of control brings, and what it costs: the ablation.

    python -m benchmarks.ablation [--studies quality,recall,…] [--quick] [--document]

Every study compares configurations in one run, taking turns, on text that the model was not trained on: the
source of `rich`, a held-out package that is installed with this one. A run that was interrupted goes on where
it stopped: what has been measured is kept, cell by cell, as lines of JSON.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from rich.console import Console

from entropic_jax import models
from entropic_jax.analysis import studies
from entropic_jax.analysis.ablation import Subject
from entropic_jax.analysis.studies import Material, Row
from entropic_jax.calibration import load_calibration
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.control.presets import FINE_PAGES, Gains, preset
from entropic_jax.serving.compilation import remember_compilations
from entropic_jax.serving.generation import EMBEDDED

from . import ablation_report as report
from .ablation_pages import pages, pages_speed
from .ablation_reading import ASKED, LONGEST, asked, filler_of, selectors
from .ablation_shape import shape
from .ablation_stress import estimators, held, stress
from .decode import work_directory
from .worker import ROOT, Peers

STUDIES = (
    "speed",
    "quality",
    "recall",
    "selectors",
    "shape",
    "pages",
    "load",
    "writing",
    "stress",
    "held",
    "estimators",
)
LAWS = ("integral", "exact", "mirostat", "edt", "dynatemp")
Cell = tuple[str, dict[str, Any], Callable[[], list[Row]]]  # study, what names the cell in it, how to measure


def held_out() -> list[str]:
    """The modules of `rich`."""
    spec = importlib.util.find_spec("rich")
    assert spec and spec.submodule_search_locations
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
    return [text for file in files if len(text := file.read_text("utf-8")) > 2000]


def material_of(folder: Path, texts: list[str]) -> Material:
    model = models.load(folder, "float32")
    assert model.tokenizer is not None
    found = load_calibration(folder)
    prior = AR1(found.mean, found.scale, found.correlation)
    gains = Gains(
        target_entropy=found.target_entropy,
        low_entropy=found.low_entropy,
        high_entropy=found.high_entropy,
        prior=prior,
    )
    stream = np.array([token for text in texts for token in model.tokenizer.encode(text)])
    size = sum(len(text.encode()) for text in texts)
    subject = Subject(model.decoder, model.params, found.temperature)
    return Material(subject, stream, size / len(stream), gains)


class Run:
    """The cells of an ablation, and the file that keeps what was measured."""

    def __init__(self, options: argparse.Namespace, material: Material, texts: list[str], file: Path) -> None:
        self.options, self.material, self.texts, self.file = options, material, texts, file
        self.quick, self.seeds = options.quick, 1 if options.quick else options.seeds
        self.rows: dict[str, list[Row]] = {}
        self.done: set[str] = set()
        self.peers: Peers | None = None
        for line in file.read_text("utf-8").splitlines() if file.exists() else ():
            self._enter(json.loads(line))

    def _enter(self, entry: dict[str, Any]) -> None:
        if "study" in entry:
            self.done.add(json.dumps([entry["study"], entry["cell"]], sort_keys=True))
            self.rows.setdefault(entry["study"], []).extend(entry["rows"])

    def keep(self, entry: dict[str, Any]) -> None:
        """Append a line to the file, and take it in."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
        self._enter(entry)

    def cells(self) -> Iterator[Cell]:
        """Everything that is to be measured, in the order in which it is."""
        material, quick, seeds = self.material, self.quick, range(self.seeds)
        contexts = (384,) if quick else (512, 2048, LONGEST)
        small: dict[str, Any] = dict(sequences=2, scored=32) if quick else dict(scored=ASKED)
        turns: dict[str, Any] = dict(names=("off", "full"), steps=4, repeat=2) if quick else {}
        for context in contexts:
            here = min(context, LONGEST - 26 * 8)
            yield "speed", {"context": here}, lambda c=here: studies.speed(material, c, **turns)
        for seed in seeds:
            for context in contexts:
                make = lambda c=context, s=seed: studies.quality(material, c, s, **small)
                yield "quality", {"context": context, "seed": seed}, make
        filler = filler_of(self.texts, self.options.model)
        for distance in (512,) if quick else (512, 2048, 7500):
            more: dict[str, Any] = dict(drops=(0.01, 0.1), refreshes=(2, 4)) if distance > 512 else {}
            for seed in seeds:
                make = lambda d=distance, s=seed, m=more: asked(material, filler, d, s, **m)
                yield "recall", {"distance": distance, "seed": seed}, make
        for seed in range(1 if quick else 2):
            distance = 512 if quick else 7500
            make = lambda d=distance, s=seed: selectors(material, filler, d, s, quick)
            yield "selectors", {"distance": distance, "seed": seed}, make
        yield from self.shapes()
        near = 384 if quick else LONGEST
        yield "pages", {}, lambda: pages_speed(material, min(near, LONGEST - 26 * 8), quick)
        for seed in seeds:
            yield "pages", {"seed": seed}, lambda s=seed: pages(material, near, s, quick)
        for seed in seeds:
            few: dict[str, Any] = dict(names=("off", "full"), sequences=4, width=2, most=12) if quick else {}
            yield "load", {"seed": seed}, lambda s=seed, f=few: studies.load(material, s, **f)
        for seed in seeds:
            names = ("off", "micro") if quick else ("off", "micro", "full", "paper")
            ways = {name: material.preset(name) for name in names}
            for law in () if quick else LAWS:
                ways[f"micro, {law}"] = preset("micro", None, material.gains._replace(law=law))
            make = lambda s=seed, w=ways: studies.writing(material, s, ways=w, tokens=32 if quick else 256)
            yield "writing", {"seed": seed}, make
        for seed in range(min(3, self.seeds)):
            context = 384 if quick else 1024
            yield "stress", {"seed": seed}, lambda s=seed, c=context: stress(material, c, s, quick)
            yield "held", {"seed": seed}, lambda s=seed: held(material, s, quick)
            yield "estimators", {"seed": seed}, lambda s=seed, c=context: estimators(material, c, s, quick)

    def shapes(self) -> Iterator[Cell]:
        """The larger shape; what is imposed is what the trained model read in the layers that choose."""
        first = FINE_PAGES.dense_layers / self.material.subject.decoder.shape.layers
        for context in (256,) if self.quick else (512, 16384, 32768):

            def measure(context: int = context) -> list[Row]:
                measured = [r for r in self.rows.get("speed", ()) if r["preset"] == "full"]
                near = min((r["context"] for r in measured), key=lambda c: abs(c - context), default=0)
                shares = [r["kept"] for r in measured if r["context"] == near]
                share = statistics.median(shares) if shares else 0.3
                engines = [] if self.quick else self.options.engines
                if engines and self.peers is None:
                    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
                    given = {"openvino": self.options.openvino_python}
                    self.peers = Peers(work_directory(self.options.work), threads, self.options.limit, given)
                kept = max(0.01, (share - first) / (1 - first))
                return shape(context, kept, self.peers, engines, self.quick)

            yield "shape", {"context": context}, measure

    def measure(self, console: Console) -> None:
        """Run what is asked for and has not been run."""
        began = time.perf_counter()
        try:
            for study, cell, make in self.cells():
                name = json.dumps([study, cell], sort_keys=True)
                if study not in self.options.studies or name in self.done:
                    continue
                start = time.perf_counter()
                rows = make()
                spent = time.perf_counter() - start
                self.keep({"study": study, "cell": cell, "rows": rows, "seconds": round(spent, 1)})
                what = ", ".join(f"{k} {v}" for k, v in cell.items())
                minutes = (time.perf_counter() - began) / 60
                console.print(f"{study}, {what}: {spent:.0f} s ({minutes:.1f} min)", highlight=False)
        finally:
            if self.peers is not None:
                if self.peers.versions:
                    self.keep({"versions": self.peers.versions})
                self.peers.close()


def main() -> None:
    """Run the studies asked for, store and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--studies", type=lambda text: text.split(","), default=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small: shows that everything runs")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument(
        "--engines",
        type=lambda text: [name for name in text.split(",") if name],
        default=["openvino", "openvino-half"],
        help="of benchmarks.decode, beside the larger shape (openvino,openvino-half)",
    )
    given = os.environ.get("OPENVINO_PYTHON", sys.executable)
    parser.add_argument("--openvino-python", default=given, help="its interpreter ($OPENVINO_PYTHON)")
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of one call of an engine")
    folder = Path(tempfile.gettempdir()) / "entropic-decode"
    parser.add_argument("--work", type=Path, default=folder, help="keeps the weights of other engines")
    parser.add_argument("--output", type=Path, help="benchmarks/results/ablation-CPU.jsonl")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write tables and picture into docs/")
    options = parser.parse_args()
    unknown = [s for s in options.studies if s not in STUDIES]
    if unknown:
        parser.error(f"--studies has {unknown[0]}; accepted are {', '.join(STUDIES)}")
    console = Console()
    if not options.show:
        here = report.machine(console)
        stored = ROOT / "benchmarks" / "results" / f"ablation-{report.slug(here['cpu'])}.jsonl"
        options.show = options.output or (options.work / "quick.jsonl" if options.quick else stored)
        if options.fresh or (options.quick and not options.output):
            options.show.unlink(missing_ok=True)
        remember_compilations()
        texts = held_out()
        run = Run(options, material_of(options.model, texts), texts, options.show)
        if not run.rows:
            gains = {k: v for k, v in run.material.gains._asdict().items() if k != "prior"}
            run.keep({**here, "gains": gains})
        run.measure(console)
        console.print(f"results: {options.show}")
    results = report.load(options.show)
    report.show(results, console)
    if options.document:
        report.document(results)


if __name__ == "__main__":
    main()
