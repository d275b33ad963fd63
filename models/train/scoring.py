"""Scores of token sequences under an exported model: the loss of each token, and whether it was predicted.

The forward pass of training, without gradients, over batches of windows of a few fixed lengths, so that few
compilations serve all sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from . import forward
from .shape import Shape

LENGTHS = (256, 512, 1024, 1536, 2048, 2560, 3072, 4096, 4608, 6144, 8192)  # windows are padded to one
DEVICE_TOKENS = 8192  # per device and call
CHUNK = 256  # rows of logits at a time; divides every length


Advance = Callable[[int, int], object]  # called with the number of finished windows and of all


class Scores(NamedTuple):
    """Scores of the targets of a window: cost in nats, and whether no token was likelier."""

    nats: np.ndarray  # float32 [time]
    hit: np.ndarray  # bool [time]


def targets(params: forward.Params, tokens: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Cost in nats and hit of every target, both `[batch, time]`.

    Args:
        params: weights.
        tokens: `[batch, time + 1]`.
        shape: the model's shape.
    """
    head = forward.flip(params["embed_tokens"])

    def chunk(pair):
        states, targets = pair
        logits = forward.dot(states, head)
        top = logits.max(-1)
        target_logits = jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
        return top + jnp.log(jnp.exp(logits - top[:, None]).sum(-1)) - target_logits, target_logits >= top

    states, _ = forward.hidden(params, tokens[:, :-1], shape)
    split = (states.reshape(-1, CHUNK, states.shape[-1]), tokens[:, 1:].reshape(-1, CHUNK))
    nats, hit = jax.lax.map(chunk, split)
    return nats.reshape(tokens.shape[0], -1), hit.reshape(tokens.shape[0], -1)


Score = Callable[[Sequence[np.ndarray], Advance], list[Scores]]  # a `Scorer`, or a stand-in


class Scorer:
    """Scores windows of up to 8192 targets, on all devices at once."""

    def __init__(self, params: forward.Params, shape: Shape) -> None:
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        self.devices = mesh.size
        self.params = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
        sharded = jax.shard_map(
            partial(targets, shape=shape),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P("data"), P("data")),
            check_vma=False,
        )
        self.targets = jax.jit(sharded)

    def __call__(
        self, windows: Sequence[np.ndarray], advance: Advance = lambda done, total: None
    ) -> list[Scores]:
        """Scores of the targets `window[1:]` of each window, in the order given."""
        longest = max(map(len, windows)) - 1
        if longest > LENGTHS[-1]:
            raise ValueError(f"windows must have at most {LENGTHS[-1]} targets; got {longest}")
        padded = [next(n for n in LENGTHS if len(w) - 1 <= n) for w in windows]
        done = 0
        results: list[Scores] = [Scores(np.empty(0), np.empty(0))] * len(windows)
        for length in sorted(set(padded), reverse=True):
            chosen = [i for i, n in enumerate(padded) if n == length]
            rows = self.devices * (DEVICE_TOKENS // length)
            for first in range(0, len(chosen), rows):
                batch = chosen[first : first + rows]
                tokens = np.zeros((rows, length + 1), np.int32)
                for row, i in enumerate(batch):
                    tokens[row, : len(windows[i])] = windows[i]
                nats, hit = map(np.asarray, self.targets(self.params, tokens))
                for row, i in enumerate(batch):
                    count = len(windows[i]) - 1
                    results[i] = Scores(nats[row, :count], hit[row, :count])
                done += len(batch)
                advance(done, len(windows))
        return results


def windows(first: int, stop: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Windows `(start, first, stop)` that score each target of `first … stop − 1` exactly once.

    The window is `tokens[start:stop]`, at most `context + 1` tokens; its own `first … stop − 1` are the
    targets it scores. Each sees more than `context / 2` earlier tokens, or all there are.

    Args:
        first: the first target.
        stop: end of the targets.
        context: tokens that a target sees at most.
    """
    while first < stop:
        start = max(0, first - 1 - context // 2)
        end = min(stop, start + context + 1)
        yield start, first, end
        first = end


def sample(
    params: forward.Params,
    shape: Shape,
    prompts: np.ndarray,
    count: int,
    temperature: float,
    top_p: float,
    penalty: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Continuations `[row, count]` of prompts, each token by a dense pass over all before it.

    Args:
        params: weights.
        shape: the model's shape.
        prompts: token ids `[row, time]`.
        count: tokens to generate.
        temperature: the temperature of sampling, above 0.
        top_p: mass of the likeliest tokens that are sampled from, in (0, 1].
        penalty: divides the positive logits of tokens that have occurred, and multiplies the negative ones.
        rng: the random generator of the draws.
    """
    rows, time = prompts.shape
    length = next(n for n in LENGTHS if time + count <= n)
    tokens = np.zeros((rows, length), np.int32)
    tokens[:, :time] = prompts

    @jax.jit
    def logits(params: forward.Params, tokens: jax.Array, position: jax.Array) -> jax.Array:
        states = forward.hidden(params, tokens, shape)[0].reshape(*tokens.shape, -1)
        return states[:, position] @ params["embed_tokens"].T

    for position in range(time, time + count):
        scaled = np.array(logits(params, tokens, position - 1), np.float64) / temperature
        for row in range(rows):
            seen = np.unique(tokens[row, :position])
            scaled[row, seen] *= np.where(scaled[row, seen] > 0, 1 / penalty, penalty)
        p = np.exp(scaled - scaled.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        for row in range(rows):
            order = np.argsort(-p[row])
            before = np.cumsum(p[row][order]) - p[row][order]
            kept = order[before < top_p]
            tokens[row, position] = rng.choice(kept, p=p[row][kept] / p[row][kept].sum())
    return tokens[:, time : time + count]
