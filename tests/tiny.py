"""A tiny model with random weights and a way to run it, shared by the tests of the loop."""

from functools import cache as once
from typing import Any

import jax
import numpy as np

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.models.layer_stack import scans_layers, stack_layers
from entropic_jax.state import RUNNING, State, Trace


@once
def model(seed: int = 0, **changes: Any) -> models.Model:
    """A Llama of two layers; sharp enough that its entropy varies. Stacked with `ENTROPIC_LAYERS=scanned`."""
    sizes: dict[str, Any] = dict(
        architecture="LlamaForCausalLM",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = models.initialise(models.Config(**{**sizes, **changes}), seed)
    params = dict(model.params)
    params["lm_head"] = jax.tree.map(lambda x: 3 * x, params["lm_head"])
    model = models.Model(model.config, params)
    return stack_layers(model) if scans_layers() else model


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 96, n).tolist() for n in lengths]


def begin(
    texts: list[list[int]], *, page_size: int = 8, context: int = 128, controller=None, **options: Any
) -> State:
    """A started state; options of neither `start` nor `allocate` are sampling parameters."""
    m = model()
    elsewhere = {k: options.pop(k) for k in ("max_tokens", "seeds", "stop") if k in options}
    pool = allocate(
        m.decoder.shape, len(texts), context, page_size=page_size, pages=options.pop("pages", None)
    )
    return start(
        m.decoder,
        m.params,
        chain() if controller is None else controller,
        pool,
        texts,
        key=jax.random.key(7),
        sample=parameters(len(texts), **options),
        **{"max_tokens": 20, **elsewhere},
    )


def finish(
    state: State, steps: int = 64, controller=None, capacity: int = 64
) -> tuple[list[list[int]], State, list[Trace]]:
    """Run until every row ends or stalls, `steps` a launch; the tokens of each row."""
    m = model()
    traces: list[Trace] = []
    rows = state.token.shape[0]
    out: list[list[int]] = [[] for _ in range(rows)]
    while (np.asarray(state.status) == RUNNING).any():
        state, trace = generate(
            m.decoder,
            m.params,
            chain() if controller is None else controller,
            state,
            steps,
            capacity=capacity,
        )
        trace = jax.device_get(trace)
        traces.append(trace)
        for row in range(rows):
            out[row] += trace.token[trace.emitted[:, row], row].tolist()
        if not trace.emitted.any():
            break
    return out, state, traces
