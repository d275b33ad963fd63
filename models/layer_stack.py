"""Decoder layers that are scanned: stacked weights and pages, and one traced body for all repeats.

For TPUs, a program of 80 unrolled layers takes four times as long to compile as one that scans over them
(`benchmarks.start_up.compilation`). Where the layers of a model repeat
(all of a Llama, six of a Gemma 3, two of a gpt-oss, those with experts behind the dense ones), the weights of
the layers that are alike are stacked, `[repeats, …]` array by array, and a program has one loop over the
repeats. Layers before and behind the repeats are unrolled. On a CPU all layers are: XLA copies what it slices
out of a stack there.

The pages are stacked likewise (`state.layer_stacks`) and carried through the loop, so they are written in
place.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from entropic_jax.mesh.devices import default_device
from entropic_jax.state.layer_stacks import LayerPattern, LayerStacks, replace_layer

LOG = logging.getLogger("entropic_jax.models")
VARIABLE = "ENTROPIC_LAYERS"
SCANNED, UNROLLED = "scanned", "unrolled"
LANES = 128  # of a TPU


def scans_layers(platform: str | None = None) -> bool:
    """Whether programs of engines scan over layers: on TPUs and GPUs.

    The environment variable ENTROPIC_LAYERS, `scanned` or `unrolled`, takes precedence.

    Args:
        platform: "cpu", "tpu" or "gpu"; None for that of the default device.
    """
    chosen = os.environ.get(VARIABLE) or None
    if chosen not in (None, SCANNED, UNROLLED):
        raise ValueError(f"{VARIABLE} must be {SCANNED} or {UNROLLED}; got {chosen!r:.80}")
    if chosen is None:
        return (platform or default_device().platform) != "cpu"
    return chosen == SCANNED


@functools.lru_cache(maxsize=64)
def layer_pattern(layers: tuple[Any, ...]) -> LayerPattern | None:
    """The pattern with the fewest layers to trace; None where no layer repeats.

    Args:
        layers: the specification of every layer, equal for layers that are alike.

    >>> layer_pattern(tuple("dxxxx"))
    LayerPattern(prefix=1, period=1, repeats=4)
    >>> layer_pattern(tuple("wwfwwfww"))
    LayerPattern(prefix=0, period=3, repeats=2)
    """
    total = len(layers)
    best: LayerPattern | None = None
    fewest = total
    for period in range(1, total // 2 + 1):
        # How many layers from each on are like the one a period later.
        alike = [0] * (total + 1)
        for number in reversed(range(total - period)):
            alike[number] = alike[number + 1] + 1 if layers[number] == layers[number + period] else 0
        for prefix in range(total - 2 * period + 1):
            repeats = alike[prefix] // period + 1
            traced = total - period * (repeats - 1)
            if repeats > 1 and traced < fewest:
                best, fewest = LayerPattern(prefix, period, repeats), traced
    return best


def stack_layers(model: Any) -> Any:
    """The model with stacked layers, as engines that scan over layers take it.

    It can then not be saved, quantised or divided. A model in which no layer repeats stays as it is. So does
    one whose layers differ in the shape or dtype of their arrays, and on TPUs one whose experts would be
    copied out of their stack; both are logged.

    Args:
        model: a `model.Model`, consumed: its arrays are moved, one stack at a time.
    """
    decoder = dataclasses.replace(model.decoder, stacked=True)
    if decoder.pattern is None:
        return model
    layers = model.params["layers"]
    if default_device().platform == "tpu" and copied_experts(layers):
        LOG.warning("layers are unrolled, not scanned: neither side of the experts' matrices fills the lanes")
        return model
    if not alike(layers, decoder.pattern):
        LOG.warning("layers are unrolled, not scanned: layers that repeat have arrays of several dtypes")
        return model
    model.params["layers"] = ()
    params = {**model.params, "layers": stack_params(layers, decoder.pattern)}
    return dataclasses.replace(model, params=params, stacked=True)


def copied_experts(layers: Sequence[Any], divisor: int = 1) -> bool:
    """Whether experts have matrices that XLA for TPUs copies out of a stack, all layers' in every step.

    It may store a stack with the matrices along the lanes if neither their rows nor their columns fill these.

    Args:
        layers: the parameters of every layer, or their shapes.
        divisor: devices that divide the width of each expert, if these are shapes of all devices.
    """
    for layer in layers:
        if (experts := layer.get("mlp", {}).get("experts")) is not None:
            hidden, inner = on_device(experts["gate_proj"]["kernel"])[-2:]
            if hidden % LANES and inner // divisor % LANES:
                return True
    return False


def on_device(x: Any) -> tuple[int, ...]:
    """The shape of what a device has of an array."""
    sharding = getattr(x, "sharding", None)
    return x.shape if sharding is None else sharding.shard_shape(x.shape)


def traced_layers(layers: Sequence[Any], pattern: LayerPattern | None) -> list[Any]:
    """One of the layers for each array of weights: those that are unrolled, and those of the first repeat.

    Args:
        layers: something of every layer.
        pattern: the pattern of the layers; None for all of them.
    """
    if pattern is None:
        return list(layers)
    return [*layers[: pattern.prefix + pattern.period], *layers[pattern.end :]]


def stack_params(layers: tuple[Any, ...], pattern: LayerPattern) -> tuple[Any, ...]:
    """The parameters of the layers with those of the repeats stacked, one array at a time.

    Args:
        layers: the parameters of every layer; dicts that are emptied, so that no array is kept twice.
        pattern: the pattern of the layers.
    """
    starts = [range(pattern.prefix + i, pattern.end, pattern.period) for i in range(pattern.period)]
    stacked = [_stack([layers[number] for number in numbers]) for numbers in starts]
    return (*layers[: pattern.prefix], *stacked, *layers[pattern.end :])


def alike(layers: tuple[Any, ...], pattern: LayerPattern) -> bool:
    """Whether layers that repeat have arrays of the same shapes and dtypes.

    Args:
        layers: the parameters of every layer.
        pattern: the pattern of the layers.
    """
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype.name), layer) for layer in layers]
    repeated = range(pattern.prefix + pattern.period, pattern.end)
    return all(kinds[number] == kinds[number - pattern.period] for number in repeated)


def _stack(parts: list[Any]) -> Any:
    """Dicts of arrays as one dict of stacked arrays; each array is dropped once it is stacked."""
    if not isinstance(parts[0], dict):
        return stack_arrays(parts)
    return {name: _stack([part.pop(name) for part in parts]) for name in list(parts[0])}


def stack_arrays(parts: list[jax.Array]) -> jax.Array:
    """Arrays as one, `[repeats, …]`, divided over the devices as each of them is."""
    sharding = parts[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.jit(_stacked, out_shardings=sharding)(*parts)


def _stacked(*parts: jax.Array) -> jax.Array:
    return jnp.stack(parts)


def run_layers(
    modules: Sequence[Any],
    pattern: LayerPattern,
    x: jax.Array,
    context: Any,
    caches: Any,
    attend: Any,
) -> tuple[jax.Array, Any]:
    """The residual stream after all layers, and their caches as written.

    Layers whose attention does not say that it can run in a loop are unrolled, over the same stacks.

    Args:
        modules: the layers that are traced (`traced_layers`), with stacked arrays where they repeat.
        pattern: the pattern of the layers.
        x: the residual stream before them, `[rows, n, hidden]`.
        context: positions of the tokens, which layers share.
        caches: one cache per layer: `LayerStacks`, or a tuple.
        attend: attention and cache update; runs in a loop if it is a `LoopedAttention`.
    """
    begin, end = pattern.prefix, pattern.prefix + pattern.period
    layers = pattern.period * pattern.repeats + len(modules) - pattern.period
    places = pattern.places(layers)
    if len(caches) != layers or getattr(caches, "places", places) != places:
        raise ValueError(f"caches must be of {layers} layers, stacked as the weights; got other layers")
    scanned = [nnx.split(module) for module in modules[begin:end]]

    def run(module: Any, number: int, x: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        x, written = module(x, context, caches[number], attend)
        return x, replace_layer(caches, number, written)

    for number in range(begin):
        x, caches = run(modules[number], number, x, caches)
    for first, last in segments(pattern, caches, attend):
        if last - first > 1:
            x, caches = _scan(scanned, pattern, (first, last), x, context, caches, attend)
            continue
        for position, layer in enumerate(scanned):
            module = layer_of(layer, first, pattern.repeats)
            x, caches = run(module, begin + first * pattern.period + position, x, caches)
    for number in range(pattern.end, layers):
        x, caches = run(modules[number - layers], number, x, caches)
    return x, caches


def layer_of(stacked: tuple[Any, Any], repeat: jax.Array | int, repeats: int) -> Any:
    """The module of a layer, with its arrays out of the stacks.

    Matrices of experts stay in their stack, `[repeats · experts, in, out]`, where a grouped product reads
    those that are chosen: what is taken out of a stack is copied.

    Args:
        stacked: structure and stacked arrays of the layer.
        repeat: the number of the repeat of the layer.
        repeats: how many there are.
    """

    def taken(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        if "experts" in names and "bias" not in names:
            return x.reshape(-1, *x.shape[2:])
        return x[repeat] if isinstance(repeat, int) else jax.lax.dynamic_index_in_dim(x, repeat, 0, False)

    graph, arrays = stacked
    module = nnx.merge(graph, jax.tree_util.tree_map_with_path(taken, arrays))
    experts = getattr(module.mlp, "experts", None)
    if experts is not None:
        experts.repeat, experts.repeats = repeat, repeats
    return module


def outside_loops(attend: Any) -> Any:
    """The same attention, of layers that are traced one by one."""
    return functools.partial(attend)


def segments(pattern: LayerPattern, caches: Any, attend: Any) -> Iterator[tuple[int, int]]:
    """Ranges of repeats that one traced body serves; those of one repeat are unrolled.

    Args:
        pattern: the pattern of the layers.
        caches: their caches, of which only `LayerStacks` are carried through a loop.
        attend: their attention.
    """
    kinds_of = getattr(attend, "kinds", None)
    if kinds_of is None or not isinstance(caches, LayerStacks):
        yield from ((repeat, repeat + 1) for repeat in range(pattern.repeats))
        return
    period = range(pattern.period)
    kinds = [kinds_of([repeat * pattern.period + i for i in period]) for repeat in range(pattern.repeats)]
    first = 0
    for repeat in range(1, pattern.repeats + 1):
        if repeat == pattern.repeats or kinds[repeat] is None or kinds[repeat] != kinds[first]:
            yield first, repeat
            first = repeat


def _scan(
    scanned: list[tuple[Any, Any]],
    pattern: LayerPattern,
    repeats: tuple[int, int],
    x: jax.Array,
    context: Any,
    caches: LayerStacks,
    attend: Any,
) -> tuple[jax.Array, LayerStacks]:
    """Runs some of the repeats in a loop.

    Args:
        scanned: structure and stacked arrays of each layer of a period.
        pattern: the pattern of the layers.
        repeats: the first repeat, and the end of them.
        x: the residual stream.
        context: positions of the tokens.
        caches: the caches of all layers.
        attend: a `LoopedAttention`.
    """
    begin, end = pattern.prefix, pattern.prefix + pattern.period
    begun = attend.begin()

    def body(carry: Any, repeat: jax.Array) -> Any:
        (x, pools), written = carry, []
        for layer, pool in zip(scanned, pools, strict=True):
            cache = pool.in_stack(repeat, pattern.repeats)
            x, cache = layer_of(layer, repeat, pattern.repeats)(x, context, cache, attend)
            written.append(cache._replace(first_page=None))
        return (x, tuple(written)), attend.take(begun)

    numbers = jnp.arange(*repeats, dtype=jnp.int32)
    (x, pools), recorded = jax.lax.scan(body, (x, caches.pools[begin:end]), numbers)
    attend.put(recorded, len(numbers))
    return x, LayerStacks((*caches.pools[:begin], *pools, *caches.pools[end:]), caches.places)
