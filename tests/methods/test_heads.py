"""Attention-head entropies: measured as the sparse prefill measures them, and plotted."""

import numpy as np
import pytest

from entropic_jax.methods.entropy_prefill import EntropyPrefill
from entropic_jax.methods.heads import HeadProfile, profile_heads, rigid_threshold
from tests import tiny


def test_heads_are_measured_per_layer_and_segment():
    model, policy = tiny.model(), EntropyPrefill(segment=16, page_size=4, rigid_below=0.5)
    profile = profile_heads(model.decoder, model.params, tiny.prompts(70)[0], policy)
    assert profile.entropy.shape == (2, 2, 5)
    assert np.isnan(profile.entropy[..., 0]).all()
    known = profile.entropy[..., 1:]
    assert ((known > 0) & (known <= 1.0001)).all()
    assert (profile.rigid == (known.max(-1) < 0.5)).all()
    shorter = profile_heads(model.decoder, model.params, tiny.prompts(70)[0][:40], policy)
    np.testing.assert_allclose(shorter.entropy[..., 1], profile.entropy[..., 1], atol=1e-4)
    with pytest.raises(ValueError, match="tokens must have more than 16 entries, a segment; got 16"):
        profile_heads(model.decoder, model.params, list(range(16)), policy)


@pytest.mark.slow
def test_what_the_base_budget_leaves_unread():
    model, tokens = tiny.model(), tiny.prompts(70)[0]
    profile = {
        base: profile_heads(
            model.decoder,
            model.params,
            tokens,
            EntropyPrefill(segment=16, page_size=4, base=base),
            unread=True,
        )
        for base in (0, 16, 64)
    }
    plain = profile_heads(model.decoder, model.params, tokens, EntropyPrefill(segment=16, page_size=4))
    np.testing.assert_allclose(profile[16].entropy, plain.entropy, atol=1e-6)
    none, partial, all_ = (np.nan_to_num(profile[base].unread) for base in (0, 16, 64))
    assert (all_ == 0).all() and (partial <= none).all() and partial.sum() < none.sum() and (none <= 1).all()
    # In the second segment, 16 queries attend to 16 earlier positions and to themselves.
    assert (none[..., 1] > 0.1).all()


def test_the_threshold_parts_the_heads_that_need_more():
    rng = np.random.default_rng(0)
    entropy = rng.random((4, 3, 1))
    unread = np.where(entropy < 0.37, 0.001, 0.2)
    profile = HeadProfile(entropy, entropy[..., 0] > 9, unread)
    threshold = rigid_threshold(profile, 0.01)
    rigid = entropy[..., 0] < threshold
    assert unread[rigid].mean() <= 0.01
    closest = np.where(rigid, 9, entropy[..., 0]).argmin()  # one head more would be too many
    assert np.append(unread[rigid], unread.reshape(-1)[closest]).mean() > 0.01
    assert rigid_threshold(profile, 1.0) == 1.0
    with pytest.raises(ValueError, match=r"profile\.unread must be measured"):
        rigid_threshold(HeadProfile(entropy, rigid))


def test_the_picture_marks_every_head(tmp_path):
    pytest.importorskip("matplotlib")
    from entropic_jax.serving.commands.heads import draw

    entropy = np.random.default_rng(0).random((3, 2, 9))
    entropy[..., 0] = np.nan
    rigid = np.array([[True, False], [False, False], [True, True]])
    figure = draw(HeadProfile(entropy, rigid), 512, tmp_path / "heads.svg", "a model")
    labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert labels == {"rigid (3)", "dynamic (3)"}
    assert "segment of 512 tokens" in (tmp_path / "heads.svg").read_text()
