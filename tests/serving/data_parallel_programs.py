"""Runs data-parallel engines on virtual devices, in a process of its own: prints what the tests compare.

    python -m tests.serving.data_parallel_programs DIRECTORY

JAX fixes the number of devices when it starts, so the caller sets XLA_FLAGS.
"""

import json
import re
import sys
import time
from typing import Any

import httpx2
import jax

from entropic_jax import LLM, SamplingParams
from entropic_jax.analysis.collectives import collectives
from entropic_jax.mesh import make_mesh
from entropic_jax.serving.engine.data_parallel import DataParallelEngine
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.engine.start import start
from entropic_jax.serving.http import served_model
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Settings

from .live import serving

SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=128, block_size=16, kv_cache_bytes=2**18)
PROMPTS = ["def add(a, b):\n", "import os\n", "class A", "x = 1\n"] * 2
PREFIX = "from collections import OrderedDict, defaultdict, deque\n"  # three pages of tokens


def programs_of(engine: Any) -> set[tuple]:
    """The programs of an engine, those included that it has left in the cache."""
    return {*engine.programs._compiled, *engine.programs.memory._out}


def answers(directory: str, **options: Any) -> dict[str, Any]:
    """The tokens of `PROMPTS` from an `LLM`, and where they were computed."""
    with LLM(directory, preset="off", seed=0, **SIZES, **options) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params)
        engine = llm._engine
        engines = engine.engines if isinstance(engine, DataParallelEngine) else (engine,)
        texts = [p.as_text() for e in engines for p in e.programs._compiled.values()]
        leaves = [jax.tree.leaves(e.model.params)[0] for e in engines]
        return {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "compilations": [e.programs.compilations for e in engines],
            "programs": sorted({repr(key) for e in engines for key in programs_of(e)}),
            "launches": [e.programs.launches for e in engines],
            "devices": [e.device_ids() for e in engines],
            "pages": [e.sizes.pages for e in engines],
            "weight_bytes": [bytes_on_a_device(e.model.params) for e in engines],
            "pool_bytes": [bytes_on_a_device(e.scheduler.device_state.state.cache.layers) for e in engines],
            "collectives": sum(len(collectives(text)) for text in texts),
            "groups": sorted(
                {match for text in texts for match in re.findall(r"replica_groups=(\S+)", text)}
            ),
            "buffers": [[s.data.unsafe_buffer_pointer() for s in leaf.addressable_shards] for leaf in leaves],
        }


def bytes_on_a_device(tree: Any) -> int:
    """Bytes of the arrays of a pytree that one of their devices holds."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def embed(client: httpx2.Client) -> list[float]:
    """The embedding of a text."""
    answer = client.post("/v1/embeddings", json={"model": "tiny", "input": "abc"})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["embedding"]


def over_http(directory: str) -> dict[str, Any]:
    """What a server with two engines answers, before and after one of them fails."""
    progress: list[tuple[int, int]] = []
    options = EngineOptions(**SIZES, data_parallel_size=2, preset="off")
    engine = start(directory, options, progress=lambda done, total: progress.append((done, total)))
    assert isinstance(engine, DataParallelEngine)
    model = served_model.describe(engine.model, directory, ("tiny",), engine.context)
    frontend = Frontend(engine, model, Settings(port=0, on_engine_failure="stay"))
    report: dict[str, Any] = {}
    with serving(frontend) as live, httpx2.Client(base_url=live.url, timeout=300) as client:

        def complete(prompt: str, seed: int = 1) -> str:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "seed": seed, "temperature": 0.7}
            answer = client.post("/v1/completions", json={**body, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        while not engine.ready():
            time.sleep(0.1)
        report["progress"] = progress
        report["late"] = engine.compilations
        report["compiled"] = [e.programs.compilations for e in engine.engines]
        report["programs"] = [len(programs_of(e)) for e in engine.engines]
        report["texts"] = [complete(PREFIX + str(number % 2)) for number in range(6)]
        report["others"] = [complete(prompt) for prompt in PROMPTS]
        report["again"] = [complete(prompt) for prompt in PROMPTS]
        report["embeddings"] = [embed(client) for _ in range(4)]
        report["embedding_programs"] = [len(e._embedder.programs) for e in engine.engines]
        ranked = {"query": "a", "documents": ["b", "c"], "scoring": "embedding"}
        report["reranked"] = [client.post("/rerank", json=ranked).json()["results"] for _ in range(2)]
        report["metrics"] = client.get("/metrics").text
        report["state"] = client.get("/entropic/state").json()
        report["info"] = client.get("/server_info").json()["engine"]
        report["reset"] = client.post("/reset_prefix_cache").json()
        broken: Any = RuntimeError("broken by the test")
        engine.engines[1]._inbox.put(broken)
        while engine.failure() is None:
            time.sleep(0.01)
        report["after"] = [complete(PREFIX + str(number % 2)) for number in range(4)]
        report["embedding_after"] = embed(client)
        report["health"] = client.get("/health").status_code
        report["reset_after"] = client.post("/reset_prefix_cache").status_code
    report["closed"] = engine.close(timeout=30)
    return report


if __name__ == "__main__":
    folder = sys.argv[1]
    result = {
        "one": answers(folder),
        "two": answers(folder, data_parallel_size=2),
        "two by two": answers(folder, data_parallel_size=2, tensor_parallel_size=2),
        "other devices": answers(folder, mesh=make_mesh(2, jax.devices()[2:])),
        "mesh": answers(folder, mesh=make_mesh(1, jax.devices()[2:], data_parallel_size=2)),
        "http": over_http(folder),
    }
    print(json.dumps(result))
