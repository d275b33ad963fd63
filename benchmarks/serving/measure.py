"""Measurements of the serving benchmark: throughput, latency of the first token, and latency under load."""

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.measures import first_token, summary
from entropic_jax.serving.bench.prompts import Prompts

from ..harness.baselines.float32_model import write_float32
from ..harness.baselines.pool import EngineError, EnginePool
from ..harness.held_out_text import module_tokens
from ..harness.server_process import ServerProcess, ours, running
from . import admission
from .workload import TextPrompts, drive

STUDIES = ("throughput", "latency", "load")
CONCURRENCY = 64
BATCHED = ("ours-batched", "transformers-batched", "openvino-batched")  # engines without a server


class ServingBenchmark:
    """The model, the prompts, and the engines that are compared."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.quick = options, options.quick
        self.work = write_float32(options.model, work)
        self.model = self.work / "huggingface"
        self.tokens = module_tokens(options.model / "tokenizer.json")
        interpreters = {"llamacpp": options.llamacpp_python, "openvino": options.openvino_python}
        self.engines = EnginePool(self.work, options.threads, options.limit, interpreters)
        self.failures: dict[str, str] = {}

    def server(self, *arguments: str) -> contextlib.AbstractContextManager[ServerProcess]:
        """Our server, ready."""
        command = ours(self.model, "--dtype", "float32", "--warmup", "full", *arguments)
        return running(command, self.work / f"server{'-'.join(arguments)}.log")

    def llama(self) -> contextlib.AbstractContextManager[ServerProcess]:
        """llama_cpp.server, ready, with plain attention in float32 as in `engines.LlamaCpp`."""
        self.engines.prepare("llamacpp")
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

    def static_batch_seconds(self, engine: str, prompts: np.ndarray, steps: int) -> float:
        """Seconds that an engine takes for all prompts, in static batches, prefill included."""
        seconds = 0.0
        for first in range(0, len(prompts), CONCURRENCY):
            batch = prompts[first : first + CONCURRENCY]
            file = self.work / "prompts.npy"
            np.save(file, batch)
            self.engines.call(engine, "open", len(batch), batch.shape[1] + steps)
            seconds += self.engines.call(engine, "prefill", str(file))["seconds"]
            seconds += self.engines.call(engine, "decode", steps - 1)["seconds"]
        return seconds

    def throughput(self) -> list[dict[str, Any]]:
        """Output tokens per second of 64 requests at a time, by engine, taking turns."""
        length, steps, count = (32, 8, 64) if self.quick else (128, 128, 256)
        requests = [Arrival(0.0, length, steps)] * count
        fewer = max(16, count // 4)  # of an engine that is slow
        rows: list[dict[str, Any]] = []

        def note(engine: str, repetition: int, tokens: int, seconds: float) -> None:
            rows.append({"engine": engine, "repetition": repetition, "rate": tokens / seconds})

        with contextlib.ExitStack() as stack:
            size = ("--max-num-seqs", str(CONCURRENCY), "--max-model-len", "1024")
            servers = {
                name: stack.enter_context(self.server(*size, *preset))
                for name, preset in (("ours, served", ()), ("ours, off", ("--preset", "off")))
            }
            try:
                llama: ServerProcess | None = stack.enter_context(self.llama())
            except (EngineError, RuntimeError, OSError) as error:
                llama, self.failures["llama_cpp.server"] = None, str(error)[-300:]
            for repetition in range(self.options.repeat):
                prompts = Prompts(self.tokens, repetition)
                array = self.array(prompts, requests)
                for name, server in servers.items():
                    totals = summary(drive(server.url, requests, prompts, CONCURRENCY))
                    note(name, repetition, totals["output_tokens"], totals["seconds"])
                for engine in ("ours", "transformers"):
                    with self.report_failure(engine):
                        if not repetition:
                            self.static_batch_seconds(engine, array[:CONCURRENCY], steps)  # compiles
                        note(
                            engine, repetition, count * steps, self.static_batch_seconds(engine, array, steps)
                        )
                for engine in BATCHED:
                    batch = array[:fewer] if engine == "transformers-batched" else array
                    np.save(file := self.work / "prompts.npy", batch)
                    with self.report_failure(engine):
                        self.engines.call(engine, "open", CONCURRENCY, length + steps)
                        if not repetition:
                            self.engines.call(engine, "requests", str(file), 2)
                        took = self.engines.call(engine, "requests", str(file), steps)["seconds"]
                        note(engine, repetition, len(batch) * steps, took)
                if llama is not None:
                    text = TextPrompts(prompts, self.model)
                    # It takes no `ignore_eos`; this makes the end of the text impossible.
                    body = {"logit_bias": {"1": -100.0}, "stream_options": None}
                    with self.report_failure("llama_cpp.server"):
                        totals = summary(drive(llama.url, requests[:fewer], text, CONCURRENCY, **body))
                        note("llama_cpp.server", repetition, totals["output_tokens"], totals["seconds"])
        return rows

    @contextlib.contextmanager
    def report_failure(self, engine: str) -> Iterator[None]:
        """Record the failure of an engine and continue the run."""
        try:
            yield
        except (EngineError, RuntimeError) as error:
            self.failures[engine] = str(error)[-300:]

    def latency(self) -> list[dict[str, Any]]:
        """Milliseconds to the first token of a lone request: served, and of the bare loop."""
        rows = []
        with self.server("--max-num-seqs", str(CONCURRENCY), "--max-model-len", "2048") as server:
            for length in (64,) if self.quick else (128, 512, 1024):
                requests = [Arrival(0.0, length, 2)] * (4 if self.quick else 24)
                for repetition in range(self.options.repeat):
                    prompts = Prompts(self.tokens, 100 + repetition)
                    served = [first_token(o) for o in drive(server.url, requests, prompts, 1)]
                    bare = []
                    for row in self.array(prompts, requests):
                        file = self.work / "prompts.npy"
                        np.save(file, row[None])
                        self.engines.call("ours", "open", 1, length + 64)
                        bare.append(1000 * self.engines.call("ours", "prefill", str(file))["seconds"])
                    medians = {
                        "served": statistics.median(s for s in served if s),
                        "bare": statistics.median(bare),
                    }
                    rows.append({"length": length, "repetition": repetition, **medians})
        return rows

    def load(self) -> list[dict[str, Any]]:
        """Latencies with more sequences than rows, by order of admission, taking turns."""
        return admission.measure(self)
