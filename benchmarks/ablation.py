"""What each scale of control brings, and what it costs: the ablation.

    python -m benchmarks.ablation [--studies quality,recall,selectors,speed,shape,load,writing] [--quick]

Every study compares configurations in one run, taking turns, on text that the model was not trained on: the
source of `rich`, a held-out package that is installed with this one. Times are medians over launches.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

import models
from entropic_jax import cache, chain, start
from entropic_jax import selection as pages
from entropic_jax.analysis import ablation
from entropic_jax.analysis.ablation import LN2, Subject
from entropic_jax.calibration import load_calibration
from entropic_jax.control.presets import FINE, Gains, Preset, preset
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.control.scheduling import Moments
from entropic_jax.pallas.paged_attention import Rules
from models.train import recall
from serving.generation import EMBEDDED

from . import ablation_report as report
from .ablation_speed import random_context, random_model, take_turns
from .worker import ROOT

STUDIES = ("quality", "recall", "selectors", "speed", "shape", "load", "writing")
READING = ("off", "meso", "full", "paper")  # presets that may read differently
ALL = ("off", "micro", "meso", "macro", "full", "paper")
EVERYTHING_MAY_GO = 0.999  # a drop at which only the rules decide what stays


class Bench:
    """The model, its texts and its presets."""

    def __init__(self, model: Path, quick: bool, seeds: int) -> None:
        self.folder, self.quick, self.seeds = model, quick, seeds
        self.model = models.load(model, "float32")
        assert self.model.tokenizer is not None
        self.subject = Subject(self.model.decoder, self.model.params)
        found = load_calibration(model)
        self.belief = found.temperature
        prior = Moments(found.mean, found.scale, found.correlation)
        self.gains = Gains(
            target=found.target_entropy, low=found.low_entropy, high=found.high_entropy, prior=prior
        )
        spec = importlib.util.find_spec("rich")
        assert spec and spec.submodule_search_locations
        files = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
        self.texts = [t for f in files if len(t := f.read_text("utf-8")) > 2000]
        stream = [i for text in self.texts for i in self.model.tokenizer.encode(text)]
        self.stream = np.array(stream)
        self.bytes_per_token = sum(len(t.encode()) for t in self.texts) / len(stream)

    def preset(self, name: str, width: int | None = None) -> Preset:
        return preset(name, width, self.gains)

    def windows(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Stretches of held-out text, at random."""
        starts = np.random.default_rng(seed).integers(0, len(self.stream) - length, count)
        return [self.stream[s : s + length].tolist() for s in starts]

    def forced(self, setting: Preset, sequences: list[list[int]], scored: int, **given: Any):
        return ablation.forced(
            self.subject, setting, sequences, scored, belief_temperature=self.belief, **given
        )

    def quality(self) -> list[dict[str, Any]]:
        """Bits per byte of the last tokens of held-out windows, per preset and context."""
        scored = 32 if self.quick else 256
        rows = []
        for context in (512,) if self.quick else (512, 2048, 8192 - 8):
            for seed in range(self.seeds):
                texts = self.windows(4, context, 100 + seed)
                for name in READING:
                    found = self.forced(self.preset(name), texts, scored)
                    rows.append(
                        {
                            "preset": name,
                            "context": context,
                            "seed": seed,
                            "bits_per_byte": float(found.surprisal.mean() / LN2 / self.bytes_per_token),
                            "kept": float(found.kept[:, 1:].mean()),
                            "bytes_read": float(found.bytes_read.mean()),
                            "efficiency": float(found.efficiency.mean()),
                            "certificate": float(np.median(found.certificate)),
                        }
                    )
        return rows

    def recall(self) -> list[dict[str, Any]]:
        """Share of questions answered at set distances, per preset."""
        filler = recall.Filler(self.texts, Tokenizer.from_file(str(self.folder / "tokenizer.json")))
        rows = []
        for distance in (512,) if self.quick else (512, 2048, 7500):
            cases = [
                recall.make_window(np.random.default_rng((9, distance, i)), distance, filler)
                for i in range(4 if self.quick else 4 * self.seeds)
            ]
            length = min(len(tokens) for tokens, _ in cases)
            scored = min(length - 8, 400)
            for first in range(0, len(cases), 4):
                some = cases[first : first + 4]
                texts = [tokens[len(tokens) - length :].tolist() for tokens, _ in some]
                for name in READING:
                    found = self.forced(self.preset(name), texts, scored)
                    for i, (tokens, answers) in enumerate(some):
                        for kind, answer in answers.items():
                            place = answer.positions - (len(tokens) - length) - (length - scored)
                            if place.min() < 0:
                                continue
                            sure = bool((found.surprisal[i, place] < LN2).all())
                            rows.append(
                                {
                                    "preset": name,
                                    "distance": distance,
                                    "kind": kind,
                                    "right": sure,
                                    "kept": float(found.kept[i, 1:].mean()),
                                }
                            )
        return rows

    def selectors(self) -> list[dict[str, Any]]:
        """Bits per byte against the share read: entropy's choice beside others, at several budgets."""
        context, scored = (1024, 32) if self.quick else (8192 - 8, 192)
        texts = self.windows(4, context, 7)
        total, fine = -(-context // FINE.page_size), FINE.rules
        budgets = (0.25,) if self.quick else (0.1, 0.2, 0.4)
        drops = (0.1,) if self.quick else (0.02, 0.05, 0.1, 0.2)
        fixed = Preset(chain(FixedPruning(EVERYTHING_MAY_GO)), None, None)
        made: list[tuple[str, float, Preset]] = [("dense", 1.0, self.preset("off"))]
        for drop in drops:
            entropic = preset("meso", gains=self.gains._replace(drop=1.5 * drop, least_drop=drop / 2))
            made.append(("entropy", drop, entropic))
            made.append(("top-p", drop, Preset(chain(FixedPruning(drop)), FINE, None)))
        for share in budgets:
            k = max(3, round(share * total))
            rules = {
                "quest": Rules(sink=0, recent=1, least=k, guard=1.0),
                "fixed budget": fine._replace(least=k),
                "sink + recent": fine._replace(recent=k - fine.sink, least=0),
                "random": fine._replace(least=k),
            }
            made += [
                (name, share, fixed._replace(selection=replace(FINE, information="mass", rules=r)))
                for name, r in rules.items()
            ]
        rows = []
        for name, setting, way in made:
            jax.clear_caches()  # the same static arguments would find the program without the patch
            with mock.patch.object(pages, "information", shuffled if name == "random" else pages.information):
                found = self.forced(way, texts, scored)
            rows.append(
                {
                    "selector": name,
                    "setting": setting,
                    "kept": float(found.kept[:, 1:].mean()),
                    "bits_per_byte": float(found.surprisal.mean() / LN2 / self.bytes_per_token),
                }
            )
        return rows

    def speed(self) -> list[dict[str, Any]]:
        """Milliseconds a step of the embedded model, per preset and context, one sequence."""
        steps, repeat = (8, 2) if self.quick else (32, self.seeds)
        rows = []
        for context in (512,) if self.quick else (512, 2048, 7900):
            (text,) = self.windows(1, context, 3)
            states = {}
            for name in ALL:
                room = (repeat + 1) * steps + 8
                room = min(room, self.model.config.max_position_embeddings - context)
                states[name] = ablation.begin(
                    self.subject, self.preset(name), [text], room, belief_temperature=self.belief
                )
            rows += take_turns(self.subject, {n: self.preset(n) for n in ALL}, states, steps, repeat, context)
        return rows

    def shape(self, kept: float) -> list[dict[str, Any]]:
        """The same for the 25M shape of `benchmarks.decode`, with the share that is read imposed."""
        subject = random_model()
        steps, repeat = (4, 2) if self.quick else (16, self.seeds)
        rows = []
        for context in (512,) if self.quick else (512, 16384, 32768):
            total = -(-context // FINE.page_size)
            # Of the layers that choose; the first reads everything, here as in the model it was measured on.
            choice = replace(FINE, rules=FINE.rules._replace(least=max(16, round(kept * total))))
            imposed = Preset(chain(FixedPruning(EVERYTHING_MAY_GO)), choice, None)
            ways = {"off": self.preset("off"), "imposed": imposed}
            states = {
                n: random_context(subject, way, context, steps * (repeat + 1) + 8) for n, way in ways.items()
            }
            rows += take_turns(subject, ways, states, steps, repeat, context)
        return rows

    def load(self) -> list[dict[str, Any]]:
        """More sequences than rows: completion times under each schedule."""
        count, width = (6, 2) if self.quick else (24, 4)
        rows = []
        for seed in range(self.seeds):
            rng = np.random.default_rng(seed)
            prompts = [
                self.windows(1, int(n), seed * 100 + i)[0] for i, n in enumerate(rng.integers(32, 512, count))
            ]
            budgets = np.clip(rng.lognormal(3.7, 0.8, count), 8, 200).astype(int)
            for name in ("off", "macro", "full", "paper"):
                # Without a schedule: the same rows at a time, in order of arrival.
                setting = preset("macro", width, self.gains._replace(schedule="fcfs"))
                setting = setting if name == "off" else self.preset(name, width)
                rows.append({"preset": name, "seed": seed, **serve(self, setting, prompts, budgets)})
        return rows

    def writing(self) -> list[dict[str, Any]]:
        """Free generation: how the entropy is held, and how the text reads."""
        tokens = 64 if self.quick else 384
        held_out = self.windows(8, tokens, 55)
        rows = []
        ways: dict[str, Preset] = {name: self.preset(name) for name in ("off", "micro", "full", "paper")}
        for law in ("integral", "exact", "mirostat", "edt", "dynatemp"):
            ways[f"micro, {law}"] = preset("micro", None, self.gains._replace(law=law))
        clips = self.gains.lowest, self.gains.highest
        for seed in range(self.seeds):
            prompts = self.windows(4, 256, 500 + seed)
            for name, setting in ways.items():
                ends = (0.1, 2.0) if name == "paper" or setting is None else clips
                found = ablation.write(
                    self.subject, setting, prompts, tokens, target=self.gains.target, clips=ends, seed=seed
                )
                rows.append(
                    {
                        "preset": name,
                        "seed": seed,
                        "entropy_variance": found.entropy_variance,
                        "error": found.error,
                        "clipped": found.clipped,
                        "temperature": found.temperature,
                        "fall": found.drop_of_entropy,
                        "distinct_4": ablation.distinct(found.tokens, 4),
                        "divergence": ablation.divergence(found.tokens, held_out),
                    }
                )
        return rows


def shuffled(kind: str, layer: Any, cache: Any, length: Any) -> jax.Array:
    """Weights that make the choice random, whatever the mass."""
    return jnp.exp(60 * jax.random.uniform(jax.random.key(0), layer.value_norm.shape) - 30)


def serve(bench: Bench, setting: Preset, prompts: list[list[int]], budgets: np.ndarray) -> dict[str, Any]:
    """Generate all, and note on the clock when each sequence ended."""
    page_size = setting.selection.page_size if setting.selection else None
    pool = cache.allocate(bench.subject.decoder.shape, len(prompts), 768, page_size=page_size)
    state = start(
        bench.subject.decoder,
        bench.subject.params,
        setting.controller,
        pool,
        prompts,
        key=jax.random.key(0),
        max_tokens=budgets.tolist(),
        selection=setting.selection,
        belief_temperature=bench.belief,
    )
    ended = np.zeros(len(prompts))
    state, trace, _ = ablation.launch(bench.subject, setting, state, 8)
    began, done = time.perf_counter(), int(trace.emitted.sum())
    while (ended == 0).any():
        state, trace, _ = ablation.launch(bench.subject, setting, state, 8)
        done += int(trace.emitted.sum())
        now = time.perf_counter() - began
        over = (np.asarray(state.status) != 0) & (ended == 0)
        ended[over] = now
    return {
        "completion": float(ended.mean()),
        "completion_p95": float(np.percentile(ended, 95)),
        "tokens_per_second": done / float(ended.max()),
    }


def main() -> None:
    """Run the studies asked for, store and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--studies", type=lambda text: text.split(","), default=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small: shows that everything runs")
    parser.add_argument("--output", type=Path, help="benchmarks/results/ablation-CPU.json")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write the tables into docs/results.md")
    options = parser.parse_args()
    unknown = [s for s in options.studies if s not in STUDIES]
    if unknown:
        parser.error(f"--studies has {unknown[0]}; accepted are {', '.join(STUDIES)}")
    console = Console()
    if options.show:
        results = json.loads(options.show.read_text())
    else:
        here = report.machine(console)
        output = (
            options.output or ROOT / "benchmarks" / "results" / f"ablation-{report.slug(here['cpu'])}.json"
        )
        results = json.loads(output.read_text()) if output.exists() else {"studies": {}}
        results.update(here)
        bench = Bench(options.model, options.quick, 1 if options.quick else options.seeds)
        results["gains"] = {k: v for k, v in bench.gains._asdict().items() if k != "prior"}
        for study in options.studies:
            console.print(f"{study} …")
            began = time.perf_counter()
            given = ()
            if study == "shape":
                measured = results["studies"].get("speed", [])
                shares = [r["kept"] for r in measured if r["preset"] == "full" and r["context"] > 4096]
                dense = 1 / bench.subject.decoder.shape.layers
                share = statistics.median(shares) if shares else 0.3
                given = ((share - dense) / (1 - dense),)
                results["imposed"] = given[0]
            results["studies"][study] = getattr(bench, study)(*given)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(results, indent=1) + "\n")
            console.print(f"{study}: {time.perf_counter() - began:.0f} s")
        console.print(f"results: {output}")
    report.show(results, console)
    if options.document:
        report.document(results)


if __name__ == "__main__":
    main()
