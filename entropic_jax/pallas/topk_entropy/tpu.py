"""The k most probable tokens and the entropies on a TPU (Pallas Mosaic).

A token's bucket is its index modulo the number of buckets. While blocks of logits stream through VMEM, each
bucket keeps a sorted list of its `DEPTH` largest tokens, which is updated without a branch. All other tokens
are added to the sums, relative to the largest logit so far. Then a bitonic network over the lanes
(`network.py`) merges the lists into the 128 largest tokens, and the remaining ones join the sums. No sum is
computed as a difference.

If a bucket may have held more of the k largest tokens than its list, a second sweep continues each bucket
where its list ended. The result is exact for every input. With logits in no particular order, about one row
in a thousand needs a second sweep.

`project` does the same with products of `hidden` and blocks of `weight`: logits exist in VMEM only.

The kernel compiles for v4, v5e, v5p, v6e and tpu7x and agrees with float64 in the interpreter; it has not run
on hardware. An estimate from counting vector operations, not a measurement: on a v5e a sweep over float32
logits of a large vocabulary takes about as long as reading them from HBM, and the merge as long again.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .network import LANES
from .parts import LARGEST_K, RowPartials, check, distance, finish, weigh
from .reference import TopkEntropy, inverse
from .sweep import DEPTH, Shape, State, kernel

GROUP = 8  # rows in one group: the sublanes of a float32 register
ROUNDS = 8  # rounds over the buckets in one block of logits
WEIGHT_BYTES = 1 << 21  # of the projection's weights in one of the two VMEM buffers
PROJECTED_ROWS = 64  # that share one read of the weights
VMEM_BYTES = 16 << 20  # the compiler's default limit for a kernel


def topk_entropy(
    logits: jax.Array,
    k: int,
    temperature: jax.Array,
    calibration: jax.Array,
    *,
    buckets: int | None = None,
    width: int | None = None,
) -> TopkEntropy:
    """See the package.

    Args:
        buckets: lists per row, a power of two from 128 on; None chooses.
        width: logits of a block, a power of two from 128 on; None chooses.
    """
    check(logits, k)
    rows, vocabulary = logits.shape
    buckets = buckets or _buckets(k)
    width = width or min(ROUNDS, pl.cdiv(vocabulary, buckets)) * buckets
    block = min(rows, GROUP * 4 // logits.dtype.itemsize)  # complete tiles of the logits
    shape = Shape(rows, block, block, vocabulary, k, buckets, width)
    scales = jnp.stack([inverse(calibration), inverse(temperature)], axis=-1)
    return finish(_parts(shape, None, logits, scales), temperature, calibration, vocabulary)


def project(
    hidden: jax.Array,
    weight: jax.Array,
    k: int,
    temperature: jax.Array,
    calibration: jax.Array,
    *,
    buckets: int | None = None,
    width: int | None = None,
) -> TopkEntropy:
    """See the package. Each group of `PROJECTED_ROWS` rows reads the weights once.

    Args:
        buckets, width: as for `topk_entropy`.
    """
    check(weight, k)
    if hidden.dtype != weight.dtype:
        raise NotImplementedError(
            f"hidden and weight must have the same dtype; got {hidden.dtype} and {weight.dtype}"
        )
    rows, vocabulary = hidden.shape[0], weight.shape[1]
    column = hidden.shape[1] * weight.dtype.itemsize
    if column * LANES > WEIGHT_BYTES:
        raise NotImplementedError(f"{LANES} columns of {hidden.shape[1]} exceed {WEIGHT_BYTES} bytes")
    buckets = buckets or _buckets(k)
    if width is None:
        width = LANES
        while 2 * width * column <= WEIGHT_BYTES and width < buckets:
            width *= 2
    padded = pl.cdiv(rows, GROUP) * GROUP
    block = pl.cdiv(padded, pl.cdiv(padded, PROJECTED_ROWS) * GROUP) * GROUP
    # XLA lays weights out by columns if a row does not end with a tile. The kernel then reads them
    # transposed, which avoids a copy on every call.
    transposed = vocabulary % LANES != 0
    shape = Shape(padded, block, GROUP, vocabulary, k, buckets, width, transposed)
    below = lambda x: jnp.pad(x, ((0, padded - rows), (0, 0)))
    scales = below(jnp.stack([inverse(calibration), inverse(temperature)], axis=-1))
    parts = _parts(shape, below(hidden), weight.T if transposed else weight, scales)
    values, indices, highest = (x[:rows] for x in parts[:3])
    parts = RowPartials(values, indices, highest, parts.rest[..., :rows])
    return finish(parts, temperature, calibration, vocabulary)


def _buckets(k: int) -> int:
    # With logits in no particular order, the chance that some bucket holds four of the k largest is k⁴/24
    # over the cube of the number of buckets: about one in a thousand.
    return 1024 if k <= LARGEST_K // 2 else 2048


def _parts(shape: Shape, hidden: jax.Array | None, source: jax.Array, scales: jax.Array) -> RowPartials:
    """Sweep once, then again over the blocks of rows in which a list was too short."""
    blocks = pl.cdiv(shape.rows, shape.block)

    def of_blocks(lost):
        rows = jnp.pad(lost[:, 0], (0, blocks * shape.block - shape.rows))
        return (rows.reshape(blocks, -1).max(-1) > 0).astype(jnp.int32)

    def again(state):
        return _sweep(shape, state, of_blocks(state.overflow), hidden, source, scales)

    state = _sweep(shape, None, jnp.ones(blocks, jnp.int32), hidden, source, scales)
    state = lax.while_loop(lambda state: (state.overflow > 0).any(), again, state)
    # `best` is ascending: the tokens before the k-th belong to the rest.
    behind = jnp.arange(LANES) < LANES - shape.k
    apart = distance(state.best, state.highest)
    sums = [jnp.stack(weigh(apart, scales[:, n : n + 1])) for n in range(2)]
    rest = (state.sums + state.dropped_sums + jnp.where(behind, jnp.stack(sums), 0.0)).sum(-1)
    values, indices = (x[:, ::-1][:, : shape.k] for x in (state.best, state.best_indices))
    return RowPartials(values, indices, state.highest[:, 0], rest)


def _sweep(shape: Shape, before_it: State | None, active, hidden, source, scales) -> State:
    """One pass over the rows' logits; `active` int32 `[blocks of rows]`: 0 leaves the state as it was."""
    rows, block, buckets = shape.rows, shape.block, shape.buckets
    steps = pl.cdiv(shape.vocabulary, shape.width)
    first, projecting = before_it is None, hidden is not None
    lanes = lambda *leading: (*leading, rows, LANES)
    sums = lanes(2, 3)
    shapes = State((rows, buckets), (rows, buckets), lanes(), lanes(), lanes(), sums, lanes(), sums, lanes())
    integers = {"end_rounds", "best_indices"}
    out = [
        jax.ShapeDtypeStruct(sizes, jnp.int32 if name in integers else jnp.float32)
        for name, sizes in shapes._asdict().items()
    ]

    def spec(*sizes):
        leading = (0,) * (len(sizes) - 2)
        return pl.BlockSpec((*sizes[:-2], block, sizes[-1]), lambda row, step, active: (*leading, row, 0))

    states = [spec(*sizes) for sizes in shapes]

    # An inactive block of rows keeps the block index, so that nothing is fetched.
    def step_of(row, step, active):
        return jnp.where(active[row] > 0, step, 0)

    if not projecting:
        inputs = [pl.BlockSpec((block, shape.width), lambda row, *at: (row, step_of(row, *at)))]
    elif shape.transposed:
        inputs = [
            spec(*hidden.shape),
            pl.BlockSpec((shape.width, hidden.shape[1]), lambda *at: (step_of(*at), 0)),
        ]
    else:
        inputs = [
            spec(*hidden.shape),
            pl.BlockSpec((hidden.shape[1], shape.width), lambda *at: (0, step_of(*at))),
        ]
    scratch = [
        pltpu.VMEM((DEPTH, block, buckets), jnp.float32),
        pltpu.VMEM((DEPTH, block, buckets), jnp.int32),
        *([pltpu.VMEM((block, shape.width), jnp.float32)] if projecting else []),
    ]
    operands = [scales, *([hidden] if projecting else []), source, *(before_it or ())]
    return State(
        *pl.pallas_call(
            partial(kernel, shape, first, projecting),
            out_shape=out,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(pl.cdiv(rows, block), steps),
                in_specs=[spec(rows, 2), *inputs, *([] if first else states)],
                out_specs=states,
                scratch_shapes=scratch,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_limit(shape, hidden, source)
            ),
            name="topk_entropy_project" if projecting else "topk_entropy",
        )(active, *operands)
    )


def _limit(shape: Shape, hidden: jax.Array | None, source: jax.Array) -> int | None:
    """The VMEM limit to request if the default may not suffice."""
    lists = 8 * DEPTH * shape.block * shape.buckets
    state = 4 * shape.block * (8 * shape.buckets + 4 * 18 * LANES)  # in and out, two slots each
    merging = 32 * DEPTH * shape.group * shape.buckets  # what the network spills
    if hidden is None:
        reads = 2 * shape.block * shape.width * source.dtype.itemsize
    else:
        reads = 2 * (shape.block + shape.width) * hidden.shape[1] * source.dtype.itemsize
        reads += 4 * shape.block * shape.width
    needed = lists + state + merging + reads
    return needed + (1 << 20) if needed > VMEM_BYTES - (2 << 20) else None
