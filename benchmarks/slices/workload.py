"""Models, slices and programs of the benchmark; sizes are those of the published config.json files."""

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax import loop
from entropic_jax.analysis.ahead_of_time import DECODE_STEP, Program
from entropic_jax.methods.presets import Preset
from entropic_jax.models import Config
from entropic_jax.phases.prefill import PrefillChunk, prefill
from entropic_jax.speculation import make_speculator

LLAMA, QWEN, MOE = "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
ROUTED = dict(num_local_experts=128, num_experts_per_tok=8)
MODELS = {  # vocabulary, hidden and intermediate size, layers, heads, KV heads, head size
    "Llama 3.1 8B": Config(LLAMA, 128256, 4096, 14336, 32, 32, 8, 128),
    "Llama 3.1 70B": Config(LLAMA, 128256, 8192, 28672, 80, 64, 8, 128),
    "Qwen3 32B": Config(QWEN, 151936, 5120, 25600, 64, 64, 8, 128),
    "Qwen3 30B-A3B": Config(MOE, 151936, 2048, 6144, 48, 32, 4, 128, moe_intermediate_size=768, **ROUTED),
    "Qwen3 235B-A22B": Config(MOE, 151936, 4096, 12288, 94, 64, 4, 128, moe_intermediate_size=1536, **ROUTED),
    "Mixtral 8x22B": Config(
        "MixtralForCausalLM", 32768, 6144, 16384, 56, 48, 8, 128, num_local_experts=8, num_experts_per_tok=2
    ),
}
SLICES = ("v4:2x2x2", "v5e:2x4", "v5e:4x4", "v5p:2x2x2", "v6e:2x4", "v6e:4x4", "h100:8")
ROWS, CONTEXT, PAGE = 32, 8192, 128  # sequences that must fit, positions of each, and of a page
DRAFTED = 3  # tokens of a row that are verified
PROMPTS, CHUNK = 4, 512  # of a prefill program, and tokens of each
PROGRAMS = (("decode", "off"), ("verify", "off"), ("prefill", "off"), ("decode", "full"))
QUICK = ("Llama 3.1 8B",), ("v5e:2x4",), PROGRAMS[:1]


def expert_groups(config: Config, devices: int) -> int:
    """Groups of devices over which experts are divided: as many as divide them."""
    return gcd(config.num_local_experts, devices) if config.num_local_experts else 1


def program_of(name: str) -> Program:
    """A program by its name: "decode", "verify" or "prefill"."""
    if name == "decode":
        return DECODE_STEP
    if name == "verify":
        speculator = make_speculator("suffix", ROWS, DRAFTED)
        return Program(partial(_verify, speculator), speculator=speculator)
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    chunk = integers(PROMPTS), integers(PROMPTS, CHUNK + 1), integers(PROMPTS), integers(PROMPTS)
    return Program(lambda decoder, preset: partial(prefill, decoder), (PrefillChunk(*chunk),))


def _verify(speculator: Any, decoder: Any, preset: Preset) -> Callable[..., Any]:
    return lambda params, state: loop.speculative_step(decoder, params, preset.controller, speculator, state)
