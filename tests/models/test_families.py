"""Every family against transformers: logits of prefill and decoding, greedy tokens, on the paged KV cache."""

import dataclasses

import jax
import numpy as np
import pytest

from entropic_jax import models
from tests.models.family_cases import CASES, SIZES
from tests.models.oracle import TOLERANCE, generated, greedy, paged_logits, random_model, surprisals

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS = 40
LENGTHS = (13, 6, 9)  # of the prompts, more than a page and less
FAST = {"Llama-0", "Qwen2-0", "Gemma2-0", "Mixtral-0"}  # the other cases are slow only by their number
IDS = [f"{family}-{sum(f == family for f, _ in CASES[:i])}" for i, (family, _) in enumerate(CASES)]
PARAMETERS = [
    pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.slow)
    for name, case in zip(IDS, CASES, strict=True)
]


@pytest.mark.parametrize(("family", "changes"), PARAMETERS)
def test_agrees_with_transformers(family, changes, tmp_path):
    """Logits of one text, and of what is written for transformers and read again."""
    reference = random_model(family, {**SIZES, **changes}, seed=len(changes))
    reference.save_pretrained(tmp_path / "theirs")
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, SIZES["vocab_size"], LENGTHS[0]).tolist()
    tokens, expected = greedy(reference, prompt, STEPS)

    model = models.load(tmp_path / "theirs", progress=False)
    actual = paged_logits(model, tokens[:-1], len(prompt))
    assert np.abs(expected).max() > 0.5, "the oracle's logits say nothing"
    assert np.abs(actual - expected).max() <= TOLERANCE
    np.testing.assert_array_equal(actual[len(prompt) - 1 :].argmax(-1), tokens[len(prompt) :])

    models.save(model, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        read_back = again(input_ids=torch.tensor(tokens[None, : len(prompt)])).logits.numpy()[0]
    assert type(again) is type(reference)
    assert np.abs(read_back - expected[: len(prompt)]).max() <= TOLERANCE
    restored = models.load(tmp_path / "ours", progress=False)
    # Layers that predict further tokens are neither loaded nor saved.
    assert restored.config == dataclasses.replace(model.config, num_nextn_predict_layers=0)
    jax.tree.map(np.testing.assert_array_equal, restored.params, model.params)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in FAST else pytest.mark.exhaustive)
        for name, case in zip(IDS, CASES, strict=True)
        if name.endswith("-0")
    ],
)
def test_generates_as_transformers(family, changes, tmp_path):
    """Ragged rows through `start`, `generate` and `replay`."""
    reference = random_model(family, {**SIZES, **changes}, seed=1)
    reference.save_pretrained(tmp_path)
    rng, rows = np.random.default_rng(1), 1 + len(family) % 3
    prompts = [rng.integers(0, SIZES["vocab_size"], n).tolist() for n in LENGTHS[:rows]]
    expected = [greedy(reference, prompt, STEPS) for prompt in prompts]
    tokens = np.stack([out[len(prompt) :] for prompt, (out, _) in zip(prompts, expected, strict=True)])

    model = models.load(tmp_path, progress=False)
    np.testing.assert_array_equal(generated(model, prompts, STEPS), tokens)
    actual = surprisals(model, prompts, tokens)
    for row, (prompt, (_, logits)) in enumerate(zip(prompts, expected, strict=True)):
        log_p = torch.log_softmax(torch.tensor(logits[len(prompt) - 1 :]), -1).numpy()
        expected_surprisal = -log_p[np.arange(STEPS), tokens[row]]
        np.testing.assert_allclose(actual[row], expected_surprisal, atol=2 * TOLERANCE)


def test_every_family_has_an_oracle():
    tested = {f"{family}ForCausalLM" for family, _ in CASES}
    assert tested == set(models.FAMILIES)
