"""Random models of transformers as an oracle, and ours, on the paged KV cache."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import allocate, chain, generate, models, parameters, replay, start
from entropic_jax.attention.attend import TokenSpan, attend_to
from entropic_jax.state import cache

PAGE, TOLERANCE = 8, 2e-4
# Of XLA's CPU backend: the programs are tiny and run once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def random_model(family: str, settings: dict[str, Any], seed: int) -> Any:
    """A model of transformers with random weights.

    Args:
        family: its name in transformers, without "Config" or "ForCausalLM".
        settings: of its configuration.
        seed: of its weights.
    """
    import transformers

    names = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}
    config = getattr(transformers, f"{names.get(family, family)}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    random_weights(model, seed)
    return model


def random_weights(model: Any, seed: int) -> None:
    """Gives a model of transformers weights that are large enough for attention and experts to matter.

    Args:
        model: whose weights become others.
        seed: of its weights.
    """
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("inv_freq", "embed_scale", ".beta", ".eps", "position_ids")):
                continue
            # Norms that add one to their weight, or not, are both near one or two.
            weight.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)


def greedy(model: Any, prompt: list[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of greedy decoding `[n + steps]`, and the logits at every position but the last.

    Args:
        model: of transformers.
        prompt: token ids, n of them.
        steps: tokens to decode.
    """
    import torch

    state, tokens, seen = None, torch.tensor([prompt]), []
    fed = tokens
    with torch.no_grad():
        for _ in range(steps):
            out = model(input_ids=fed, past_key_values=state, use_cache=True)
            state, fed = out.past_key_values, out.logits[:, -1:].argmax(-1)
            seen.append(out.logits)
            tokens = torch.cat([tokens, fed], dim=1)
    return tokens[0].numpy(), torch.cat(seen, dim=1)[0].float().numpy()


@partial(jax.jit, static_argnums=(0, 4), compiler_options=QUICK)
def _passes(decoder: Any, params: Any, pool: Any, tokens: jax.Array, prompt: int) -> jax.Array:
    """Logits of the first `prompt` tokens in one pass, and of the others one by one."""

    def forward(pool, tokens, start, lengths=None):
        n = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        attend = attend_to(pool, TokenSpan(start, n))
        hidden, layers = decoder.hidden(params, tokens, positions, pool.layers, attend, lengths)
        return decoder.logits(params, hidden), pool._replace(layers=layers)

    def advance(carry, token):
        pool, position = carry
        logits, pool = forward(pool, token[:, None], position)
        return (pool, position + 1), logits[:, 0]

    zero = jnp.zeros(tokens.shape[0], jnp.int32)
    total = jnp.full((tokens.shape[0], prompt), prompt, jnp.int32)
    first, pool = forward(pool, tokens[:, :prompt], zero, total)
    _, later = jax.lax.scan(advance, (pool, zero + prompt), tokens[:, prompt:].T)
    return jnp.concatenate([first, later.swapaxes(0, 1)], 1)


def paged_logits(model: models.Model, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Logits at every position of one text on the paged cache.

    Args:
        model: ours.
        tokens: `[n]`.
        prompt: how many of them are read in one pass.
    """
    pool = allocate(model.decoder.shape, 1, len(tokens), page_size=PAGE)
    pool, _ = cache.grant(pool, jnp.full(1, len(tokens), jnp.int32))
    return np.asarray(_passes(model.decoder, model.params, pool, tokens[None].astype(np.int32), prompt))[0]


def begin(model: models.Model, prompts: list[list[int]], steps: int, dtype: str = "float32") -> Any:
    """The loop's state before the first step of greedy decoding.

    Args:
        model: ours.
        prompts: a row each.
        steps: to decode at most.
        dtype: of the cache.
    """
    context = max(map(len, prompts)) + steps + 1
    pool = allocate(model.decoder.shape, len(prompts), context, page_size=PAGE, dtype=dtype)
    sample = parameters(len(prompts), temperature=0.0)
    key, decoder = jax.random.key(0), model.decoder
    return start(decoder, model.params, chain(), pool, prompts, key=key, max_tokens=steps, sample=sample)


def generated(model: models.Model, prompts: list[list[int]], steps: int) -> np.ndarray:
    """Greedy tokens by `start` and `generate`, `[rows, steps]`.

    Args:
        model: ours.
        prompts: a row each.
        steps: to decode.
    """
    state = begin(model, prompts, steps)
    _, trace = generate(model.decoder, model.params, chain(), state, steps, capacity=steps)
    return np.asarray(trace.token).T


def surprisals(model: models.Model, prompts: list[list[int]], tokens: np.ndarray) -> np.ndarray:
    """−ln p of the given tokens `[rows, steps]` by `start` and `replay`, nats.

    Args:
        model: ours.
        prompts: a row each.
        tokens: that follow them.
    """
    state = begin(model, prompts, tokens.shape[1])
    forced = jnp.asarray(tokens, jnp.int32)
    _, trace = jax.jit(replay, static_argnums=0)(model.decoder, model.params, chain(), state, forced)
    return np.asarray(trace.surprisal).T
