"""Options for several devices: what is refused, and the same answers from an engine on a mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from entropic_jax import LLM
from entropic_jax.serving.cli import main
from tests.compilation import virtual_devices
from tests.shallow_model import shallow_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 64},
            "tensor_parallel_size must be (between 1 and .+|1), .*devices; got 64",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer between 1 and .*; got 0"),
        (
            {"tensor_parallel_size": True},
            "tensor_parallel_size must be an integer between .*; got True",
        ),
        (
            {"decode_context_parallel_size": 0},
            "decode_context_parallel_size must be an integer between 1 and .*; got 0",
        ),
        (
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size must divide 1, the devices that have the same KV head, .* got 2",
        ),
        ({"data_parallel_size": 64}, "data_parallel_size must be (between 1 and .+|1), .*devices; got 64"),
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer between 1 and .*; got 0"),
        (
            {"expert_parallel_size": 64},
            "expert_parallel_size must be (between 1 and .+|1), .*devices; got 64",
        ),
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
        ("generate", "--data-parallel-size"),
        ("serve", "--tensor-parallel-size"),
        ("serve", "--data-parallel-size"),
    ],
)
def test_a_lack_of_devices_is_one_line(command, option, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main([command, option, "64", "--preset", "off", *(("--port", "0") if command == "serve" else ())])
    error = capsys.readouterr().err
    assert exit_status.value.code == 2
    assert error.count("\n") == 1 and f"{option} must be 1, the number of devices" in error, error


FEWER_KV_HEADS = """
import dataclasses, json, sys
from entropic_jax import LLM, SamplingParams, models
from entropic_jax.mesh import make_mesh

directory, folder, preset = sys.argv[1:]
model = models.load(directory)
heads = dict(num_attention_heads=8, head_dim=16, num_key_value_heads=2)
config = dataclasses.replace(model.config, vocab_size=264, **heads)
models.save(dataclasses.replace(models.initialise(config, 1), tokenizer=model.tokenizer), folder)
report = {}
# Pages for less than both sequences: one is preempted, and has its pages on other devices afterwards.
options = dict(max_num_seqs=2, max_model_len=64, block_size=16, num_pages=5, seed=0)
drafts = {"num_speculative_tokens": 3} if preset == "meso" else {}
for size, how in ((1, {"preset": "off"}), (4, {"preset": preset, **drafts})):
    with LLM(folder, tensor_parallel_size=size, **how, **options) as llm:
        prompts = ["def add(a, b):\\n", "import os\\n"]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=32, temperature=0.7, ignore_eos=True))
        keys = llm._engine.scheduler.device_state.state.cache.layers[0].keys
        report[size] = {
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "pool": keys.addressable_shards[0].data.shape[:2],
        }
models.save(models.load(folder, mesh=make_mesh(8)), folder + "/again")
for shards in (1, 3):
    try:
        models.save(models.load(folder, mesh=make_mesh(4), page_shards=shards), folder + "/again")
    except ValueError as error:
        report[f"saved/{shards}"] = str(error)
print(json.dumps(report))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", ["off", "meso"])
def test_two_kv_heads_on_four_devices_give_the_same_tokens(directory, tmp_path, preset):
    done = subprocess.run(
        [sys.executable, "-c", FEWER_KV_HEADS, directory, str(tmp_path), preset],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "XLA_FLAGS": virtual_devices(8)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    alone = report["1"]["tokens"]
    assert len(set(alone[0])) > 4
    # Of five pages, and a scratch page on each device.
    assert report["4"] == {"tokens": alone, "pool": [4, 1]}
    assert report["saved/1"] == "model must have one copy of each KV head to be saved; it has 2 on its mesh"
    assert report["saved/3"].endswith(
        "decode_context_parallel_size must divide 2, the devices that have the same KV head, of 4 devices "
        "and 2 KV heads; got 3"
    )


SCRIPT = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
from entropic_jax import LLM, SamplingParams

directory, preset, pages = sys.argv[1:]
answers, embeddings = [], []
texts = [[5, 6, 7], list(range(2, 73))]
for size in (1, 2):
    # Pages for less than the two sequences that run at once, so that one of them is preempted.
    options = dict(max_num_seqs=2, max_model_len=128, block_size=16, num_pages=7)
    options |= dict(preset=preset, kv_cache_dtype=pages, seed=0)
    with LLM(directory, tensor_parallel_size=size, **options) as llm:
        prompts = ["def add(a, b):\\n", "import os\\n", "class A"]
        with ThreadPoolExecutor() as threads:  # texts are embedded while tokens are generated
            embedded = threads.submit(llm._engine.embed, texts, "mean", threading.Event())
            outputs = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0.7, ignore_eos=True))
            embeddings.append(embedded.result().vectors.tolist())
    answers.append([output.outputs[0].token_ids for output in outputs])
