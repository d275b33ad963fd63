"""The benchmark of slices: what is published, and the programs that it compiles."""

import dataclasses
import json
import re

import pytest

from benchmarks.harness.paths import RESULTS
from benchmarks.publish.sections import FILES
from benchmarks.slices.measure import stated
from benchmarks.slices.workload import CHUNK, DRAFTED, MODELS, PAGE, PROMPTS, ROWS, SLICES, program_of
from entropic_jax.analysis import ahead_of_time
from entropic_jax.analysis.chips import topology
from entropic_jax.analysis.collectives import collectives
from entropic_jax.methods.presets import preset
from entropic_jax.models.sharding import check_page_shards
from tests.marks import exhaustive

CASES = json.loads((RESULTS / str(FILES["slices"])).read_text())["cases"]
BY_NAME = {(case["model"], case["slice"]): case for case in CASES}
ABORTED = (("Qwen3 32B", "v5e:4x4", "decode off"),)  # libtpu 0.0.42.1 ends with SIGSEGV, each time
SMALLEST = 2**20  # bytes of the smallest matrix of a layer, of keys, on one of eight chips


@pytest.mark.parametrize(
    ("model", "name", "quantization"),
    [
        ("Llama 3.1 8B", "v5e:2x4", None),
        ("Llama 3.1 70B", "v6e:4x4", None),
        ("Qwen3 235B-A22B", "v5p:2x2x2", None),
        ("Qwen3 235B-A22B", "v6e:4x4", "int8"),
    ],
)
def test_what_must_fit_fits(model, name, quantization):
    case = BY_NAME[model, name]
    assert case["fits"] and case["sequences"] >= ROWS and case["dtypes"][2] == quantization


def test_every_case_fits_or_says_what_does():
    assert len(CASES) == len(MODELS) * len(SLICES) and all(
        case["fits"] or case["first_slice"] for case in CASES
    )


def test_compiled_programs_hold_what_the_plan_says_and_gather_no_weights():
    compiled = [
        (name, case, program) for case in CASES if case["fits"] for name, program in case["programs"].items()
    ]
    required = {"decode off", "verify off", "prefill off"}
    assert all(required <= case["programs"].keys() for case in CASES if case["fits"])
    assert sum(name == "decode full" for name, *_ in compiled) >= 1
    for name, case, program in compiled:
        if "error" in program:
            assert (case["model"], case["slice"], name) in ABORTED, program["error"]
            continue
        planned = case["weight_bytes"] + case["kv_bytes"]
        # A prefill has no output projection.
        assert 0.98 * planned < program["argument_bytes"] < 1.05 * planned, (stated(case), name)
        if name.startswith("prefill"):  # of queries, keys and values, where chips divide a KV head
            config, devices = MODELS[case["model"]], topology(case["slice"]).devices
            shards = check_page_shards(config, devices, None)
            columns = (config.num_attention_heads // devices * shards + 2) * config.head_dim
            assert program["largest_gather"] == (PROMPTS * CHUNK * columns * 2 if shards > 1 else 0)
        else:
            assert program["largest_gather"] < SMALLEST, (stated(case), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "tokens"),
    [*exhaustive(("verify", ROWS * (DRAFTED + 1))), ("prefill", PROMPTS * CHUNK)],
)
def test_a_program_of_several_tokens_exchanges_activations(program, tokens):
    pytest.importorskip("libtpu", reason="pip install -e '.[kernels]'")
    config = dataclasses.replace(MODELS["Llama 3.1 8B"], num_hidden_layers=2)
    batch = ahead_of_time.Batch(ROWS, 1024, PAGE, ROWS * 8)
    lowered = ahead_of_time.lower_step(
        config,
        ahead_of_time.devices_of("v5e:2x4"),
        batch,
        ("bfloat16", "bfloat16"),
        preset("off", ROWS, platform="tpu"),
        program=program_of(program),
    )
    text = ahead_of_time.compiled(lowered).as_text() or ""
    assert not re.findall(r"bf16\[2,\d+,\d+\]\S* copy\(", text), "the matrices of both layers are copied"
    exchanged = collectives(text)
    sums = [c.num_bytes for c in exchanged if c.operation == "all-reduce"]
    assert sums.count(tokens * config.hidden_size * 2) == 2 * config.num_hidden_layers + 1
    assert max((c.num_bytes for c in exchanged if c.operation == "all-gather"), default=0) < SMALLEST
