"""Runs tiny models on meshes of virtual devices, in a process of its own: prints what the tests compare.

    python -m tests.mesh_programs mixtral 1 2 1x2

A mesh is its number of devices along tensor, or those along tensor and expert. `/1` after it gives each
device that shares a KV head a copy of it, `/2` divides it over two.

JAX fixes the number of devices when it starts, so the caller sets XLA_FLAGS. Layers are scanned with
`ENTROPIC_LAYERS=scanned`.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np

from entropic_jax import allocate, generate, loop, models, parameters, start
from entropic_jax.attention.page_selection import Selection
from entropic_jax.mesh import gather_last_axis, make_mesh, sharding
from entropic_jax.methods import presets
from entropic_jax.methods.expert_selection import TopPExperts
from entropic_jax.models.layer_stack import scans_layers, stack_layers
from entropic_jax.models.sharding import local_region
from entropic_jax.pallas.paged_attention import SelectionRules
from entropic_jax.phases.batch import gather_active
from entropic_jax.phases.forward import decode

COMMON: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    head_dim=16, max_position_embeddings=256,
)  # fmt: skip
FAMILIES = {
    "llama": dict(architecture="LlamaForCausalLM", num_key_value_heads=8, attention_bias=True),
    "grouped": dict(architecture="LlamaForCausalLM", num_key_value_heads=2, attention_bias=True),
    "single": dict(architecture="LlamaForCausalLM", num_key_value_heads=1),
    "single-olmo2": dict(architecture="Olmo2ForCausalLM", num_key_value_heads=1),
    "grouped-gpt-oss": dict(
        architecture="GptOssForCausalLM",
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        attention_bias=True,
        sliding_window=24,
        layer_types=("full_attention", "sliding_attention"),
    ),
    "qwen3": dict(
        architecture="Qwen3ForCausalLM",
        num_key_value_heads=4,
        tie_word_embeddings=True,
        sliding_window=24,
        layer_types=("full_attention", "sliding_attention"),
    ),
    "olmo2": dict(architecture="Olmo2ForCausalLM", num_key_value_heads=4),
    "cohere": dict(architecture="CohereForCausalLM", num_key_value_heads=4, use_qk_norm=True),
    "mixtral": dict(
        architecture="MixtralForCausalLM",
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
    ),
    "qwen3-moe": dict(
        architecture="Qwen3MoeForCausalLM",
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "gpt-oss": dict(
        architecture="GptOssForCausalLM",
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        attention_bias=True,
    ),
}
PAGE_SIZE, ROWS, TOKENS = 8, 4, 16
PAGES = Selection(dense_layers=0, rules=SelectionRules(sink_pages=1, recent_pages=1, min_pages=2), refresh=2)
# Entropies of a random model are near ln 96 = 4.6 nats: with these limits it leaves pages unread.
GAINS = presets.Gains(low_entropy=6.0, high_entropy=12.0, dropped_mass_limit=0.4, target_entropy=3.0)


def model_of(family: str, mesh: str) -> models.Model:
    """A model with random weights, divided over a mesh; a bias, like a sink, is not zero."""
    mesh, _, divided = mesh.partition("/")
    page_shards = int(divided) if divided else None
    model = models.initialise(models.Config(**COMMON, **FAMILIES[family]), 1)
    keys = iter(jax.random.split(jax.random.key(5), 100))
    named = lambda path: jax.tree_util.keystr(path[-1:]) in ("['bias']", "['sinks']")
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: 0.1 * jax.random.normal(next(keys), x.shape, x.dtype) if named(path) else x,
        model.params,
    )
    model = dataclasses.replace(model, params=params)
    tensor, experts = (int(size) for size in f"{mesh}x1".split("x")[:2])
    if tensor * experts > 1:
        model = models.shard(model, make_mesh(tensor, expert_parallel_size=experts), page_shards)
    return stack_layers(model) if scans_layers() else model


def begin(model: models.Model, preset: presets.Preset, expert_policy: Any = None) -> Any:
    """A state with prompts of several lengths, one of them sampled."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, COMMON["vocab_size"], length).tolist() for length in (40, 90, 9, 70)]
    pool = sharding.create(lambda: allocate(model.decoder.shape, ROWS, 128, page_size=PAGE_SIZE), model.mesh)
    return start(
        model.decoder,
        model.params,
        preset.controller,
        pool,
        prompts,
        key=jax.random.key(7),
        max_tokens=TOKENS,
        sample=parameters(ROWS, temperature=[0.0, 0.0, 0.0, 1.0], top_p=[1.0, 1.0, 1.0, 0.9]),
        page_policy=preset.page_policy,
        expert_policy=expert_policy,
    )


