"""Soak test of the server: thousands of mixed requests; none may hang, leak or be answered wrongly.

    python -m benchmarks.soak [--requests 10000] [--concurrency 48] [--document]

Starts a server with a small KV cache, so that sequences are preempted, with two LoRA adapters, and with
`--batch-invariant`, so that the right answer to each request is the one the server gave when it had no
other request. The server's time limit may end long requests and requests of low priority. At the end every
page must be free again, memory must be within 5 % of what it was after warm-up, and after kill -9 the
server must restart. Exits with 1 if any of this does not hold. The results so far are kept in
`soak-CPU.partial.json`; the test stops after a hundred failed requests.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from entropic_jax.serving.options.model import EMBEDDED

from ..harness.provenance import describe_run, processor_name
from ..harness.publishing import add_document_option, publish, results_file, write_json
from ..harness.server_process import ServerProcess, ours
from . import report
from .adapters import write_adapter
from .measure import crash, learn, prompts, soak
from .workload import ADAPTERS

SERVER = (
    *("--max-num-seqs", "16", "--max-model-len", "1024", "--kv-cache-bytes", str(18 * 2**20)),
    *("--request-timeout", "60", "--batch-invariant", "--warmup", "full"),
    *("--enable-lora", "--max-lora-rank", "8", "--lora-modules"),
)


def main() -> int:
    """Soak a server, print and store the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=24, help="of an ordinary answer")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/soak-CPU.json")
    add_document_option(parser, "soak")
    options = parser.parse_args()
    console = Console(highlight=False)
    out = options.out or results_file("soak", processor_name())
    partial = out.with_suffix(".partial.json")

    def report_progress(run: dict[str, Any]) -> None:
        write_json(partial, results | {"run": run})
        done, megabytes = run["memory"][-1]
        console.print(
            f"{done} of {options.requests} requests in {run['seconds']:.0f} s: {megabytes:.0f} MB, "
            f"{len(run['failures'])} failed, {sum(run['timed_out'].values())} timed out"
        )

    results = describe_run(console) | {"server": " ".join([*SERVER, *ADAPTERS])}
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            f"{name}={write_adapter(Path(folder) / name, options.model, seed)}"
            for seed, name in enumerate(ADAPTERS)
        ]
        server = ServerProcess(ours(options.model, *SERVER, *adapters), Path(folder) / "server.log")
        try:
            results["ready"] = server.start()
            known = asyncio.run(learn(server, prompts(options.prompts), options.tokens))
            results["run"] = asyncio.run(
                soak(
                    server,
                    known,
                    options.requests,
                    options.concurrency,
                    options.tokens,
                    options.seed,
                    report_progress,
                )
            )
            results["growth"] = report.memory_growth(results["run"]["memory"], options.requests)
            results["crash"] = asyncio.run(crash(server, known, options.tokens))
            results["status"] = server.stop()
        finally:
            server.kill()
    for name, detail in results["run"]["failures"][:20]:
        console.print(f"{name}: {detail}", markup=False)
    write_json(out, results)
    partial.unlink(missing_ok=True)
    publish("soak", report, results, options.document, console)
    return int(not all(held for _, held, _ in report.verdicts(results)))


if __name__ == "__main__":
    sys.exit(main())
