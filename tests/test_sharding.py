"""Meshes: the same tokens on 1 to 8 devices, no hidden collective, and no device with more than its share."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.analysis.collectives import Collective, collectives
from entropic_jax.mesh import AXES, make_mesh
from entropic_jax.models.layer_stack import VARIABLE
from tests.compilation import virtual_devices
from tests.marks import keep

ROOT = Path(__file__).resolve().parents[1]
# Devices along tensor, or along tensor and expert.
CASES = {
    "llama": ("2", "8"),
    "qwen3": ("4",),
    "mixtral": ("2", "2x2"),
    "qwen3-moe": ("1x4",),
    "gpt-oss": ("1x2", "2x2"),
    "olmo2": ("4",),
    "cohere": ("2",),
}
# Virtual devices; what runs for a moment is compiled fast.
XLA_FLAGS = virtual_devices(8)
# Sums of a layer: one more for the norms of queries and keys over all heads; one for blocks side by side.
SUMS = {"olmo2": 3, "cohere": 1}
ALL = [(family, shards) for family, sizes in CASES.items() for shards in sizes]
MESHES = keep(ALL, ("llama", "2"), ("gpt-oss", "2x2"))


def size_of(mesh: str) -> int:
    """Devices of a mesh, of which only a part behind `/` may say something else."""
    return math.prod(int(size) for size in mesh.partition("/")[0].split("x"))


@cache
def reports(family: str, mesh: str, layers: str = "unrolled") -> tuple[dict[str, Any], dict[str, Any]]:
    """What one device reports, and what a mesh does (`tests.mesh_programs`)."""
    arguments = [sys.executable, "-m", "tests.mesh_programs", family, "1", mesh]
    environment = {**os.environ, "XLA_FLAGS": XLA_FLAGS, VARIABLE: layers}
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    return report["1"], report[mesh]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shards"), MESHES)
def test_a_mesh_computes_what_one_device_computes(family, shards):
    device, mesh = reports(family, shards)
    np.testing.assert_allclose(mesh["logits"], device["logits"], atol=2e-4, rtol=0)
    assert np.ptp(device["logits"]) > 1
    for preset in ("off", "full-lossy"):
        assert mesh[preset]["tokens"] == device[preset]["tokens"]
        for name in ("entropy", "kept_fraction", "dropped_mass", "certificate"):
            np.testing.assert_allclose(mesh[preset][name], device[preset][name], atol=1e-3)
        assert mesh[preset]["experts_read"] == device[preset]["experts_read"]
    assert np.mean(device["full-lossy"]["kept_fraction"]) < 0.9, (
        "nothing was pruned: the test compares nothing"
    )
    if read := device["full-lossy"]["experts_read"]:
        assert 1 < np.mean(read) < 2, "all chosen experts were read: the test compares nothing"


ROWS, VOCABULARY = 4, 96  # of `tests.mesh_programs`


def forbidden(in_program: list[Collective]) -> list[Collective]:
    """Collectives that move more than activations and a share of the logits: all logits, weights, pages."""
    return [
        c
        for c in in_program
        if (c.operation == "all-reduce" and c.shapes[0][:1] != (ROWS,)) or c.num_bytes > most_bytes(c)
    ]


def most_bytes(collective: Collective) -> int:
    """Bytes that a collective may leave on a device."""
    if collective.operation == "all-gather":
        return 8 * 16 * 4  # some numbers of each row; eight devices pad four rows
    width = 64 if collective.operation == "all-reduce" else VOCABULARY // 2
    return ROWS * width * 4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shards"), MESHES)
def test_a_step_has_two_sums_per_layer_and_one_exchange_of_logits(family, shards):
    device, mesh = reports(family, shards)
    assert not collectives(device["program"])
    in_program = collectives(mesh["program"])
    operations = Counter(collective.operation for collective in in_program)
    sums = SUMS.get(family, 2) * mesh["layers"] + 1
    assert operations == {"all-reduce": sums, "all-to-all": 1, "all-gather": 2}
    assert not forbidden(in_program)


def test_a_gathering_of_the_pool_or_of_logits_is_seen():
    for result in ("f32[65,8,8,16]{3,2,1,0}", "f32[4,96]{1,0}", "f32[4,1,96]{2,1,0}"):
        assert forbidden(collectives(f"%g = {result} all-gather(%x), dimensions={{1}}"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shards"), MESHES)
def test_no_copy_of_the_pool(family, shards):
    _, mesh = reports(family, shards)
    shape = re.escape(f"f32[{','.join(map(str, mesh['pool_shape']))}]")
    assert re.search(shape, mesh["program"]), "the shape of the pool does not occur"
    copies = rf"= {shape}\S* (?:copy|select|transpose|copy-start|all-gather)\(.*"
    assert not re.findall(copies, mesh["program"])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shards"), MESHES)
def test_no_device_has_more_than_its_share(family, shards):
    device, mesh = reports(family, shards)
    divided = (mesh["weight_bytes"] + mesh["pool_bytes"]) / size_of(shards)
    replicated = device["argument_bytes"] - device["weight_bytes"] - device["pool_bytes"]
    undivided = sum(
        4 * size
        for size, part in zip(mesh["weight_sizes"], mesh["weight_shards"], strict=True)
        if part == size
    )
    assert mesh["argument_bytes"] <= divided + 1.05 * (replicated + undivided)
    assert undivided < 0.05 * mesh["weight_bytes"]
    assert not mesh["misplaced"]
    assert mesh["pool_shape"][1] * size_of(shards) == device["pool_shape"][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "shards"), [("llama", "2"), ("mixtral", "2x2"), ("llama", "4")])
def test_scanned_layers_on_a_mesh_compute_what_unrolled_ones_do(family, shards):
    device = reports(family, CASES[family][0])[0]
    alone, mesh = reports(family, shards, "scanned")
    for scanned in (alone, mesh):
        np.testing.assert_allclose(scanned["logits"], device["logits"], atol=2e-4, rtol=0)
        for preset in ("off", "full-lossy"):
            assert scanned[preset]["tokens"] == device[preset]["tokens"]
            np.testing.assert_allclose(scanned[preset]["entropy"], device[preset]["entropy"], atol=1e-3)
    assert mesh["pool_shape"][0] == 2 * device["pool_shape"][0], "the pages of both layers are one pool"
    in_program = collectives(mesh["program"])
    assert [c.operation for c in in_program].count("all-reduce") == 2 * mesh["layers"] + 1
    assert mesh["program"].count(" all-reduce(") == 2 + 1, "the layers are traced once"
    assert not forbidden(in_program)
    shape = re.escape(f"f32[{','.join(map(str, mesh['pool_shape']))}]")
    copies = rf"= {shape}\S* (?:copy|select|transpose|copy-start|all-gather)\(.*"
    assert re.search(shape, mesh["program"]) and not re.findall(copies, mesh["program"])
    stacks = r"= f32\[2,\d+,\d+\]\S* (?:copy\((?!%all_to_all)|all-gather\().*"
    assert not re.findall(stacks, mesh["program"]), "stacked weights are copied"


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_copies_of_kv_heads_are_next_to_each_other(quantization):
    from entropic_jax.models.decoder import structure
    from entropic_jax.models.model import quantised
    from entropic_jax.models.sharding import copy_kv_heads, kv_head_copies, with_kv_head_copies

    config = models.Config(
        **{**CONFIG, "num_key_value_heads": 2, "intermediate_size": 64, "attention_bias": True}
    )
    assert [kv_head_copies(config, devices, 1) for devices in (1, 2, 4)] == [1, 1, 2]
    assert with_kv_head_copies(config, 2, 1) == with_kv_head_copies(config, 4) == config
    model = models.initialise(config, 0)
    model = model if quantization is None else quantised(model, quantization)
    shapes = structure(with_kv_head_copies(config, 4, 1), quantization)[1]
    layers, shaped = model.params["layers"][0], shapes["layers"][0]
    for module, name in (
        ("k_proj", "kernel"),
        ("v_proj", "bias"),
        *([("v_proj", "scale")] * bool(quantization)),
    ):
        x = np.asarray(layers["self_attn"][module][name])
        copied = copy_kv_heads(x, shaped["self_attn"][module][name].shape, 2)
        first, second = np.split(x, 2, -1)
        np.testing.assert_array_equal(copied, np.concatenate([first, first, second, second], -1))
    query = layers["self_attn"]["q_proj"]["kernel"]
    assert copy_kv_heads(query, shaped["self_attn"]["q_proj"]["kernel"].shape, 2) is query


EXPERTS = """
import json
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from entropic_jax.mesh import make_mesh, sum_over_shards
from entropic_jax.models.experts import Projections, expert_sum, local_numbers

