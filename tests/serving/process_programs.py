"""Continues prompts with an `LLM` over several processes: each runs this, and process 0 prints the tokens.

python -m tests.serving.process_programs DIRECTORY '{"preset": "off", "num_processes": 2, …}'
"""

import json
import math
import sys
from typing import Any

from entropic_jax import LLM, SamplingParams
from entropic_jax.models import weights

PROMPTS = ["def add(a, b):\n", "import os\n", "class A"]
# Pages for less than the two sequences that run at once, so that one of them is preempted.
SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=128, block_size=16, num_pages=6, max_steps=4)


def report(directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """The tokens of `PROMPTS`, what the engine did for them, and how much of the weights was read."""
    read, place = [], weights.place
    weights.place = lambda host, *rest: read.append((host.size, math.prod(rest[2]))) or place(host, *rest)
    with LLM(directory, seed=0, **SIZES, **options) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.7, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params)
        engine: Any = llm._engine
        return {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "preemptions": engine.scheduler.preemptions,
            "drafting": any(key[0] == "decode" and key[-1] for key in engine.programs._compiled),
            "devices": len(engine.device_ids()),
            "share_read": sum(size for size, _ in read) / max(1, sum(size for _, size in read)),
        }


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], json.loads(sys.argv[2]))))