def step_of(model: models.Model, state: Any, controller: Any) -> Any:
    """The compiled program of one step."""

    def launch(params, state):
        step = lambda params, state: loop.step(model.decoder, params, controller, state)
        return sharding.launch(model.decoder, step, params, state)

    return jax.jit(launch, donate_argnums=1).lower(model.params, state).compile()


def logits_of(model: models.Model, state: Any) -> jax.Array:
    """The logits of the next position of every row."""

    def program(params, state):
        _, state, batch = gather_active(state, None)
        batch, output = decode(model.decoder, params, batch, None)
        return batch.state, gather_last_axis(output.logits)

    launched = jax.jit(lambda params, state: sharding.launch(model.decoder, program, params, state))
    return launched(model.params, state)[1]


def misplaced(model: models.Model) -> list[str]:
    """The parameters of which half of the devices hold anything but what `local_region` says."""
    if model.mesh is None or model.stacked:
        return []
    devices = list(model.mesh.devices.flat)
    half = set(devices[len(devices) // 2 :])  # as a process has them: those of one place along `tensor`
    wrong = []
    for keys, x in jax.tree_util.tree_leaves_with_path(model.params):
        path = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in keys)
        held = np.zeros(x.shape, bool)
        for shard in x.addressable_shards:
            if shard.device in half:
                held[shard.index] = True
        region = local_region(path, x.shape, model.mesh, half)
        if not held[region].all() or held.sum() != held[region].size:
            wrong.append(jax.tree_util.keystr(keys))
    return wrong


def run(model: models.Model, preset: presets.Preset, state: Any) -> Any:
    """The trace of a launch."""
    return generate(model.decoder, model.params, preset.controller, state, TOKENS, capacity=TOKENS)[1]


def by_steps(step: Any, model: models.Model, state: Any) -> Any:
    """The trace of as many steps of a compiled step, which spares the compilation of a launch."""
    traces = []
    for _ in range(TOKENS):
        state, trace = step(model.params, state)
        traces.append(jax.device_get(trace))
    return jax.tree.map(lambda *steps: np.stack(steps), *traces)


def report(family: str, mesh: str) -> dict[str, Any]:
    """What a mesh computes, and how."""
    model = model_of(family, mesh)
    off, full = presets.preset("off"), presets.preset("full-lossy", gains=GAINS)
    full = full._replace(page_policy=PAGES)
    state = begin(model, off)
    compiled = step_of(model, state, off.controller)
    memory = compiled.memory_analysis()
    largest = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))
    result = {
        "layers": model.config.num_hidden_layers,
        "program": compiled.as_text(),
        "weight_bytes": largest(model.params),
        "pool_bytes": largest(state.cache.layers),
        "pool_shape": state.cache.layers[0].keys.addressable_shards[0].data.shape,
        "argument_bytes": memory.argument_size_in_bytes,
        "weight_shards": [
            max(s.data.size for s in x.addressable_shards) for x in jax.tree.leaves(model.params)
        ],
        "weight_sizes": [x.size for x in jax.tree.leaves(model.params)],
        "misplaced": misplaced(model),
        "logits": np.asarray(logits_of(model, state)).tolist(),
    }
    mixture = model.config.num_local_experts > 0
    for name, preset in (("off", off), ("full-lossy", full)):
        # With pages, experts are left unread, too.
        state = begin(model, preset, TopPExperts(0.6) if mixture and preset is full else None)
        trace = run(model, preset, state) if preset is full else by_steps(compiled, model, state)
        result[name] = {
            "tokens": np.asarray(trace.token).T.tolist(),
            "entropy": np.asarray(trace.entropy).tolist(),
            "kept_fraction": np.asarray(trace.kept_fraction).tolist(),
            "dropped_mass": np.asarray(trace.dropped_mass).tolist(),
            "certificate": np.asarray(trace.certificate).tolist(),
            "experts_read": np.asarray(trace.experts_read).tolist(),
        }
    return result


if __name__ == "__main__":
    print(json.dumps({number: report(sys.argv[1], number) for number in sys.argv[2:]}))