rng = np.random.default_rng(0)
normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
x, weights = normal(13, 16), rng.uniform(size=(13, 2)).astype(np.float32)
gate, up, down = normal(8, 16, 12), normal(8, 16, 12), normal(8, 12, 16)
# Expert 5 of some tokens alone, so that one device has most of the work and one has none.
expert_ids = np.stack([np.full(13, 5), np.where(np.arange(13) < 4, 4, 1)], 1).astype(np.int32)
kernel, turned = P("expert", None, "tensor"), P("expert", "tensor", None)

def divided(x, expert_ids, weights, *kernels):
    expert_ids = local_numbers(expert_ids, kernels[0].shape[0])
    return sum_over_shards(expert_sum(x, expert_ids, weights, Projections(kernels)))

alone, largest = expert_sum(x, expert_ids, weights, Projections((gate, up, down))), {}
for tensor, experts in ((1, 4), (2, 2), (4, 1)):
    mesh = make_mesh(tensor, expert_parallel_size=experts)
    specs = (P(), P(), P(), kernel, kernel, turned)
    program = jax.shard_map(divided, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    error = abs(np.asarray(jax.jit(program)(x, expert_ids, weights, gate, up, down)) - alone).max()
    largest[f"{tensor}x{experts}"] = float(error)
print(json.dumps({"scale": float(abs(np.asarray(alone)).max()), "largest": largest}))
"""


@pytest.mark.slow
def test_products_of_experts_are_divided():
    environment = {**os.environ, "XLA_FLAGS": XLA_FLAGS}
    done = subprocess.run(
        [sys.executable, "-c", EXPERTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["scale"] > 10 and len(report["largest"]) == 3
    assert max(report["largest"].values()) < 1e-5 * report["scale"]


CONFIG = dict(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
)
MIXTRAL = dict(
    architecture="MixtralForCausalLM",
    num_local_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    num_key_value_heads=4,
)


@pytest.mark.parametrize(
    ("change", "mesh", "message"),
    [
        (
            {"num_key_value_heads": 2},
            ((1, 8, 1),),
            "tensor_parallel_size must divide num_key_value_heads, 2, or be a multiple of it .*, 4; got 8",
        ),
        ({"intermediate_size": 50}, ((1, 4, 1),), "must divide intermediate_size, 50; got 4"),
        ({"vocab_size": 97}, ((1, 2, 1),), "must divide vocab_size, 97; got 2"),
        ({}, ((2, 1, 1),), "mesh must have one device along data; got 2"),
        (
            {},
            ((1, 1, 2),),
            "expert_parallel_size must be 1 for LlamaForCausalLM, which has no experts; got 2",
        ),
        (MIXTRAL, ((1, 1, 4),), "expert_parallel_size must divide num_local_experts, 6; got 4"),
        (MIXTRAL, ((1, 7, 1),), "tensor_parallel_size must divide num_key_value_heads, 4, or .*; got 7"),
        ({**MIXTRAL, "intermediate_size": 50}, ((1, 4, 1),), "must divide intermediate_size, 50; got 4"),
        (
            {**MIXTRAL, "intermediate_size": 50, "num_local_experts": 8},
            ((1, 2, 4),),
            "num_key_value_heads, 4",
        ),
        (
            {**MIXTRAL, "num_key_value_heads": 2},
            ((1, 2, 3),),
            "tensor_parallel_size times expert_parallel_size must divide num_key_value_heads, 2, or .*got 6",
        ),
        (
            {"architecture": "DeepseekV2ForCausalLM"},
            ((1, 2, 1),),
            "must be 1 for DeepseekV2ForCausalLM: all heads share one latent vector; got 2",
        ),
        ({}, ((2,), ("x",)), "mesh must have the axes data, tensor, expert; got x"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(change, mesh, message):
    from entropic_jax.models.sharding import check_mesh

    config = models.Config(**{**CONFIG, **change})
    with pytest.raises(models.ModelError, match=message):
        check_mesh(config, jax.sharding.AbstractMesh(*(mesh if len(mesh) > 1 else (*mesh, AXES))))


def test_a_lack_of_devices_is_refused_before_weights_are_read():
    expected = "tensor_parallel_size must be between 1 and 3, the number of devices; got 64"
    with pytest.raises(ValueError, match=expected):
        make_mesh(64, [object()] * 3)
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1, the number of devices; got 64"):
        make_mesh(64, jax.devices()[:1])


def test_arrays_that_are_not_known_are_refused():
    from entropic_jax.models.sharding import partition_spec

    with pytest.raises(
        models.ModelError, match=r"a model with layers\.0\.self_attn\.kv_b_proj\.kernel, which"
    ):
        partition_spec(("layers", 0, "self_attn", "kv_b_proj", "kernel"), 2)


SHARDED = {"tensor", "expert"}


def test_every_matrix_is_divided():
    from entropic_jax.models.decoder import structure
    from entropic_jax.models.sharding import partition_specs

    refused = set()
    for family in models.FAMILIES:
        sizes = dict(
            CONFIG, architecture=family, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
        )
        shapes = structure(models.Config(**sizes))[1]
        try:
            specs = partition_specs(shapes, devices=2)
        except models.ModelError:
            refused.add(family.removesuffix("ForCausalLM"))
            continue
        for (path, shape), spec in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), strict=True
        ):
            name = jax.tree_util.keystr(path)
            matrix = shape.ndim > 1 and "'gate'" not in name and "'shared_expert_gate'" not in name
            divided_outputs = ("_proj" in name or "lm_head" in name) and "o_proj" not in name
            bias = "bias" in name and divided_outputs and "down_proj" not in name
            axes = {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
            if "'experts'" in name:
                assert axes - {None} == ({"expert"} if name.endswith("['down_proj']['bias']") else SHARDED)
            else:
                assert axes - {None} == (SHARDED if matrix or bias or "'sinks'" in name else set()), name
    assert refused == {"DeepseekV2", "DeepseekV3", "Glm4MoeLite"}
