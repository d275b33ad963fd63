"""Options for several devices: what is refused, and the same answers from an engine on a mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from entropic_jax import LLM
from entropic_jax.serving.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 64}, "tensor_parallel_size must be between 1 and .*devices; got 64"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1; got 0"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size must be an integer of at least 1; got True"),
        ({"data_parallel_size": 64}, "data_parallel_size must be between 1 and .*devices; got 64"),
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer of at least 1; got 0"),
        ({"expert_parallel_size": 64}, "expert_parallel_size must be between 1 and .*devices; got 64"),
        ({"expert_parallel_size": 2, "preset": "dslider"}, "preset must not be a sampler on a mesh"),
        (
            {"mesh": jax.sharding.AbstractMesh((2,), ("x",)), "data_parallel_size": 2},
            "data_parallel_size must be 1 with a mesh, which has it; got 2",
        ),
        (
            {"tensor_parallel_size": 2, "preset": "dslider"},
            "preset must not be a sampler on a mesh; got dslider",
        ),
        ({"tensor_parallel_size": 2, "method": "snapkv"}, "method must be dense on a mesh; got 'snapkv'"),
        (
            {"mesh": jax.sharding.AbstractMesh((2,), ("x",))},
            "mesh must have the axes data, tensor, expert; got x",
        ),
        (
            {"mesh": jax.sharding.AbstractMesh((2,), ("x",)), "tensor_parallel_size": 2},
            "tensor_parallel_size must be 1 with a mesh, which has it; got 2",
        ),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(**options)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate", "--tensor-parallel-size"),
        ("generate", "--expert-parallel-size"),
        ("serve", "--tensor-parallel-size"),
        ("serve", "--data-parallel-size"),
    ],
)
def test_a_lack_of_devices_is_one_line(command, option, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main([command, option, "64", "--preset", "off", *(("--port", "0") if command == "serve" else ())])
    error = capsys.readouterr().err
    assert exit_status.value.code == 2
    assert error.count("\n") == 1 and f"{option} must be between 1 and" in error, error


SCRIPT = """
import json, sys
from entropic_jax import LLM, SamplingParams

answers = []
for size in (1, 2):
    # Pages for less than the two sequences that run at once, so that one of them is preempted.
    options = dict(max_num_seqs=2, max_model_len=128, block_size=16, num_pages=7)
    with LLM(preset="full-lossy", seed=0, tensor_parallel_size=size, **options) as llm:
        prompts = ["def add(a, b):\\n", "import os\\n", "class A"]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0.7, ignore_eos=True))
    answers.append([output.outputs[0].token_ids for output in outputs])
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_an_engine_on_two_devices_gives_the_answers_of_one():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    alone, together = json.loads(done.stdout)
    assert [len(tokens) for tokens in alone] == [40, 40, 40]
    assert together == alone
