"""Plans of models on slices: against the shapes, the published sizes, and libtpu."""

import dataclasses
import logging
import math
from collections import Counter
from pathlib import Path

import jax
import pytest

from entropic_jax import models
from entropic_jax.analysis import ahead_of_time
from entropic_jax.analysis.chips import topology
from entropic_jax.analysis.collectives import collectives
from entropic_jax.analysis.plan import (
    Dtypes,
    first_that_fits,
    make_plan,
    page_bytes,
    positions_read,
    weight_bytes,
)
from entropic_jax.analysis.step_needs import from_program, from_shapes
from entropic_jax.methods.presets import preset
from entropic_jax.models.decoder import Decoder, structure
from entropic_jax.pallas import dispatch
from entropic_jax.state.ledger import weights_read
from tests.marks import exhaustive
from tests.pallas.compilers import _need

LLAMA_8B = models.Config(
    "LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
)
QWEN3_30B = models.Config(
    "Qwen3MoeForCausalLM",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_local_experts=128,
    num_experts_per_tok=8,
    max_position_embeddings=40960,
)
LLAMA_70B = dataclasses.replace(
    LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
)
BFLOAT16 = Dtypes("bfloat16", "bfloat16")
# What eight rows have read of their pages: a sum of four numbers, and the largest of one.
SELECTION = Counter({("all-reduce", 8 * 4 * 4): 1, ("all-reduce", 8 * 4): 1})
BATCH = ahead_of_time.Batch(rows=8, context=1024, page_size=128, pages=64)


def plan_of(config=LLAMA_8B, name="v5e:2x4", batch=BATCH, setting=None, compiled=None, dtypes=BFLOAT16):
    state = shapes_of(config, batch, setting, dtypes)
    needs = None if compiled is None else from_program(compiled)
    return make_plan(config, topology(name), dtypes, state, needs)


def shapes_of(config, batch=BATCH, setting=None, dtypes=BFLOAT16):
    return ahead_of_time.state_shapes(config, batch, dtypes.cache, setting or preset("off"))


def test_weights_of_llama_8b_are_its_8_03_billion_divided_by_eight():
    total, read, _ = weight_bytes(LLAMA_8B, 8, BFLOAT16)
    norms = (2 * 32 + 1) * 4096 * 2  # on every chip
    assert total == pytest.approx(8.030e9 * 2 / 8 + norms * 7 / 8, rel=1e-3)
    assert total - read == 128256 * 4096 * 2 // 8
    assert weight_bytes(LLAMA_8B, 1, BFLOAT16).total == 2 * sum(
        x.size for x in jax.tree.leaves(structure(LLAMA_8B)[1])
    )


def test_experts_are_divided_over_their_axis():
    weights = weight_bytes(QWEN3_30B, 4, BFLOAT16)
    assert (
        weights
        == weight_bytes(QWEN3_30B, 4, BFLOAT16, experts=4)
        == weight_bytes(QWEN3_30B, 4, BFLOAT16, experts=2)
    )
    assert weights[0] == pytest.approx(30.5e9 * 2 / 4, rel=0.01)
    gpt_oss = dataclasses.replace(
        QWEN3_30B, architecture="GptOssForCausalLM", attention_bias=True, num_hidden_layers=1
    )
    biases = 128 * 2048 * 2  # of the experts' outputs, which the chips that share an expert all have
    tensor, both = (weight_bytes(gpt_oss, 4, BFLOAT16, experts).total for experts in (1, 4))
    assert tensor - both == biases * 3 // 4


def test_page_bytes_are_those_of_the_allocated_pool():
    config = dataclasses.replace(LLAMA_8B, num_hidden_layers=3, num_key_value_heads=4)
    for dtype in ("float32", "bfloat16", "int8"):
        state = ahead_of_time.state_shapes(config, BATCH, dtype, preset("off"))
        total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache.layers))
        assert page_bytes(config, 1, 128, dtype) * (BATCH.pages + 1) == total
        assert page_bytes(config, 4, 128, dtype) * 4 == page_bytes(config, 1, 128, dtype)


