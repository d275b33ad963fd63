"""What samplers solve, and what they spend on it: tasks with checkable answers, and free text.

    python -m benchmarks.sampling [--quick] [--cases 24] [--seeds 2] [--document]
    python -m benchmarks.sampling --gsm8k FILE --humaneval FILE --model DIRECTORY

Samplers take turns, batch by batch. A run that was cut short goes on where it stopped. The first batch of
every shape is run twice and counted once: compilation is not measured.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from rich.console import Console

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.analysis.ablation import distinct
from entropic_jax.calibration import Calibration, load_calibration
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.control.presets import Gains, Preset, preset
from entropic_jax.control.temperature import Mirostat
from entropic_jax.methods import entropix, entropix_search
from entropic_jax.methods.dslider import DSlider
from entropic_jax.methods.entropix_moves import Plan
from entropic_jax.methods.entropix_released import AsReleased
from entropic_jax.serving.generation import EMBEDDED
from entropic_jax.state import RUNNING

from . import report, sampling_report, sampling_tasks
from .sampling_tasks import Task
from .worker import ROOT

ROWS = 8  # tasks at once
WRITTEN = 192  # tokens of a free text
LAUNCH = 64
LONGEST_PERIOD = 40  # tokens of a loop


class Way(NamedTuple):
    """A sampler: what controls, how rows draw, and how far they search."""

    preset: Preset
    drawing: dict[str, float]
    plan: Plan | None = None


def ways(found: Calibration, model: models.Model) -> dict[str, Way]:
    """The samplers that are compared. Constants of others are those of their papers."""
    prior = AR1(found.mean, found.scale, found.correlation)
    gains = Gains(
        target_entropy=found.target_entropy,
        low_entropy=found.low_entropy,
        high_entropy=found.high_entropy,
        prior=prior,
    )
    off = preset("off")
    law = lambda controller: Preset(chain(controller), None, None)
    own = entropix.calibrated(found)
    return {
        "greedy": Way(off, dict(temperature=0.0)),
        "T 1": Way(off, {}),
        "T 0.7, top-p 0.9": Way(off, dict(temperature=0.7, top_p=0.9)),
        "min-p 0.1": Way(off, dict(min_p=0.1)),
        "top-nσ 1": Way(off, dict(top_n_sigma=1.0)),
        "Mirostat 2": Way(law(Mirostat(target_entropy=found.target_entropy)), {}),
        "micro": Way(preset("micro", None, gains), {}),
        "micro, T ≤ 1": Way(preset("micro", None, gains._replace(highest_temperature=1.0)), {}),
        "full": Way(preset("full", None, gains), {}),
        "Entropix as released": Way(law(AsReleased()), {}),
        "Entropix, row by row": Way(law(own), {}),
        "Entropix": Way(law(own), {}, Plan()),
        "dslider": Way(law(DSlider(vocabulary=model.decoder.shape.vocabulary)), {}),
    }


class Batch(NamedTuple):
    """What one batch came to."""

    texts: list[list[int]]
    seconds: float  # on the clock, reading the prompts included
    computed: int  # tokens that were computed, those taken back included
    roofline: float  # seconds of the ledger


class Bench:
    """A model and how to run a way on it."""

    def __init__(self, folder: Path, context: int) -> None:
        self.model = models.load(folder, "float32")
        assert self.model.tokenizer is not None
        self.tokenizer = self.model.tokenizer
        self.context = min(context, self.model.config.max_position_embeddings)
        self.calibration = load_calibration(folder)
        self.ways = ways(self.calibration, self.model)
        self.warm: set[Any] = set()

    def run(self, name: str, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> Batch:
        """Continue the prompts; once more before that where the shape is new."""
        shape = (name, len(prompts), max(1, max(map(len, prompts)) - 1).bit_length())
        if shape not in self.warm:
            self.warm.add(shape)
            self._run(self.ways[name], prompts, 2, seed)
        return self._run(self.ways[name], prompts, tokens, seed)

    def _run(self, way: Way, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> Batch:
        began = time.perf_counter()
        m, k = self.model, way.plan.branches if way.plan else 1
        page_policy = way.preset.page_policy
        pool = allocate(
            m.decoder.shape,
            len(prompts) * k,
            self.context,
            # Branches share what they have in common; they need room for a few pages of their own.
            pages=len(prompts) * (-(-self.context // 64) + 2 * (k - 1)) if k > 1 else None,
            page_size=page_policy.page_size if page_policy else 64,
        )
        given = dict(
            key=jax.random.key(seed),
            max_tokens=tokens,
            sample=parameters(len(prompts) * k, **way.drawing),
            belief_temperature=self.calibration.temperature,
        )
        law = way.preset.controller
        if way.plan is None:
            state = start(m.decoder, m.params, law, pool, prompts, page_policy=page_policy, **given)
            texts: list[list[int]] = [[] for _ in prompts]
            while (np.asarray(state.status) == RUNNING).any():
                state, trace = generate(m.decoder, m.params, law, state, LAUNCH, capacity=LAUNCH)
                host = jax.device_get(trace)
                for row, text in enumerate(texts):
                    text += host.token[host.emitted[:, row], row].tolist()
            computed = sum(map(len, texts))
        else:
            search = entropix_search.begin(m.decoder, m.params, law, pool, prompts, way.plan, **given)
            while (np.asarray(search.state.status) == RUNNING).any():
                search = entropix_search.generate(m.decoder, m.params, law, search, 8 * LAUNCH, plan=way.plan)
            texts = [t.token.tolist() for t in entropix_search.texts(search, way.plan)]
            state = search.state
            computed = sum(map(len, texts)) + int(np.asarray(search.tally.discarded).sum())
        seconds = time.perf_counter() - began
        return Batch(texts, seconds, computed, float(np.asarray(state.ledger.seconds).sum()))


def loops(text: Sequence[int]) -> bool:
    """Whether a text ends in a loop: a period of up to 40 tokens, three times and for 12 tokens at least.

    >>> loops([1, 2, 3] + [7, 8] * 6), loops([1, 2, 3] + [7, 8] * 3), loops(list(range(99)))
    (True, False, False)
    """
    for period in range(1, LONGEST_PERIOD + 1):
        tail = text[-max(3 * period, 12) :]
        if len(tail) >= max(3 * period, 12) and all(
            a == b for a, b in zip(tail[period:], tail[:-period], strict=True)
        ):
            return True
    return False


def source() -> list[str]:
    """Held-out source code: that of `rich`, which is installed with this package."""
    spec = importlib.util.find_spec("rich")
    assert spec and spec.submodule_search_locations
    files = sorted(Path(spec.submodule_search_locations[0]).glob("[a-z]*.py"))
    return [text for f in files if len(text := f.read_text("utf-8")) > 8000]


def sets_of_tasks(options: argparse.Namespace) -> Iterator[tuple[str, int, list[Task]]]:
    """(kind, seed, tasks) in the order in which they are measured."""
    cases = ROWS if options.quick else options.cases
    filler = "".join(source()[0].splitlines(keepends=True)[40:64])
    for name in ("gsm8k", "humaneval"):
        if path := getattr(options, name):
            yield name, 0, getattr(sampling_tasks, name)(path)
    if not (options.gsm8k or options.humaneval):
        for seed in range(1 if options.quick else options.seeds):
            for kind in sampling_tasks.KINDS:
                yield kind, seed, sampling_tasks.generated(kind, cases, seed, filler)


def solve(bench: Bench, name: str, tasks: list[Task], seed: int) -> dict[str, Any]:
    """One way on one set of tasks."""
    solved, tokens, seconds, roofline = [], 0, 0.0, 0.0
    for first in range(0, len(tasks), ROWS):
        some = tasks[first : first + ROWS]
        prompts = [bench.tokenizer.encode(task.prompt) for task in some]
        batch = bench.run(name, prompts, max(task.tokens for task in some), 1000 * seed + first)
        said = [bench.tokenizer.decode(text) for text in batch.texts]
        solved += [task.check(text) for task, text in zip(some, said, strict=True)]
        tokens, seconds = tokens + batch.computed, seconds + batch.seconds
        roofline += batch.roofline
    return {"solved": [int(x) for x in solved], "tokens": tokens, "seconds": seconds, "roofline": roofline}


def write(bench: Bench, name: str, seed: int, tokens: int) -> dict[str, Any]:
    """Free text after held-out source."""
    rng = np.random.default_rng((seed, 77))
    texts = [bench.tokenizer.encode(text) for text in source()]
    chosen = [texts[int(i)] for i in rng.integers(0, len(texts), ROWS)]
    starts = [int(rng.integers(0, len(text) - 200)) for text in chosen]
    prompts = [text[at : at + 128] for text, at in zip(chosen, starts, strict=True)]
    batch = bench.run(name, prompts, tokens, seed)
    return {
        "distinct_4": distinct(batch.texts, 4),
        "loops": [int(loops(text)) for text in batch.texts],
        "tokens": batch.computed,
        "seconds": batch.seconds,
    }


def main() -> None:
    """Measure what is missing, store and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--cases", type=int, default=24, help="tasks of a kind and seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024, help="positions of a sequence")
    parser.add_argument("--ways", type=lambda text: text.split(";"), help="some of the samplers, by ;")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="JSON lines, in place of generated tasks")
    parser.add_argument("--humaneval", type=Path, metavar="FILE", help="the same")
    parser.add_argument("--quick", action="store_true", help="small: shows that everything runs")
    parser.add_argument("--output", type=Path, help="benchmarks/results/sampling-CPU.json")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write the tables into docs/results.md")
    options = parser.parse_args()
    console = Console()
    if options.show:
        results = json.loads(options.show.read_text())
    else:
        results = measure(options, console)
    tables = sampling_report.grids(results)
    report.publish(options, "sampling", tables, sampling_report.notes(results), console)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything that is not in the output file yet."""
    here = report.machine(console)
    kind = "quick-" if options.quick else ""
    output = (
        options.output or ROOT / "benchmarks" / "results" / f"sampling-{kind}{report.slug(here['cpu'])}.json"
    )
    results = json.loads(output.read_text()) if output.exists() else {**here, "tasks": [], "texts": []}
    bench = Bench(options.model, options.context)
    names = options.ways or list(bench.ways)
    unknown = [name for name in names if name not in bench.ways]
    if unknown:
        raise SystemExit(f"--ways has {unknown[0]!r}; accepted are {'; '.join(bench.ways)}")
    results["settings"] = {"cases": options.cases, "context": options.context, "rows": ROWS}
    done = {(r["way"], r["kind"], r["seed"]) for r in results["tasks"]}
    written = {(r["way"], r["seed"]) for r in results["texts"]}

    def store() -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")

    for task, seed, some in sets_of_tasks(options):
        for name in names:
            if (name, task, seed) not in done:
                found = solve(bench, name, some, seed)
                results["tasks"].append({"way": name, "kind": task, "seed": seed, **found})
        store()
        console.print(f"{task}, seed {seed}: {len(some)} tasks")
    for seed in range(1 if options.quick else options.seeds):
        for name in names:
            if (name, seed) not in written:
                found = write(bench, name, seed, 32 if options.quick else WRITTEN)
                results["texts"].append({"way": name, "seed": seed, **found})
        store()
        console.print(f"free text, seed {seed}")
    console.print(f"results: {output}")
    return results


if __name__ == "__main__":
    main()
