"""Compiles the programs of a step for virtual devices, in a process of its own: prints their memory.

    python -m tests.mesh_memory 1 2 8 8/2

The number of KV heads, if it is not that of the devices, follows a slash.

Nothing runs, and no weights exist: arguments are shapes. JAX fixes the number of devices when it starts, so
the caller sets XLA_FLAGS. With ENTROPIC_KERNELS=xla all meshes have the same kernels.
"""

import dataclasses
import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax import allocate, loop, models, parameters, start
from entropic_jax.mesh import make_mesh, sharding
from entropic_jax.methods.presets import preset
from entropic_jax.models import sharding as model_sharding
from entropic_jax.models.decoder import Decoder, structure
from entropic_jax.phases.prefill import PrefillChunk, prefill
from entropic_jax.speculation import make_speculator

CONFIG = models.Config(
    architecture="LlamaForCausalLM",
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=1024,
)
ROWS, CONTEXT, PAGE_SIZE, PAGES = 4, 512, 64, 128
CHUNK, DRAFTED = 64, 3  # tokens of a prefill chunk, and drafted for a row


def state_shapes(decoder: Decoder, speculator: Any) -> Any:
    """The state of a batch, as shapes; all pools have as many bytes, however many KV heads there are."""
    pages = PAGES * CONFIG.num_key_value_heads // decoder.config.num_key_value_heads

    def empty() -> Any:
        pool = allocate(decoder.shape, ROWS, CONTEXT, pages=pages, page_size=PAGE_SIZE)
        return start(
            decoder,
            None,
            preset("off").controller,
            pool,
            [[]] * ROWS,
            key=jax.random.key(0),
            max_tokens=0,
            sample=parameters(ROWS),
            speculator=speculator,
        )

    return jax.eval_shape(empty)


def total_bytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree, as if one device held them."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def report(case: str) -> dict[str, Any]:
    """What the programs of a mesh hold on a device, by name."""
    number, _, kv_heads = case.partition("/")
    devices, config = int(number), CONFIG
    if kv_heads:
        config = dataclasses.replace(CONFIG, num_key_value_heads=int(kv_heads))
    mesh = None if devices == 1 else make_mesh(devices)
    shards = model_sharding.check_page_shards(config, devices)
    decoder, controller = Decoder(config, mesh, page_shards=shards), preset("off").controller
    speculator = make_speculator("suffix", ROWS, DRAFTED)
    params, full = structure(config)[1], state_shapes(Decoder(config), speculator)
    state = state_shapes(Decoder(config, page_shards=shards), speculator)
    sizes = {"weights": total_bytes(params), "pool": total_bytes(full.cache.layers)}
    if mesh is not None:
        shaped = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        params = jax.tree.map(shaped, params, model_sharding.shardings(params, mesh))
        state = jax.tree.map(shaped, state, sharding.shardings(state, mesh))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    chunk = PrefillChunk(array(1), array(1, CHUNK + 1), array(1), array(1))
    programs: dict[str, tuple[Any, ...]] = {
        "decode": (lambda p, s: loop.step(decoder, p, controller, s),),
        "verify": (lambda p, s: loop.speculative_step(decoder, p, controller, speculator, s),),
        "prefill": (partial(prefill, decoder), chunk),
    }
    result: dict[str, Any] = dict(sizes)
    for name, (program, *others) in programs.items():
        launch = partial(sharding.launch, decoder, program)
        compiled = jax.jit(launch, donate_argnums=1).lower(params, state, *others).compile()
        memory: Any = compiled.memory_analysis()
        result[name] = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
    return result


if __name__ == "__main__":
    print(json.dumps({number: report(number) for number in sys.argv[1:]}))
