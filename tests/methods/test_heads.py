"""The entropy of heads: measured as the method does, and drawn."""

import numpy as np
import pytest

from entropic_jax.methods.entropy_prefill import EntropyPrefill
from entropic_jax.methods.heads import Heads, measure
from tests import tiny


def test_heads_are_measured_per_layer_and_segment():
    model, policy = tiny.model(), EntropyPrefill(segment=16, page_size=4, rigid_below=0.5)
    found = measure(model.decoder, model.params, tiny.prompts(70)[0], policy)
    assert found.entropy.shape == (2, 2, 5)
    assert np.isnan(found.entropy[..., 0]).all()
    known = found.entropy[..., 1:]
    assert ((known > 0) & (known <= 1.0001)).all()
    assert (found.rigid == (known.max(-1) < 0.5)).all()
    shorter = measure(model.decoder, model.params, tiny.prompts(70)[0][:40], policy)
    np.testing.assert_allclose(shorter.entropy[..., 1], found.entropy[..., 1], atol=1e-4)
    with pytest.raises(ValueError, match="tokens has 16; accepted are more than 16"):
        measure(model.decoder, model.params, list(range(16)), policy)


def test_the_picture_marks_every_head(tmp_path):
    pytest.importorskip("matplotlib")
    from serving.commands.heads import draw

    entropy = np.random.default_rng(0).random((3, 2, 9))
    entropy[..., 0] = np.nan
    rigid = np.array([[True, False], [False, False], [True, True]])
    figure = draw(Heads(entropy, rigid), 512, tmp_path / "heads.svg", "a model")
    labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert labels == {"rigid (3)", "dynamic (3)"}
    assert "segment of 512 tokens" in (tmp_path / "heads.svg").read_text()
