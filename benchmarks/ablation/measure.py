"""The cells of the ablation, and the file that keeps what was measured."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from entropic_jax.analysis import studies
from entropic_jax.analysis.studies import Row, Workload
from entropic_jax.methods.presets import FINE_PAGES, preset

from ..harness.baselines.pool import EnginePool
from ..harness.baselines.reference_model import prepare_weights
from ..harness.preset_names import with_current_names
from .guards import guards
from .kv_precision import kv_precision, kv_precision_speed
from .larger_model import larger_model
from .page_rules import page_rules
from .recall import LONGEST, QUESTION_LENGTH, filler_of, recall, selectors
from .stress import estimators, held

STUDIES = (
    "speed",
    "quality",
    "information",
    "recall",
    "selectors",
    "page_rules",
    "shape",
    "pages",
    "load",
    "writing",
    "guards",
    "held",
    "estimators",
)
LAWS = ("integral", "exact", "mirostat", "edt", "dynatemp")
Cell = tuple[str, dict[str, Any], Callable[[], list[Row]]]  # study, its coordinates, how to measure


class Run:
    """The cells of an ablation, and the file that keeps what was measured."""

    def __init__(
        self,
        options: argparse.Namespace,
        workload: Workload,
        texts: list[str],
        file: Path,
        description: dict[str, Any],
    ) -> None:
        """Read what the file has.

        Args:
            options: the options of the command line.
            workload: model and text.
            texts: the text before it became tokens.
            file: lines of JSON, one for each measured cell.
            description: date, commit and machine of this run.
        """
        self.description = description
        self.options, self.workload, self.texts, self.file = options, workload, texts, file
        self.quick, self.seeds = options.quick, 1 if options.quick else options.seeds
        self.rows: dict[str, list[Row]] = {}
        self.done: set[str] = set()
        self.engines: EnginePool | None = None
        for line in file.read_text("utf-8").splitlines() if file.exists() else ():
            self._enter(json.loads(line))

    def _enter(self, entry: dict[str, Any]) -> None:
        if "study" in entry:
            self.done.add(json.dumps([entry["study"], entry["cell"]], sort_keys=True))
            self.rows.setdefault(entry["study"], []).extend(entry["rows"])

    def keep(self, entry: dict[str, Any]) -> None:
        """Append a line to the file, and add it to the results."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
        self._enter(entry)

    def cells(self) -> Iterator[Cell]:
        """Every cell, in the order of measurement."""
        workload, quick, seeds = self.workload, self.quick, range(self.seeds)
        contexts = (384,) if quick else (512, 2048, LONGEST)
        small: dict[str, Any] = dict(sequences=2, scored=32) if quick else dict(scored=QUESTION_LENGTH)
        sizes: dict[str, Any] = dict(names=("off", "full-lossy"), steps=4, repeat=2) if quick else {}
        for context in contexts:
            timed = min(context, LONGEST - 26 * 8)
            yield "speed", {"context": timed}, lambda c=timed: studies.speed(workload, c, **sizes)
        for seed in seeds:
            for context in contexts:

                def make(c=context, s=seed):
                    return studies.quality(workload, c, s, **small)

                yield "quality", {"context": context, "seed": seed}, make

                def make(c=context, s=seed):
                    return studies.information(workload, c, s, **small)

                yield "information", {"context": context, "seed": seed}, make
        filler = filler_of(self.texts, self.options.model)
        for distance in (512,) if quick else (512, 2048, 7500):
            more: dict[str, Any] = dict(drops=(0.01, 0.1), refreshes=(2, 4)) if distance > 512 else {}
            for seed in seeds:

                def make(d=distance, s=seed, m=more):
                    return recall(workload, filler, d, s, **m)

                yield "recall", {"distance": distance, "seed": seed}, make
        for seed in range(1 if quick else 2):
            distance = 512 if quick else 7500

            def make(d=distance, s=seed):
                return selectors(workload, filler, d, s, quick)

            yield "selectors", {"distance": distance, "seed": seed}, make

            def make(d=distance, s=seed):
                return page_rules(workload, filler, d, s, quick)

            yield "page_rules", {"distance": distance, "seed": seed}, make
        yield from self.shapes()
        near = 384 if quick else LONGEST
        yield "pages", {}, lambda: kv_precision_speed(workload, min(near, LONGEST - 26 * 8), quick)
        for seed in seeds:
            yield "pages", {"seed": seed}, lambda s=seed: kv_precision(workload, near, s, quick)
        for seed in seeds:
            reduced: dict[str, Any] = (
                dict(names=("off", "full-lossy"), sequences=4, width=2, most=12) if quick else {}
            )
            yield "load", {"seed": seed}, lambda s=seed, f=reduced: studies.load(workload, s, **f)
        for seed in seeds:
            names = ("off", "micro") if quick else ("off", "micro", "full-lossy", "paper")
            presets = {name: workload.preset(name) for name in names}
            for law in () if quick else LAWS:
                presets[f"micro, {law}"] = preset("micro", None, workload.gains.replace(law=law))
            tokens = 32 if quick else 256
            make = partial(studies.writing, workload, seed, presets=presets, tokens=tokens)
            yield "writing", {"seed": seed}, make
        for seed in range(min(3, self.seeds)):
            context = 384 if quick else 1024
            yield "guards", {"seed": seed}, lambda s=seed, c=context: guards(workload, c, s, quick)
            yield "held", {"seed": seed}, lambda s=seed: held(workload, s, quick)
            yield "estimators", {"seed": seed}, lambda s=seed, c=context: estimators(workload, c, s, quick)

    def shapes(self) -> Iterator[Cell]:
        """The larger model, at the kept fraction of the trained model's layers that select pages."""
        first = FINE_PAGES.dense_layers / self.workload.subject.decoder.shape.layers
        for context in (256,) if self.quick else (512, 16384, 32768):

            def measure(context: int = context) -> list[Row]:
                speeds = with_current_names(self.rows.get("speed", []), "preset")
                measured = [r for r in speeds if r["preset"] == "full-lossy"]
                near = min((r["context"] for r in measured), key=lambda c: abs(c - context), default=0)
                shares = [r["kept"] for r in measured if r["context"] == near]
                share = statistics.median(shares) if shares else 0.3
                engines = [] if self.quick else self.options.engines
                if engines and self.engines is None:
                    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
                    interpreters = {"openvino": self.options.openvino_python}
                    weights = prepare_weights(self.options.work)
                    self.engines = EnginePool(weights, threads, self.options.limit, interpreters)
                kept = max(0.01, (share - first) / (1 - first))
                return larger_model(context, kept, self.engines, engines, self.quick)

            yield "shape", {"context": context}, measure

    def measure(self, console: Console) -> None:
        """Measure the requested cells that the file does not have."""
        began = time.perf_counter()
        try:
            for study, cell, make in self.cells():
                name = json.dumps([study, cell], sort_keys=True)
                if study not in self.options.studies or name in self.done:
                    continue
                start = time.perf_counter()
                rows = make()
                spent = time.perf_counter() - start
                entry = {"study": study, "cell": cell, "rows": rows, "seconds": round(spent, 1)}
                self.keep(entry | {key: self.description[key] for key in ("date", "commit")})
                name_of_cell = ", ".join(f"{k} {v}" for k, v in cell.items())
                minutes = (time.perf_counter() - began) / 60
                console.print(f"{study}, {name_of_cell}: {spent:.0f} s ({minutes:.1f} min)", highlight=False)
        finally:
            if self.engines is not None:
                if self.engines.versions:
                    self.keep({"versions": self.engines.versions})
                self.engines.close()
