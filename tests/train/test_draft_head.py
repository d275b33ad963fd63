"""Training a draft head: the cost falls, and what it writes drafts better than a random head."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import draft_head, draft_head_files
from entropic_jax.models.train import draft_head as training
from entropic_jax.models.train import head_forward
from tests.tiny import model

TEXT = """
def add(first, second):
    return first + second


for index in range(10):
    print(add(index, {}))
"""


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.py").write_text("".join(TEXT.format(number * 100 + i) for i in range(8)))
    return folder


def train(*arguments: str) -> draft_head.HeadConfig:
    return training.train(training.parser().parse_args(arguments))


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax
def test_training_raises_the_acceptance_and_goes_on(exported, text, tmp_path, capsys):
    common = ["--model", str(exported), "--text", str(text), "--output", str(tmp_path / "head")]
    common += ["--rows", "2", "--length", "64"]
    untrained = train(*common, "--tokens", "1", "--learning-rate", "0").mean_acceptance
    trained = train(*common, "--tokens", "16000").mean_acceptance
    assert trained > untrained + 0.1
    assert "draft 2: accepted with probability" in capsys.readouterr().out
    model = models.load(exported)
    head, weights = draft_head_files.load(tmp_path / "head", model.decoder)
    assert head.config.mean_acceptance == pytest.approx(trained)
    assert head.window == 64  # positions that it saw in training
    assert head.layer == model.config.num_hidden_layers - 1
    described = json.loads((tmp_path / "head" / "config.json").read_text())
    assert described["model_type"] == "draft_head"
    # The head that was written is the one that went on: its first weights are not those of a new head.
    fresh = draft_head.initialise(head, model.params, 0)
    assert not np.allclose(weights["fc"]["kernel"], fresh["fc"]["kernel"], atol=1e-3)


@pytest.mark.parametrize(
    ("objective", "plain"),
    [
        ("divergence", lambda p, q: (p * jnp.log(p / q)).sum(-1)),
        ("rejection", lambda p, q: 1 - jnp.minimum(p, q).sum(-1)),
    ],
)
def test_costs_of_drafts_have_their_gradients(objective, plain):
    target = model()
    taught, drafted = jax.random.normal(jax.random.key(0), (2, 6, target.decoder.shape.hidden))
    counted = jnp.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    probs = lambda x: jax.nn.softmax(target.decoder.logits(target.params, x))
    expected = lambda x: (plain(probs(taught), probs(x)) * counted).sum()
    cost = lambda x: head_forward.draft_cost(target.decoder, objective, target.params, x, taught, counted)
    assert float(cost(drafted)) == pytest.approx(float(expected(drafted)), rel=1e-4)
    np.testing.assert_allclose(jax.grad(cost)(drafted), jax.grad(expected)(drafted), rtol=1e-3, atol=1e-6)
    assert float(cost(taught)) == pytest.approx(0, abs=1e-5)


def test_a_table_of_acceptance_holds_the_mean_of_each_bin():
    entropy = np.array([0.1, 0.2, 1.0, 2.0, 2.0, 5.0])
    overlap = np.array([1.0, 0.9, 0.5, 0.4, 0.2, 0.1])
    table = training.acceptance_table(entropy, overlap)
    assert table["acceptance"] == pytest.approx((0.95, 0.5, 0.3, 0.1))
    assert table["mean_acceptance"] == pytest.approx(overlap.mean())
    empty = training.acceptance_table(entropy[:1], overlap[:1])
    assert empty["acceptance"] == pytest.approx((0.99,) * 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "7"], r"layer must be in \[0, 1\]; got 7"),
        (["--text", "nowhere"], "nowhere"),
        (["--length", "1000000"], "--text must hold more than 1000000 training tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused(exported, text, tmp_path, arguments, message):
    common = ["--model", str(exported), "--text", str(text), "--output", str(tmp_path / "head")]
    with pytest.raises(ValueError, match=message):
        train(*common, *arguments)
