"""Families with narrow pages, presets and drafts against transformers: every pair of these choices."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from entropic_jax import allocate, generate, models, parameters, start
from entropic_jax.methods import presets
from entropic_jax.phases import prefill
from tests.marks import keep
from tests.models.family_cases import CASES, SIZES, longrope
from tests.models.oracle import QUICK, random_model
from tests.speculation.test_lossless import corrupted, scripted

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PAGE, STEPS, CONTEXT, WIDTH, CHUNK = 8, 16, 40, 2, 4
LENGTHS = (13, 6, 9)  # of the prompts, more than a page and less
# The mean distance, in nats, of the tokens' surprisal and entropy from those that transformers computes.
TOLERANCE = {"bfloat16": 0.02, "int8": 0.04}
# Two for a family, which differ in everything, so each family meets each choice.
COMBINATIONS = {
    "Llama": (("bfloat16", "full", "drafts"), ("int8", "off", "no drafts")),
    "Llama4": (("int8", "full", "drafts"), ("bfloat16", "off", "no drafts")),  # chunks, experts
    "Gemma2": (("int8", "off", "drafts"), ("bfloat16", "full", "no drafts")),  # windows, caps
    "GptOss": (("int8", "full", "no drafts"), ("bfloat16", "off", "drafts")),  # sinks
    "DeepseekV3": (("bfloat16", "off", "drafts"), ("int8", "full", "no drafts")),  # latent attention
    "Phi3": (("int8", "full", "drafts"), ("bfloat16", "off", "no drafts")),  # longrope
    "Cohere2": (("bfloat16", "full", "drafts"), ("int8", "off", "no drafts")),  # parallel blocks, no rotation
    "Olmo2": (("int8", "off", "drafts"), ("bfloat16", "full", "no drafts")),  # norms after the blocks
    "Qwen3Moe": (("bfloat16", "full", "no drafts"), ("int8", "off", "drafts")),  # experts
    "Glm4": (("int8", "full", "no drafts"), ("bfloat16", "off", "drafts")),  # sandwich norms
}
# Of the other families each has one such pair, by turns.
PAIRS = tuple(COMBINATIONS[family] for family in ("Llama", "Llama4", "Gemma2", "GptOss"))
OTHERS = [family for family in dict.fromkeys(name for name, _ in CASES) if family not in COMBINATIONS]
# All of these texts are beyond the original context, so transformers rotates them alike, read at once or not.
LONGROPE = {**longrope(3), "partial_rotary_factor": 0.75}
CHANGES = {
    "Phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4},
    # Scores of six layers of normalised random heads would be so large that rounding changes most of them.
    "Gemma3": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 64, "sliding_window_pattern": 2},
    # With few of the experts, rounding exchanges one that matters.
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 5, "num_key_value_heads": 1},
}
FAST = ("Llama", "int8", "off", "no drafts")
ALL = [(family, *choices) for family, both in COMBINATIONS.items() for choices in both]
ALL += [(family, *choices) for i, family in enumerate(OTHERS) for choices in PAIRS[i % len(PAIRS)]]
# Unusual families meet one of their two combinations in CI, as does Llama.
SLOW = [(family, *COMBINATIONS[family][0]) for family in ("Llama4", "GptOss")]
EACH = [FAST, *keep((case for case in ALL if case != FAST), *SLOW, marks=pytest.mark.slow)]


@functools.partial(
    jax.jit, static_argnames=("decoder", "capacity", "width"), compiler_options=QUICK, donate_argnames="state"
)
def launch(decoder, params, controller, state, *, capacity, width, speculator):
    """`generate`, compiled in less time."""
    return generate(
        *(decoder, params, controller, state, capacity),
        capacity=capacity,
        width=width,
        speculator=speculator,
    )


def emitted(
    model: models.Model, prompts: list[list[int]], dtype: str, preset: str, speculator: Any = None
) -> tuple[list[list[int]], Any]:
    """The tokens of every row and the trace, with pages of a dtype under a preset."""
    chosen = presets.preset(preset, width=WIDTH)
    pool = allocate(model.decoder.shape, len(prompts), CONTEXT, page_size=PAGE, dtype=dtype)
    state = start(
        *(model.decoder, model.params, chosen.controller, pool, prompts),
        key=jax.random.key(3),
        sample=parameters(len(prompts), temperature=0.8),
        max_tokens=STEPS,
        speculator=speculator,
    )
    _, trace = launch(
        *(model.decoder, model.params, chosen.controller, state),
        capacity=len(prompts) * STEPS,
        width=chosen.width,
        speculator=speculator,
    )
    trace = jax.tree.map(np.asarray, trace)
    return [trace.token[trace.emitted[:, row], row].tolist() for row in range(len(prompts))], trace


def measured(reference: Any, prompt: list[int], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Surprisal and entropy of the tokens after a prompt, by transformers, nats."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    log_p = torch.log_softmax(logits.double(), -1).numpy()
    return -log_p[np.arange(len(tokens)), tokens], -(np.exp(log_p) * log_p).sum(-1)


@pytest.mark.parametrize(("family", "dtype", "preset", "drafts"), EACH)
def test_agrees_with_transformers(family, dtype, preset, drafts, tmp_path, monkeypatch):
    """Drafts change no token, and the last run's measurements are near those of the same text elsewhere.

    Prompts are prefilled in chunks smaller than a page.
    """
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", CHUNK)
    changes = CHANGES.get(family) or next(changes for name, changes in CASES if name == family)
    reference = random_model(family, {**SIZES, **changes}, seed=1)
    reference.save_pretrained(tmp_path)
    model, rng = models.load(tmp_path, progress=False), np.random.default_rng(1)
    prompts = [rng.integers(0, SIZES["vocab_size"], n).tolist() for n in LENGTHS]

    texts, trace = emitted(model, prompts, dtype, preset)
    assert [len(text) for text in texts] == [STEPS] * len(prompts)
    if drafts == "drafts":
        known = [np.resize([*prompt, *text], CONTEXT) for prompt, text in zip(prompts, texts, strict=True)]
        speculator = scripted(corrupted(np.stack(known).astype(np.int32), 0.5))
        drafted, trace = emitted(model, prompts, dtype, preset, speculator)
        assert drafted == texts
        assert trace.from_draft.sum() > 0
    errors = []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        surprisal, entropy = measured(reference, prompt, text)
        valid = trace.emitted[:, row]
        errors += [trace.surprisal[valid, row] - surprisal, trace.entropy[valid, row] - entropy]
    assert 0 < np.abs(errors).mean() < TOLERANCE[dtype], np.abs(errors).mean()


def test_every_family_has_two_cases_that_differ_in_everything():
    assert {f"{family}ForCausalLM" for family, *_ in ALL} == set(models.FAMILIES)
    for family in {case[0] for case in ALL}:
        first, second = (case[1:] for case in ALL if case[0] == family)
        assert all(a != b for a, b in zip(first, second, strict=True))


def test_every_pair_of_choices_has_a_case():
    choices = [{case[place] for case in ALL} for place in range(4)]
    for a in range(4):
        for b in range(a):
            pairs = {(case[a], case[b]) for case in ALL}
            assert pairs == {(x, y) for x in choices[a] for y in choices[b]}
