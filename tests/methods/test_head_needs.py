"""Head needs: measured on text against plain NumPy, and checked field by field when they are loaded."""

import json

import numpy as np
import pytest

from entropic_jax.methods.head_needs import FILE, HeadNeeds, load_head_needs, save_head_needs
from entropic_jax.methods.need_calibration import (
    PAGE,
    RankedProfile,
    head_needs,
    needs_of,
    ranked_profile,
    ranked_profiles,
)
from tests import tiny

NEEDS = HeadNeeds(2, 4, 2, 8, 32, 96, 64, 32, 16, 512, 1, ((16.0, 48.0), (160.5, 16.0)))


def test_a_table_is_read_back_as_it_was_written(tmp_path):
    save_head_needs(NEEDS, tmp_path)
    assert load_head_needs(tmp_path) == load_head_needs(tmp_path / FILE) == NEEDS
    with pytest.raises(FileNotFoundError, match=r"none\.json does not exist"):
        load_head_needs(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1; got 2"),
        ({"layers": 0}, "layers must be an integer of at least 1; got 0"),
        ({"budget": 2.5}, "budget must be an integer of at least 1; got 2.5"),
        ({"segment": True}, "segment must be an integer of at least 1; got True"),
        ({"dense_layers": 2}, "dense_layers must be below layers = 2; got 2"),
        ({"need": [[1, 2]]}, "need must be a list of 2 lists of 2 numbers"),
        ({"need": [[1, 2], [3]]}, "need must be a list of 2 lists of 2 numbers"),
        ({"need": [[1, 2], [3, 0]]}, r"need\[1\]\[1\] must be a number above 0 and below 2³¹; got 0"),
        ({"need": [[1, float("nan")], [3, 4]]}, r"need\[0\]\[1\] must be a number above 0"),
        ({"need": [[1, 2], [float("inf"), 4]]}, r"need\[1\]\[0\] must be a number above 0"),
        ({"need": [[1, 2], ["3", 4]]}, r"need\[1\]\[0\] must be a number above 0 and below 2³¹; got '3'"),
        ({"heed": 1}, "heed is unknown"),
        ({"tokens": None}, "tokens is missing"),
    ],
)
def test_an_error_names_the_file_and_the_field(tmp_path, change, message):
    save_head_needs(NEEDS, file := tmp_path / "needs.json")
    tree = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in tree.items() if value is not None}))
    with pytest.raises(ValueError, match=message) as caught:
        load_head_needs(file)
    assert str(file) in str(caught.value)


def test_what_is_not_a_table_is_refused(tmp_path):
    for text, message in (("[" * 20_000, "readable JSON"), ("{", "readable JSON"), ("[]", "a JSON object")):
        (file := tmp_path / "needs.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_head_needs(file)


def test_a_table_of_another_model_is_refused():
    shape = tiny.model().decoder.shape
    NEEDS.check_model(shape)
    with pytest.raises(ValueError, match="another model: hidden must be 32, as the model has; got 64"):
        NEEDS._replace(hidden=64).check_model(shape)


def test_needs_are_the_pages_of_most_attention_of_all_heads_together():
    rng = np.random.default_rng(0)
    mass = np.sort(rng.random((3, 2, 12)), -1)[..., ::-1]  # [layers, kv_heads, pages]
    needs = needs_of([RankedProfile(np.zeros((1, 3, 2)), mass[None])], 5 * PAGE, dense_layers=1)
    best = np.sort(mass[1:].reshape(-1))[::-1][: 5 * 4]
    np.testing.assert_array_equal(needs, [[(head >= best[-1]).sum() * PAGE for head in row] for row in mass])
    assert needs[1:].sum() == 4 * 5 * PAGE


def test_no_head_needs_nothing_and_a_budget_beyond_all_pages_is_met():
    mass = np.zeros((1, 2, 1, 4))
    mass[0, 1, 0] = [0.4, 0.3, 0.2, 0.0]
    profile = RankedProfile(np.zeros((1, 2, 1)), mass)
    assert needs_of([profile], 1000 * PAGE).tolist() == [[PAGE], [3 * PAGE]]


def test_a_model_is_calibrated_the_same_each_time():
    model = tiny.model()
    (tokens,) = tiny.prompts(200)
    shape = model.decoder.shape
    calibrated = [
        head_needs(shape, ranked_profiles(model.decoder, model.params, tokens, 32, 96), 32, 32)
        for _ in range(2)
    ]
    assert calibrated[0] == calibrated[1]
    needs = calibrated[0]
    needs.check_model(shape)
    assert (needs.tokens, needs.dense_layers, np.shape(needs.need)) == (192, 1, (2, 2))
    profiles = [ranked_profile(model.decoder, model.params, tokens[at : at + 96], 32) for at in (0, 96)]
    np.testing.assert_array_equal(needs.need, needs_of(profiles, 32, 1))


def test_a_profile_holds_the_attention_to_earlier_pages():
    model = tiny.model()
    (tokens,) = tiny.prompts(100)
    entropy, mass = ranked_profile(model.decoder, model.params, tokens, 32)
    assert entropy.shape == (2, 2, 2) and mass.shape[:3] == (2, 2, 2)
    assert ((mass >= 0) & (mass < 1)).all() and (mass[..., 4:] == 0).all()  # 64 earlier tokens are 4 pages
    assert (mass[0, ..., :2].sum(-1) > 0.1).all() and (mass.sum(-1) < 1).all()
    with pytest.raises(ValueError, match="tokens must have at least 64 entries, two segments; got 63"):
        ranked_profile(model.decoder, model.params, tokens[:63], 32)


def test_a_model_with_sliding_windows_is_refused():
    model = tiny.model(sliding_window=32, architecture="MistralForCausalLM")
    with pytest.raises(ValueError, match="without sliding windows"):
        ranked_profile(model.decoder, model.params, tiny.prompts(100)[0], 32)