print(json.dumps([answers, embeddings]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "pages"), [("full-lossy", "auto"), ("full", "int8_per_token_head")])
def test_an_engine_on_two_devices_gives_the_answers_of_one(preset, pages):
    environment = {**os.environ, "XLA_FLAGS": virtual_devices(2)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(shallow_model()), preset, pages],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (alone, together), embeddings = json.loads(done.stdout)
    assert [len(tokens) for tokens in alone] == [40, 40, 40]
    assert together == alone
    assert np.std(embeddings[0]) > 0.01
    np.testing.assert_allclose(embeddings[1], embeddings[0], rtol=1e-4, atol=1e-5)


GENERATE = """
import contextlib, io, json, sys
from entropic_jax.mesh.devices import chosen_device
from entropic_jax.serving.cli import main
from entropic_jax.serving.offline.engine import Engine

directory, file = sys.argv[1:]
devices, launch = set(), Engine._launch

def recorded(*arguments):
    devices.add(str(chosen_device()))
    return launch(*arguments)

Engine._launch = recorded

def output_of(*arguments):
    devices.clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["generate", "--model", directory, "--seed", "3", "--max-tokens", "12", *arguments])
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "devices": sorted(devices)}

report = {}
for size in ("1", "2"):
    shared = ["--preset", "dslider", "--data-parallel-size", size, "--temperature", "0.7", "--ignore-eos"]
    report[size] = {
        "batch": output_of("--batch-file", file, *shared),
        "prompt": output_of("--prompt", "def f(x):", "--json", *shared),
    }
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def generated(directory, tmp_path_factory):
    """What `entropic generate` prints with one engine, and with two on virtual devices."""
    file = tmp_path_factory.mktemp("batch") / "batch.jsonl"
    lines = [{"prompt": text} for text in ("def add(a, b):", "import os", "class A", "x = 1", "for i in")]
    file.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "x" * 200}])))
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, directory, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "XLA_FLAGS": virtual_devices(2)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_batch_on_two_engines_has_the_completions_of_one(generated):
    alone, together = generated["1"]["batch"], generated["2"]["batch"]
    assert len(together["devices"]) == 2, "one engine did everything: the test compares nothing"
    lines = [[json.loads(line) for line in part["out"].splitlines()] for part in (alone, together)]
    for name in ("index", "text", "token_ids", "finish_reason", "seed"):
        assert [line[name] for line in lines[1]] == [line[name] for line in lines[0]]
    assert [len(line["token_ids"]) for line in lines[1]] == [12] * 5 + [0]
    assert together["status"] == alone["status"] == 1, "the last prompt is too long"


@pytest.mark.slow
def test_one_prompt_is_generated_by_one_engine_which_is_said(generated):
    alone, together = generated["1"]["prompt"], generated["2"]["prompt"]
    assert json.loads(together["out"])["token_ids"] == json.loads(alone["out"])["token_ids"]
    assert together["status"] == 0 and len(together["devices"]) == 1 and alone["err"] == ""
    assert together["err"] == (
        "entropic generate: one of the 2 engines generates for one prompt; all of them for --batch-file\n"
    )


def test_a_command_without_data_parallelism_says_which_have_it(capsys):
    with pytest.raises(SystemExit):
        main(["chat", "--data-parallel-size", "2"])
    error = capsys.readouterr().err
    assert "--data-parallel-size (only `entropic generate`, `serve` and `plan` take it)" in error