def test_what_fits_is_less_than_the_memory_and_one_page_more_is_too_much():
    plan = plan_of()
    held = plan.weight_bytes + plan.state_bytes + plan.temporary_bytes + plan.pages * plan.page_bytes
    assert held <= 0.9 * plan.memory_bytes < held + plan.page_bytes
    assert plan.sequences == plan.pages // 8
    assert max(plan.tokens_per_second) <= plan.sequences


def test_llama_8b_does_not_fit_a_single_v5e_chip():
    assert plan_of(name="v5e:1x1").sequences == 0
    assert plan_of(name="v6e:1x1").sequences > 0


def test_time_of_a_step():
    time = plan_of().roofline
    read = weight_bytes(LLAMA_8B, 8, BFLOAT16).read
    assert time.weights == pytest.approx(1e3 * read / 819e9)
    assert time.kv_cache == pytest.approx(1e3 * 8 * 1024 * 2 * 32 * 128 * 2 / 819e9)
    # 65 sums, each of which crosses the three + one links of the grid twice, and the logits of a row each.
    summed, exchanged = 8 * 4096 * 2 * 7 / 8 / 90e9, 128256 * 4 * 7 / 8 / 90e9
    gathered = 8 * 13 * 4 * 7 / 8 / 90e9 + 4e-6  # flags and integers, and floats
    assert time.collectives == pytest.approx(1e3 * (65 * 2 * (summed + 4e-6) + exchanged + gathered + 8e-6))
    assert time.total == pytest.approx(time.weights + time.kv_cache + time.collectives)


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_a_step_reads_the_experts_that_its_rows_choose(rows):
    devices, batch = 8, ahead_of_time.Batch(rows, 1024, page_size=128, pages=rows * 8)
    time = plan_of(QWEN3_30B, batch=batch).roofline
    shape = Decoder(QWEN3_30B).shape
    expected = 2 * float(weights_read(shape, rows)) / devices
    # Every chip has all of the routers.
    assert time.weights == pytest.approx(1e3 * expected / 819e9, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "least", "most"), [("int8", 0.5, 0.51), ("int4", 0.28, 0.30)])
