"""Entropic time and cost against NumPy, manual counts, and XLA's cost analysis of the same step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import entropy, models
from entropic_jax.models.decoder import structure
from entropic_jax.state import ledger
from entropic_jax.state.cache import ModelShape
from entropic_jax.state.ledger import HARDWARE, Hardware

FLAT = Hardware(1e9, 1e9)


def dense_config(**changes) -> models.Config:
    sizes = dict(
        architecture="LlamaForCausalLM",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    return models.Config(**{**sizes, **changes})


def cost(shape: ModelShape, lengths, active=None, hardware=FLAT, **changes) -> ledger.Cost:
    """Cost of a dense step in float32: every page of every active row is read."""
    length = jnp.asarray(lengths, jnp.int32)
    options = dict(
        active=jnp.ones(length.shape, bool) if active is None else jnp.asarray(active),
        positions_read=ledger.dense_positions(shape, length),
        length=length,
        bytes_per_weight=4,
        bytes_per_cache=4,
        hardware=hardware,
    )
    return ledger.step_cost(shape, **{**options, **changes})


# What a model reads.


def test_weights_of_a_dense_model():
    """Queries and output 256², keys and values 256 · 4 · 32 each, three of the block, and the output."""
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
    shape = models.Decoder(dense_config()).shape
    assert (shape.weights, shape.expert_weights, shape.expert_share) == (2 * layer + 256 * 1024, 0, 0.0)
    tied = models.Decoder(dense_config(tie_word_embeddings=True, attention_bias=True)).shape
    assert tied.weights == shape.weights  # the tied table is multiplied too; what is added does not count


def test_weights_of_a_mixture():
    """Of 4 experts a token chooses 2; the router and a layer without experts count in full."""
    config = dense_config(
        architecture="Qwen3MoeForCausalLM",
        num_hidden_layers=3,
        mlp_only_layers=(1,),
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
    )
    attention, block, expert = 2 * 256 * 256 + 2 * 256 * 128, 3 * 256 * 512, 3 * 256 * 96
    shape = models.Decoder(config).shape
    assert shape.weights == 3 * attention + block + 2 * (256 * 4 + 2 * expert) + 256 * 1024
    assert (shape.expert_weights, shape.expert_share) == (2 * 4 * expert, 0.5)
    # One row reads what it multiplies; many read every expert.
    everything = shape.weights + shape.expert_weights // 2
    assert ledger.weights_read(shape) == shape.weights
    np.testing.assert_allclose(ledger.weights_read(shape, 2.0), shape.weights + shape.expert_weights / 4)
    np.testing.assert_allclose(ledger.weights_read(shape, 1e3), everything, rtol=1e-6)
    three = cost(shape, [7, 7, 7])
    np.testing.assert_allclose(
        three.bytes_read.sum() - 3 * 4 * 2 * 32 * 3 * 4 * 7, 4 * ledger.weights_read(shape, 3.0), rtol=1e-6
    )


def test_experts_read_are_the_mean_over_choices():
    """The expectation of `weights_read` against drawn choices."""
    experts, chosen, rows = 8, 2, 5
    draw = np.random.default_rng(0)
    number = [
        len({e for _ in range(rows) for e in draw.choice(experts, chosen, replace=False)})
        for _ in range(2000)
    ]
    shape = ModelShape(
        1, 1, 1, 2, 2, 2, weights=chosen, expert_weights=experts, expert_share=chosen / experts
    )
    np.testing.assert_allclose(ledger.weights_read(shape, float(rows)), np.mean(number), rtol=0.02)


# What a step costs.

SHAPE = ModelShape(layers=3, heads=6, kv_heads=2, head_dim=8, vocabulary=11, hidden=48, weights=1000)


def test_a_step_by_hand():
    actual = cost(SHAPE, [10, 100, 50], active=[True, True, False], bytes_per_weight=2, bytes_per_cache=2)
    read = np.array([10, 100]) * 3 * 2  # positions × layers × KV heads
    np.testing.assert_allclose(actual.flops[:2], 2 * 1000 + 4 * 8 * 3 * read)  # 3 queries per KV head
    np.testing.assert_allclose(actual.bytes_read[:2], 2 * 1000 / 2 + 2 * 8 * 2 * read)
    np.testing.assert_allclose(actual.kv_bytes, 2 * 8 * 2 * 3 * 2 * np.array([10, 100, 50]))
    np.testing.assert_allclose(actual.seconds[:2], np.maximum(actual.flops, actual.bytes_read)[:2] / 1e9)
    assert actual.flops[2] == actual.bytes_read[2] == actual.seconds[2] == 0
    assert not np.any(np.asarray(cost(SHAPE, [4, 4], active=[False, False]).seconds))


def test_pages_left_out_are_not_paid_for():
    dense = cost(SHAPE, [640])
    quarter = cost(SHAPE, [640], positions_read=ledger.dense_positions(SHAPE, jnp.array([160])))
    np.testing.assert_allclose(quarter.bytes_read - 4000, (dense.bytes_read - 4000) / 4)
    np.testing.assert_allclose(quarter.flops - 2000, (dense.flops - 2000) / 4)
    assert quarter.kv_bytes == dense.kv_bytes  # skipped, not evicted


def test_the_roofline_takes_the_slower_side():
    actual = cost(SHAPE, [10], hardware=Hardware(1e6, 1e12))
    np.testing.assert_allclose(actual.seconds, actual.flops / 1e6)
    actual = cost(SHAPE, [10], hardware=Hardware(1e12, 1e6))
    np.testing.assert_allclose(actual.seconds, actual.bytes_read / 1e6)
    for name, chip in HARDWARE.items():  # one row at a time waits for memory on every one of them
        actual = cost(SHAPE, [10], hardware=chip)
        np.testing.assert_allclose(actual.seconds, actual.bytes_read / chip.bandwidth, err_msg=name)


def test_a_shape_without_weights_pays_for_attention_alone():
    actual, complete = cost(SHAPE._replace(weights=0), [10]), cost(SHAPE, [10])
    np.testing.assert_allclose(
        (actual.flops, actual.bytes_read), (complete.flops - 2000, complete.bytes_read - 4000)
    )


@pytest.mark.parametrize(("rows", "context"), [(1, 16), (1, 1024), (4, 256)])
def test_agrees_with_the_compiler(rows, context, monkeypatch):
    """XLA's cost analysis of a dense step, compiled but not run: FLOPs within 3 %, bytes within 10 %.

    Its count has what ours leaves out: norms, rotation, softmax, scores and activations; and all of the
    table in which it looks up a token, so the vocabulary is small. It does not look into kernels.
    """
    monkeypatch.setenv("ENTROPIC_KERNELS", "xla")
    config = dense_config(hidden_size=1024, intermediate_size=2048, head_dim=32, vocab_size=256)
    decoder = models.Decoder(config)
    params = structure(config)[1]

    def attend(query, key, value, cache, /, *, window):
        """Attention over keys and values `[rows, kv_heads, context, head_dim]` that ignores the new ones."""
        keys, values = cache
        grouped = query.reshape(rows, 4, 2, 32)
        share = jax.nn.softmax(jnp.einsum("rkgd,rkcd->rkgc", grouped, keys) * 32**-0.5)
        return jnp.einsum("rkgc,rkcd->rkgd", share, values).reshape(query.shape), (key, value)

    def step(params, tokens, positions, caches):
        hidden, written = decoder.hidden(params, tokens, positions, caches, attend)
        return decoder.logits(params, hidden), written

    ids = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    tile = jax.ShapeDtypeStruct((rows, 4, context, 32), jnp.float32)
    compiled = jax.jit(step).lower(params, ids, ids, ((tile, tile),) * 2).compile()
    counted, ours = compiled.cost_analysis(), cost(decoder.shape, [context] * rows)
    np.testing.assert_allclose(ours.flops.sum(), counted["flops"], rtol=0.03)
    np.testing.assert_allclose(ours.bytes_read.sum(), counted["bytes accessed"], rtol=0.10)


# What was resolved.


def entered(entropies: np.ndarray, active: np.ndarray, spent: ledger.Cost | None = None) -> ledger.Ledger:
    """The ledger after steps `[steps, rows]`."""
    account, last = ledger.new_ledger(entropies.shape[1]), jnp.zeros(entropies.shape[1])
    for value, emits in zip(jnp.asarray(entropies, jnp.float32), jnp.asarray(active), strict=True):
        after = jnp.where(emits, value, last)
        account, last = ledger.add_step(account, last, after, emits, spent), after
    return account


def test_time_and_variation_are_those_of_numpy():
    random = np.random.default_rng(1)
    entropies, active = random.gamma(1, 1, (40, 3)), random.random((40, 3)) < 0.7
    actual = entered(entropies, active)
    for row in range(3):
        h = entropies[active[:, row], row]
        change = np.diff(h)
        np.testing.assert_allclose(actual.steps[row], len(h))
        np.testing.assert_allclose(actual.entropic_time[row], -change[change < 0].sum(), rtol=1e-5)
        np.testing.assert_allclose(actual.variation[row], np.abs(change).sum(), rtol=1e-5)
        np.testing.assert_allclose(actual.entropy[row], h.sum(), rtol=1e-5)
        # τ is half the variation and a boundary term.
        np.testing.assert_allclose(
            actual.entropic_time[row], (actual.variation[row] + h[0] - h[-1]) / 2, rtol=1e-4
        )
    assert not np.any(np.asarray(actual.seconds)) and not np.any(np.asarray(ledger.efficiency(actual)))


def test_costs_are_summed():
    spent = cost(SHAPE, [10, 20])
    actual = entered(np.array([[2.0, 1.0], [0.5, 3.0], [0.0, 2.0]]), np.ones((3, 2), bool), spent)
    np.testing.assert_allclose(actual.flops, 3 * spent.flops)
    np.testing.assert_allclose(actual.bytes_read, 3 * spent.bytes_read)
    np.testing.assert_allclose(actual.seconds, 3 * spent.seconds)
    np.testing.assert_array_equal(actual.kv_bytes, spent.kv_bytes)
    np.testing.assert_allclose(ledger.efficiency(actual), np.array([2.0, 1.0]) / (3 * spent.seconds))


def test_alternating_temperature_makes_time_of_nothing():
    """The distribution is the same at every step, so τ of H₁ stays 0; τ of H_T would grow."""
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((1, 50)) * 3, jnp.float32)
    temperature = np.tile([0.5, 1.5], 50)
    sampled = np.array([float(entropy.at_temperature(logits, t).entropy[0]) for t in temperature])[:, None]
    belief = np.full_like(sampled, float(entropy.entropy_statistics(logits).entropy[0]))
    every = np.ones((100, 1), bool)
    assert entered(belief, every).entropic_time == 0
    gamed = entered(sampled, every)
    swing = sampled[1] - sampled[0]
    np.testing.assert_allclose(gamed.entropic_time, 49 * swing, rtol=1e-4)
    assert gamed.entropic_time > 50  # nats


# What a prompt costs.


@pytest.mark.parametrize(
    ("hardware", "seconds"),
    [
        (Hardware(100.0, 1e12), (2 * 50 * 3 + 4 * 8 * 6 / 3 * (2 * 3 * 6)) / 100),
        (Hardware(1e12, 10.0), (2 * 50 + 2 * 8 * 4 * (2 * 3) * 3) / 10),
    ],
    ids=["bound by arithmetic", "bound by memory"],
)
def test_a_prompt_by_hand(hardware, seconds):
    """Three tokens: weights once each; six pairs of positions in every layer and query head."""
    shape = ModelShape(layers=2, heads=6, kv_heads=3, head_dim=8, vocabulary=4, hidden=48, weights=50)
    actual = ledger.prefill_seconds(shape, 3, bytes_per_weight=2, bytes_per_cache=4, hardware=hardware)
    assert actual == pytest.approx(seconds)


def test_no_prompt_costs_nothing():
    shape = ModelShape(layers=2, heads=6, kv_heads=3, head_dim=8, vocabulary=4, hidden=48, weights=50)
    assert ledger.prefill_seconds(shape, 0, bytes_per_weight=2, bytes_per_cache=4, hardware=FLAT) == 0


def test_rows_are_charged_for_the_experts_that_they_read():
    shape = SHAPE._replace(expert_weights=800, expert_share=0.25)
    lengths, active = [5, 5, 5], [True, True, False]
    charge = lambda *fraction: cost(
        shape, lengths, active, expert_fraction=jnp.array(fraction, jnp.float32) if fraction else None
    )
    plain, every, half, uneven = charge(), charge(1, 1, 1), charge(0.5, 0.5, 0.5), charge(1, 0.25, 1)
    for name in ("flops", "bytes_read", "seconds"):
        np.testing.assert_allclose(getattr(every, name), getattr(plain, name), rtol=1e-6)
    np.testing.assert_allclose((plain.flops - half.flops)[:2], 2 * 0.5 * 0.25 * 800, rtol=1e-5)
    np.testing.assert_allclose(uneven.flops[0] - uneven.flops[1], 2 * 0.75 * 0.25 * 800, rtol=1e-5)
    # Of 800 weights, two rows touch 1 − (1 − 1/4) (1 − 1/16), which they share 4 to 1; 800 others they halve.
    touched, caches = 800 * (1 - 0.75 * (1 - 0.0625)), 2 * 8 * 4 * 3 * 2 * 5
    expected = [4 * (400 + touched * share) + caches for share in (0.8, 0.2)]
    np.testing.assert_allclose(uneven.bytes_read, [*expected, 0], rtol=1e-5)


def test_experts_of_more_weights_than_int32_counts():
    shape = ModelShape(48, 32, 4, 128, 151936, 2048, 3 * 10**9, 29 * 10**9, 8 / 128)
    read = ledger.weights_read(shape, 2.0)
    np.testing.assert_allclose(read, 3e9 + 29e9 * (1 - (1 - 1 / 16) ** 2 - 1 / 16), rtol=1e-6)
    touched = ledger.experts_touched(shape, jnp.array([True]), jnp.array([1.0]))
    np.testing.assert_allclose(touched, 29e9 / 16, rtol=1e-6)
