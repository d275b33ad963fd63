"""Training of a mixture of experts: gates, balance, and how many experts a token is trained with."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from entropic_jax.models.train import experts, export, forward
from entropic_jax.models.train.trainer import Trainer, initialise, optimiser
from tests.train.model import SPARSE, TINY

EXPERTS = SPARSE.num_local_experts


def test_a_token_has_as_many_experts_as_its_count():
    probability = jax.nn.softmax(jax.random.normal(jax.random.key(0), (6, EXPERTS)))
    counts = jnp.array([1, 2, 3, 1, 2, 3])
    weight, _ = experts.gates(probability, 3, counts)
    assert (weight > 0).sum(1).tolist() == counts.tolist()
    np.testing.assert_allclose(weight.sum(1), 1, rtol=1e-6)
    assert weight.argmax(1).tolist() == probability.argmax(1).tolist()
    every, _ = experts.gates(probability, 3)
    np.testing.assert_allclose(weight[2::3], every[2::3], rtol=1e-6)


def test_the_balance_is_one_where_experts_are_used_evenly_and_more_elsewhere():
    logits = 3 * jnp.eye(EXPERTS)
    even, uneven = (experts.gates(jax.nn.softmax(x), 1)[1] for x in (logits, logits.at[:, 0].set(9.0)))
    assert float(even) == pytest.approx(1, rel=1e-6)
    assert float(uneven) > 4


def test_counts_are_drawn_evenly_and_again_for_the_same_tokens():
    tokens = jnp.arange(900).reshape(3, 300)
    counts = experts.drawn_counts(tokens, SPARSE)
    assert counts is not None and counts.shape == (2, 900)
    assert np.unique(counts).tolist() == [1, 2, 3]
    assert np.bincount(np.ravel(counts))[1:].min() > 500
    assert (counts[0] != counts[1]).any()
    np.testing.assert_array_equal(counts, experts.drawn_counts(tokens, SPARSE))
    assert experts.drawn_counts(tokens, TINY) is None


@pytest.mark.standard_promotion
def test_an_expert_that_is_not_counted_changes_nothing(params_with_experts: dict[str, Any]):
    layer = params_with_experts["layers"][0]
    y = jax.random.normal(jax.random.key(1), (4, SPARSE.hidden_size))
    best = jnp.argmax(y @ layer["router"], -1)
    out, _ = forward.feed_forward(layer, y, SPARSE, jnp.ones(4, jnp.int32))
    for token, expert in enumerate(best.tolist()):
        gate, up, down = (layer[name][expert] for name in ("gate_proj", "up_proj", "down_proj"))
        alone = (jax.nn.silu(y[token] @ gate) * (y[token] @ up)) @ down
        np.testing.assert_allclose(out[token], alone, rtol=0.05, atol=0.05 * float(jnp.abs(alone).max()))


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_the_loss_falls_and_every_expert_learns(rule: str, tmp_path: Path):
    start = initialise(SPARSE, 0)
    trainer = Trainer(tmp_path, SPARSE, optimiser(rule, optax.constant_schedule(0.02)), start, keep=1000)
    rng = np.random.default_rng(0)
    windows = rng.integers(2, 20, (2 * trainer.mesh.size, 17)).astype(np.int32)
    weights = np.ones((len(windows), 16), np.float32)
    losses = [trainer.update(windows, weights, 2, 0.3)[0] for _ in range(12)]
    assert losses[-1] < losses[0] - 1
    changed = np.asarray(trainer.params["layers"]["down_proj"])
    assert changed.shape == (2, EXPERTS, SPARSE.intermediate_size, SPARSE.hidden_size)
    assert (np.abs(changed).max((2, 3)) > 0).all()


def test_reading_an_export_gives_the_experts_back(
    exported_experts: Path, params_with_experts: dict[str, Any]
):
    again, shape, _ = export.read(exported_experts)
    assert shape == SPARSE
    jax.tree.map(np.testing.assert_array_equal, again, params_with_experts)


def test_the_config_of_a_dense_model_does_not_name_experts(exported: Path, exported_experts: Path):
    dense, sparse = (json.loads((path / "config.json").read_text()) for path in (exported, exported_experts))
    assert dense["architectures"] == ["LlamaForCausalLM"] and "num_local_experts" not in dense
    assert sparse["architectures"] == ["MixtralForCausalLM"] and sparse["num_experts_per_tok"] == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.standard_promotion
def test_transformers_computes_the_same_logits(exported_experts: Path, params_with_experts: dict[str, Any]):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported_experts, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(2, SPARSE.vocab_size, (1, 64))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits[0].numpy()
    hidden, _ = forward.hidden(params_with_experts, jnp.asarray(tokens, jnp.int32), SPARSE)
    logits = np.asarray(hidden) @ params_with_experts["embed_tokens"].T
    # With products of bfloat16, a router that is nearly undecided chooses other experts for a token.
    tolerance, most_rerouted = (1e-4, 0) if jnp.float32 == forward.PRODUCT_DTYPE else (0.1, 2)
    errors = np.abs(logits - expected).max(1) / float(np.abs(expected).max())
    assert (errors > tolerance).sum() <= most_rerouted, errors
