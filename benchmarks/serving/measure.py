"""The server under load: against other servers, against its own bare loop, and its schedule against FCFS.

    python -m benchmarks.serving [--studies throughput,latency,load] [--quick] [--document]
    LLAMACPP_PYTHON=~/peers/bin/python python -m benchmarks.serving      # with llama_cpp.server

`throughput`: 64 requests at a time, every engine on the same prompts and weights, taking turns. `latency`:
the first token of a lone request against the bare prefill. `load`: arrivals of a trace at more sequences than
rows, our schedule against first come, first served, everything else equal. Prompts are cut from text that the
model was not trained on.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from entropic_jax.serving.bench import arrivals as laws
from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.client import Outcome, Target
from entropic_jax.serving.bench.connection import Pool
from entropic_jax.serving.bench.load import closed_loop, open_loop, warm_up
from entropic_jax.serving.bench.measures import first_token, summary
from entropic_jax.serving.bench.prompts import Prompts
from entropic_jax.serving.generation import EMBEDDED

from . import report, serving_report
from .server_process import ServerProcess, ours, running
from .worker import ROOT, PeerError, Peers

STUDIES = ("throughput", "latency", "load")
AT_ONCE = 64


def write_model(model: Path, work: Path) -> Path:
    """The model as a Hugging Face directory in float32, for engines that read no bfloat16."""
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
    from safetensors.numpy import load_file, save_file

    directory = work / "huggingface"
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        weights = {k: v.astype(np.float32) for k, v in load_file(model / "model.safetensors").items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(model / name, directory / name)
    return work


def held_out_tokens(model: Path) -> list[int]:
    """The source of `rich`, which the model was not trained on, as token ids."""
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec("rich")
    assert spec is not None and spec.submodule_search_locations
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = [tokenizer.encode(f.read_text("utf-8"), add_special_tokens=False).ids for f in files]
    return [token for ids in encoded for token in ids]


class Text(Prompts):
    """The same prompts as text, for servers that take no token ids."""

    def __init__(self, prompts: Prompts, model: Path) -> None:
        from tokenizers import Tokenizer

        self.prompts, self.tokenizer = prompts, Tokenizer.from_file(str(model / "tokenizer.json"))

    def __call__(self, index: int, arrival: Arrival) -> str:
        """The text of a prompt."""
        return self.tokenizer.decode(self.prompts(index, arrival), skip_special_tokens=False)


def drive(
    url: str, requests: list[Arrival], prompts: Prompts, concurrency: int | None = None, **body: Any
) -> list[Outcome]:
    """Send the requests, so many at a time or at their own times. RuntimeError where one fails."""

    async def main() -> list[Outcome]:
        pool = Pool(url)
        target = Target(pool, "", 1800.0, {"temperature": 0.0, "model": None, **body})
        try:
            await warm_up(target, requests, prompts, 2)
            if concurrency is None:
                return await open_loop(target, requests, prompts)
            return await closed_loop(target, requests, prompts, concurrency)
        finally:
            pool.close()

    outcomes = asyncio.run(main())
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].error}: {failed[0].detail}")
    return outcomes


def sustained(outcomes: list[Outcome], concurrency: int) -> float:
    """Requests per second of a closed loop as long as it was full: until the last one was sent."""
    sent = [outcome.sent for outcome in outcomes]
    return (len(outcomes) - concurrency) / (max(sent) - min(sent))


def told(url: str) -> dict[str, Any]:
    """What a server of ours says of its engine."""
    with urllib.request.urlopen(f"{url}/entropic/state", timeout=10) as response:
        return json.load(response)


class Bench:
    """The model, the prompts, and the engines that are compared."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.quick = options, options.quick
        self.work = write_model(options.model, work)
        self.model = self.work / "huggingface"
        self.tokens = held_out_tokens(options.model)
        interpreters = {"llamacpp": options.llamacpp_python}
        self.peers = Peers(self.work, options.threads, options.limit, interpreters)
        self.failures: dict[str, str] = {}

    def server(self, *arguments: str):
        """Our server, ready."""
        command = ours(self.model, "--dtype", "float32", "--warmup", "full", *arguments)
        return running(command, self.work / "server.log")

    def llama(self):
        """llama_cpp.server, ready, with plain attention in float32 as in `peers.LlamaCpp`."""
        self.peers.prepare("llamacpp")
        threads = str(self.options.threads)
        command = [
            *(
                self.options.llamacpp_python,
                "-m",
                "llama_cpp.server",
                "--n_ctx",
                "2048",
                "--verbose",
                "false",
            ),
            *("--model", str(self.work / "llamacpp-f32.gguf"), "--interrupt_requests", "false"),
            *("--n_threads", threads, "--n_threads_batch", threads, "--host", "127.0.0.1"),
        ]
        return running(command, self.work / "llama-server.log", "/v1/models")

    def array(self, prompts: Prompts, requests: list[Arrival]) -> np.ndarray:
        """The prompts as one array `[requests, length]`."""
        return np.array([prompts(i, arrival) for i, arrival in enumerate(requests)], np.int32)

    def in_batches(self, engine: str, prompts: np.ndarray, steps: int) -> float:
        """Seconds that an engine takes for all prompts, in static batches; reading them is part of it."""
        seconds = 0.0
        for first in range(0, len(prompts), AT_ONCE):
            some = prompts[first : first + AT_ONCE]
            file = self.work / "prompts.npy"
            np.save(file, some)
            self.peers.ask(engine, "open", len(some), some.shape[1] + steps)
            seconds += self.peers.ask(engine, "prefill", str(file))["seconds"]
            seconds += self.peers.ask(engine, "decode", steps - 1)["seconds"]
        return seconds

    def throughput(self) -> list[dict[str, Any]]:
        """Output tokens per second of 64 requests at a time, by engine, taking turns."""
        length, steps, count = (32, 8, 64) if self.quick else (128, 128, 256)
        requests = [Arrival(0.0, length, steps)] * count
        rows: list[dict[str, Any]] = []

        def note(engine: str, repetition: int, tokens: int, seconds: float) -> None:
            rows.append({"engine": engine, "repetition": repetition, "rate": tokens / seconds})

        with contextlib.ExitStack() as stack:
            size = ("--max-num-seqs", str(AT_ONCE), "--max-model-len", "1024")
            server = stack.enter_context(self.server(*size))
            try:
                llama: ServerProcess | None = stack.enter_context(self.llama())
            except (PeerError, RuntimeError, OSError) as error:
                llama, self.failures["llama_cpp.server"] = None, str(error)[-300:]
            for repetition in range(self.options.repeat):
                prompts = Prompts(self.tokens, repetition)
                array = self.array(prompts, requests)
                found = summary(drive(server.url, requests, prompts, AT_ONCE))
                note("ours, served", repetition, found["output_tokens"], found["seconds"])
                for engine in ("ours", "transformers"):
                    with self.reporting(engine):
                        if not repetition:
                            self.in_batches(engine, array[:AT_ONCE], steps)  # compiles
                        note(engine, repetition, count * steps, self.in_batches(engine, array, steps))
                with self.reporting("transformers-batched"):
                    file = self.work / "prompts.npy"
                    np.save(file, array)
                    self.peers.ask("transformers-batched", "open", count, 0)
                    if not repetition:
                        self.peers.ask("transformers-batched", "requests", str(file), 2)
                    took = self.peers.ask("transformers-batched", "requests", str(file), steps)["seconds"]
                    note("transformers-batched", repetition, count * steps, took)
                if llama is not None:  # one request at a time, whatever is asked: fewer say as much
                    few = requests[: max(16, count // 4)]
                    text = Text(prompts, self.model)
                    # It takes no `ignore_eos`; this makes the end of the text impossible.
                    body = {"logit_bias": {"1": -100.0}, "stream_options": None}
                    with self.reporting("llama_cpp.server"):
                        found = summary(drive(llama.url, few, text, AT_ONCE, **body))
                        note("llama_cpp.server", repetition, found["output_tokens"], found["seconds"])
        return rows

    @contextlib.contextmanager
    def reporting(self, engine: str):
        """An engine that fails is reported, and the run goes on."""
        try:
            yield
        except (PeerError, RuntimeError) as error:
            self.failures[engine] = str(error)[-300:]

    def latency(self) -> list[dict[str, Any]]:
        """Milliseconds to the first token of a lone request: served, and of the bare loop."""
        rows = []
        with self.server("--max-num-seqs", str(AT_ONCE), "--max-model-len", "2048") as server:
            for length in (64,) if self.quick else (128, 512, 1024):
                requests = [Arrival(0.0, length, 2)] * (4 if self.quick else 24)
                for repetition in range(self.options.repeat):
                    prompts = Prompts(self.tokens, 100 + repetition)
                    served = [first_token(o) for o in drive(server.url, requests, prompts, 1)]
                    bare = []
                    for row in self.array(prompts, requests):
                        file = self.work / "prompts.npy"
                        np.save(file, row[None])
                        self.peers.ask("ours", "open", 1, length + 64)
                        bare.append(1000 * self.peers.ask("ours", "prefill", str(file))["seconds"])
                    found = {
                        "served": statistics.median(s for s in served if s),
                        "bare": statistics.median(bare),
                    }
                    rows.append({"length": length, "repetition": repetition, **found})
        return rows

    def load(self) -> list[dict[str, Any]]:
        """Latencies under trace arrivals with more sequences than rows, by schedule, taking turns."""
        rows: list[dict[str, Any]] = []
        count, width = (24, 4) if self.quick else (300, 8)
        common = ("--max-num-seqs", str(width), "--max-model-len", "2048", "--preset", "full")
        with (
            self.server(*common, "--scheduling-policy", "entropic") as entropic,
            self.server(*common, "--scheduling-policy", "fcfs") as fcfs,
        ):
            for trace in ("azure-conversation", "azure-code"):
                drawn = laws.drawn_like(trace, count, 1.0, None, 0)
                factor = self.options.scale or laws.fitting_factor(drawn, 512)
                sized = laws.scaled(drawn, factor, 2000)
                prompts = Prompts(self.tokens, 7)
                for server in (entropic, fcfs):  # both are warm then; the rate is that of the second
                    found = drive(server.url, sized, prompts, 4 * width)
                capacity = summary(found)
                rate = self.options.utilisation * sustained(found, 4 * width)
                timed = [a._replace(time=a.time / rate) for a in sized]
                slo = {"e2e": 4 * capacity["e2e"]["mean"]}
                for repetition in range(self.options.repeat):
                    again = Prompts(self.tokens, 20 + repetition)
                    for policy, server in (("entropic", entropic), ("fcfs", fcfs)):
                        body = {"temperature": 0.8, "entropic": {"preset": "full"}, "seed": repetition}
                        found = summary(drive(server.url, timed, again, **body), slo)
                        rows.append(
                            {
                                "trace": trace,
                                "policy": policy,
                                "repetition": repetition,
                                "rate": rate,
                                "slo": slo["e2e"],
                                "mean": found["e2e"]["mean"],
                                "p95": found["e2e"]["p95"],
                                "first": found["ttft"]["mean"],
                                "longest_wait": found["ttft"]["max"],
                                "rounds": (now := told(server.url))["longest_wait"],
                                "allowed": now["longest_wait_allowed"],
                                "goodput": found["goodput"],
                                "within": found["within_slo"],
                            }
                        )
        return rows


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--studies", type=lambda text: text.split(","), default=list(STUDIES))
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of one call of an engine")
    parser.add_argument(
        "--utilisation", type=float, default=1.25, help="load, as a share of what FCFS can do"
    )
    parser.add_argument(
        "--scale", type=float, help="of the trace's lengths (default: 99 %% within 512 tokens)"
    )
    given = os.environ.get("LLAMACPP_PYTHON", sys.executable)
    parser.add_argument("--llamacpp-python", default=given, help="its interpreter ($LLAMACPP_PYTHON)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "entropic-serving")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs, not how fast")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print stored results, measure nothing")
    parser.add_argument("--document", action="store_true", help="write the tables into docs/results.md")
    options = parser.parse_args()
    unknown = [name for name in options.studies if name not in STUDIES]
    if unknown:
        parser.error(f"--studies has {unknown[0]}; accepted are {', '.join(STUDIES)}")
    console = Console()
    if options.show is not None:
        results = json.loads(options.show.read_text("utf-8"))
    else:
        folder = options.work if options.quick else ROOT / "benchmarks" / "results"
        file = folder / f"serving-{report.slug(report.processor())}.json"
        # Studies that are not asked for stay as they were measured.
        results = json.loads(file.read_text("utf-8")) if file.exists() else {"studies": {}}
        results |= report.machine(console) | {"threads": options.threads, "utilisation": options.utilisation}
        bench = Bench(options, options.work)
        try:
            results["studies"] |= {name: getattr(bench, name)() for name in options.studies}
        finally:
            bench.peers.close()
        if "throughput" in options.studies or "versions" not in results:
            results |= {"versions": bench.peers.versions, "failures": bench.failures}
        file.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        console.print(f"stored in {file}")
    serving_report.show(results, console)
    if options.document and not options.quick:
        serving_report.document(results)


if __name__ == "__main__":
    main()