@pytest.mark.parametrize("config", [LLAMA_70B, QWEN3_30B], ids=["dense", "mixture"])
def test_quantised_weights_take_fewer_bytes(config, quantization, least, most):
    wide = weight_bytes(config, 4, BFLOAT16)
    narrow = weight_bytes(config, 4, BFLOAT16._replace(quantization=quantization))
    assert least < narrow.total / wide.total < most
    assert narrow.read < narrow.total and narrow.experts < 0.51 * max(wide.experts, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "config", "name"),
    [("Llama 3.1 70B", LLAMA_70B, "v6e:4x4"), ("Qwen3 30B-A3B", QWEN3_30B, "v5e:2x4")],
)
def test_the_page_on_meshes_has_what_divided_kv_heads_are_worth(label, config, name):
    page = Path(__file__).parents[2].joinpath("docs/meshes.md").read_text("utf-8")
    for rows, context in ((32, 8192), (1, 1024)):
        batch = ahead_of_time.Batch(rows, context, page_size=128, pages=rows * context // 128)
        state = shapes_of(config, batch)
        plans = [make_plan(config, topology(name), BFLOAT16, state, page_shards=n) for n in (1, None)]
        cells = [label, name, f"{rows} × {context}"]
        cells += [f"{plan.sequences:,}" for plan in plans]
        for part in ("kv_cache", "collectives", "total"):
            cells += [f"{getattr(plan.roofline, part):.2f}" for plan in plans]
        assert f"| {' | '.join(cells)} |" in page, f"| {' | '.join(cells)} |"


def test_the_page_on_meshes_has_the_bytes_of_the_plan():
    page = Path(__file__).parents[2].joinpath("docs/meshes.md").read_text("utf-8")
    for rows in (32, 64):
        exchanged = from_shapes(LLAMA_8B, 8, rows, BFLOAT16, shapes_of(LLAMA_8B)).collectives
        logits, *small = [c.num_bytes for c in exchanged if c.operation != "all-reduce"]
        cells = rows, rows * 128256 * 4, logits, sum(small), rows * 128256, rows // 8 * 128256
        assert f"| {' | '.join(f'{x:,}' for x in cells)} |" in page


@pytest.mark.parametrize(
    "name",
    [
        "v5e",
        "v9:2x2",
        "v5e:2",
        "v5e:0x4",
        "v5e:2x2x2",
        "v4:2x4",
        "v5e:04x4",
        "v5e:\u0664x4",
        "h100:2x4",
        "h100:0",
        "h200:16",
    ],
)
def test_unknown_topologies_are_refused(name):
    with pytest.raises(ValueError, match="topology must"):
        topology(name)


def test_gpus_of_a_host_are_one_switch_apart():
    alone, host = topology("h100:1"), topology("h100:8")
    assert (host.devices, host.hops, host.group(2).name) == (8, 1, "h100:4")
    assert alone.seconds("all-reduce", 2**20) == 0
    assert host.seconds("all-reduce", 2**20) == pytest.approx(2 * (2**20 * 7 / 8 / 450e9 + 1e-6))
    assert plan_of(name="h100:8").roofline.weights == pytest.approx(
        1e3 * weight_bytes(LLAMA_8B, 8, BFLOAT16).read / 3.35e12
    )


def test_layers_with_a_window_read_their_window():
    # Gemma 3: five of six layers see 1024 positions.
    gemma = dataclasses.replace(
        LLAMA_8B,
        architecture="Gemma3ForCausalLM",
        num_hidden_layers=36,
        sliding_window=1024,
        layer_types=(("sliding_attention",) * 5 + ("full_attention",)) * 6,
    )
    assert positions_read(LLAMA_8B, 8192) == 32 * 8192
    assert positions_read(gemma, 8192) == 6 * 8192 + 30 * 1024
    assert positions_read(gemma, 512) == 36 * 512
    batch = ahead_of_time.Batch(8, 8192, page_size=128, pages=8 * 64)
    cached = plan_of(gemma, batch=batch).roofline.kv_cache
    assert cached == pytest.approx(1e3 * 8 * 2 * 128 * 2 * positions_read(gemma, 8192) / 819e9)


def test_sums_of_a_layer():
    sums = lambda config: from_shapes(config, 8, 8, BFLOAT16, shapes_of(LLAMA_8B)).collectives
    count = lambda architecture: sum(
        c.operation == "all-reduce" for c in sums(dataclasses.replace(LLAMA_8B, architecture=architecture))
    )
    # Norms of queries and keys over all heads; blocks side by side.
    assert [count(f"{name}ForCausalLM") for name in ("Llama", "Olmo2", "Cohere")] == [65, 97, 33]


def test_a_slice_on_which_groups_are_not_divided_is_not_proposed():
    config = dataclasses.replace(LLAMA_8B, intermediate_size=14784)  # 462 groups of 32 inputs
    int4 = BFLOAT16._replace(quantization="int4")
    state = shapes_of(config)
    for sequences in (1, 700, 1500):
        name = first_that_fits(config, int4, state, sequences)
        assert name is None or 462 % topology(name).devices == 0


def test_the_first_host_that_fits_is_looked_for_among_gpus():
    state = shapes_of(LLAMA_70B)
    assert first_that_fits(LLAMA_70B, BFLOAT16, state) == "v5e:4x4"
    assert first_that_fits(LLAMA_70B, BFLOAT16, state, platform="gpu") == "h100:2"
    assert first_that_fits(LLAMA_70B, BFLOAT16, state, 256, platform="gpu") == "h200:2"


def test_collectives_of_a_program_are_counted():
    program = """
      %a = bf16[32,1,4096]{2,1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1
      %b = (f32[4]{0}, f32[4,8]{1,0}) all-reduce(%x, %y), channel_id=1
      %c = (f32[2,3]{1,0}, f32[2,24]{1,0}) all-gather-start(%x), dimensions={1}
      %d = f32[2,24]{1,0} all-gather-done(%c)
      %e = f32[2]{0} add(%all-reduce.1, %y)
      %f = (f32[1,3]{1,0}, f32[1,3]{1,0}, /*index=2*/f32[1,3]{1,0}) all-to-all(%x, %y, %z)
    """
    counted = [(c.operation, c.num_bytes) for c in collectives(program)]
    summed = [("all-reduce", 2 * 32 * 4096), ("all-reduce", 4 * 36)]
    assert counted == [*summed, ("all-gather", 4 * 48), ("all-to-all", 4 * 9)]


def test_collectives_in_a_loop_over_layers_count_for_each_layer():
    program = """
%body.1 (x: (s32[], f32[4])) -> (s32[], f32[4]) {
  %c = f32[4]{0} conditional(%p, %y), branch_computations={%first.4, %two.5}
  %a = f32[4]{0} all-reduce(%x), to_apply=%sum.3
}
%two.5 (x: f32[4]) -> f32[4] {
  ROOT %b = f32[8]{0} all-gather(%x), dimensions={0}
}
%condition.2 (x: (s32[], f32[4])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(80)
  ROOT %lt.1 = pred[] compare(%i, %constant.9), direction=LT
}
%unknown.6 (x: (s32[], f32[4])) -> pred[] {
  ROOT %and.1 = pred[] and(%p, %q)
}
%other.7 (x: (s32[], f32[4])) -> (s32[], f32[4]) {
  %d = f32[2]{0} all-reduce(%x), to_apply=%sum.3
}
ENTRY %main.8 (x: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%condition.2, body=%body.1
  %v = (s32[], f32[4]) while(%t), condition=%unknown.6, body=%other.7
  %e = f32[16]{0} all-reduce(%x), to_apply=%sum.3
}
"""
    counts = Counter((c.operation, c.num_bytes) for c in collectives(program))
    rest = {("all-reduce", 64): 1, ("all-reduce", 8): 1}
    assert counts == {("all-reduce", 16): 80, ("all-gather", 32): 80} | rest
    known = program.replace("body=%other.7", 'body=%other.7, backend_config={"known_trip_count":{"n":"3"}}')
    assert sum(c.num_bytes == 8 for c in collectives(known)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset_name", "kv_heads"),
    [("v5e:2x4", "off", 4), *exhaustive(("v5e:2x4", "off", 8)), ("v6e:2x2", "full-lossy", 8)],
)
def test_the_compiler_agrees_with_the_shapes(name, preset_name, kv_heads, monkeypatch, caplog):
    _need("libtpu")
    monkeypatch.setattr(dispatch, "_logged", set())
    caplog.set_level(logging.DEBUG, dispatch.LOG.name)
    config = dataclasses.replace(LLAMA_8B, num_hidden_layers=2, num_key_value_heads=kv_heads)
    setting = preset(preset_name, 8, platform="tpu")
    page_size = 128 if setting.page_policy is None else setting.page_policy.page_size
    batch = ahead_of_time.Batch(rows=32, context=4096, page_size=page_size, pages=32 * 4096 // page_size)
    step = ahead_of_time.lower_step(config, ahead_of_time.devices_of(name), batch, tuple(BFLOAT16), setting)
    compiled = ahead_of_time.compiled(step)
    plan = plan_of(config, name, batch, setting, compiled)
    assert plan.source == "compiled program"
    assert page_size == 128
    for operation in ("decode", "write"):
        assert f"paged_attention.{operation}: tpu is chosen" in caplog.text
    assert (plan.kv_head_copies, plan.page_shards) == (1, max(1, plan.devices // kv_heads))
    expected = plan.weight_bytes + (batch.pages + plan.page_shards) * plan.page_bytes + plan.state_bytes
    assert plan.argument_bytes == pytest.approx(expected, rel=0.02)
    rows = batch.rows if preset_name == "off" else 8
    state = shapes_of(config, batch, setting)
    dense = from_shapes(config, plan.devices, rows, BFLOAT16, state).collectives
    of_selection = Counter() if preset_name == "off" else SELECTION
    kinds = lambda exchanged: Counter((c.operation, c.num_bytes) for c in exchanged)
    assert kinds(plan.collectives) == kinds(dense) + of_selection
    pages = config.num_hidden_layers * (batch.pages // plan.page_shards + 1)  # of a stack of layers
    pool = f"[{pages},{max(1, kv_heads // plan.devices)},{page_size},128]"
    assert pool in compiled.as_text()
    copies = [line for line in compiled.as_text().splitlines() if pool in line and " copy" in line]
    assert not copies, copies
    assert plan.temporary_bytes < math.prod((32, 128256, 4)) * 10


@pytest.mark.slow
@pytest.mark.parametrize("preset_name", ["off", *exhaustive("full-lossy")])
def test_the_compiler_for_gpus_agrees_with_the_shapes(preset_name, monkeypatch, caplog):
    _need("jax_plugins.xla_cuda13")
    monkeypatch.setattr(dispatch, "_logged", set())
    caplog.set_level(logging.DEBUG, dispatch.LOG.name)
    config = dataclasses.replace(LLAMA_8B, num_hidden_layers=2)
    setting = preset(preset_name, 8, platform="gpu")
    batch = ahead_of_time.Batch(rows=32, context=4096, page_size=128, pages=32 * 32)
    devices = ahead_of_time.devices_of("h100:8")
    assert len(devices) == 8 and devices[0].device_kind == "NVIDIA H100"
    compiled = ahead_of_time.compiled(
        ahead_of_time.lower_step(config, devices, batch, tuple(BFLOAT16), setting)
    )
    plan = plan_of(config, "h100:8", batch, setting, compiled)
    assert "paged_attention.decode: gpu is chosen" in caplog.text
    expected = plan.weight_bytes + (batch.pages + 1) * plan.page_bytes + plan.state_bytes
    assert plan.argument_bytes == pytest.approx(expected, rel=0.02)
    rows = batch.rows if preset_name == "off" else 8
    dense = from_shapes(config, 8, rows, BFLOAT16, shapes_of(config, batch, setting)).collectives
    by_kind = lambda exchanged: {
        kind: sum(c.num_bytes for c in exchanged if c.operation == kind)
        for kind in ("all-reduce", "all-gather", "all-to-all")
    }
    expected = by_kind(dense)
    if preset_name != "off":
        expected["all-reduce"] += sum(size for _, size in SELECTION)
    assert by_kind(plan.collectives) == expected  # XLA for GPUs may combine gathers
    assert plan.temporary_bytes < math.prod((32, 128256, 4)) * 10


@pytest.mark.slow
@pytest.mark.parametrize("experts", [4, *exhaustive(1, 2)])
def test_no_chip_gathers_or_copies_the_weights_of_experts(experts):
    _need("libtpu")
    config, batch = dataclasses.replace(QWEN3_30B, num_hidden_layers=2), BATCH
    devices = ahead_of_time.devices_of("v5e:2x2")
    step = ahead_of_time.lower_step(config, devices, batch, tuple(BFLOAT16), preset("off", 8), experts)
    compiled = ahead_of_time.compiled(step)
    weights = weight_bytes(config, 4, BFLOAT16, experts).total
    pages = (batch.pages + 1) * page_bytes(config, 4, batch.page_size, "bfloat16")
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(weights + pages, rel=0.02)
    matrix = config.num_local_experts * config.hidden_size * config.moe_intermediate_size * 2 // 4
    assert memory.temp_size_in_bytes < 0.2 * matrix, "matrices of a layer's experts are copied"
    exchanged = collectives(compiled.as_text())
    assert sum(c.operation == "all-reduce" and c.num_bytes > 4096 for c in exchanged) == 2 * 2 + 1
    assert {c.operation for c in exchanged} <= {"all-reduce", "all-gather", "all-to-all"}
    assert max(c.num_bytes for c in exchanged) <= batch.rows // 4 * config.vocab_size * 4
