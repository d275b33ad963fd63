"""Every family against transformers: logits of prefill and of decoding, and greedy tokens."""

from pathlib import Path

import jax
import numpy as np
import pytest

from entropic_jax import models
from tests.models.dense import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4
ROWS, PROMPT, STEPS = 2, 12, 32
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = {"sliding_window": 7, "use_sliding_window": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 8}

CASES = [
    ("Llama", {"num_key_value_heads": 4}),
    ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, "head_dim": 16}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}),
    ("Mistral", {"num_key_value_heads": 4, "sliding_window": None, "head_dim": 12}),
    ("Mistral", {"sliding_window": 5, "tie_word_embeddings": True}),
    ("Mistral", {"num_key_value_heads": 1, "sliding_window": 40}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen2", {"num_key_value_heads": 1, **WINDOW, "max_window_layers": 1}),
    ("Qwen2", {"num_key_value_heads": 4, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("Qwen3", {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True}),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 10, **WINDOW, "max_window_layers": 1}),
    ("Mixtral", {"num_local_experts": 4}),
    ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 6}),
    ("Mixtral", {"num_key_value_heads": 1, "num_local_experts": 8, "tie_word_embeddings": True}),
    ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("Qwen3Moe", {**EXPERTS, **WINDOW, "decoder_sparse_step": 2, "attention_bias": True}),
    ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0], "num_experts_per_tok": 1, "num_key_value_heads": 4}),
]


def oracle(family: str, changes: dict, seed: int):
    """A random model of transformers whose weights are large enough for attention and experts to matter."""
    settings = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    settings._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


@torch.no_grad()
def greedy(model, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of greedy decoding, and the logits at every position, prompt included."""
    cache, tokens, seen = None, torch.tensor(prompt), []
    fed = tokens
    for _ in range(STEPS + 1):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True)
        cache, fed = out.past_key_values, out.logits[:, -1:].argmax(-1)
        seen.append(out.logits)
        tokens = torch.cat([tokens, fed], dim=1)
    return tokens.numpy(), torch.cat(seen, dim=1).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_agrees_with_transformers(family, changes, tmp_path: Path):
    """Reading a model of transformers and writing one for it: the same logits all three times."""
    reference = oracle(family, changes, seed=len(changes))
    reference.save_pretrained(tmp_path / "theirs")
    prompt = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, PROMPT))
    tokens, expected = greedy(reference, prompt)

    model = models.load(tmp_path / "theirs")
    actual = np.asarray(run(model.decoder, model.params, tokens[:, :-1].astype(np.int32), PROMPT))
    assert actual.dtype == np.float32
    assert np.abs(expected).max() > 1, "the oracle's logits say nothing"
    assert np.abs(actual - expected).max() <= TOLERANCE
    np.testing.assert_array_equal(actual[:, PROMPT - 1 :].argmax(-1), tokens[:, PROMPT:])

    models.save(model, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        read_back = again(input_ids=torch.tensor(tokens[:, :-1])).logits.numpy()
    assert type(again) is type(reference)
    assert np.abs(read_back - expected).max() <= TOLERANCE

    restored = models.load(tmp_path / "ours")
    assert restored.config == model.config
    jax.tree.map(np.testing.assert_array_equal, restored.params, model.params)


def test_every_family_has_an_oracle():
    tested = {f"{family}ForCausalLM" for family, _ in CASES}
    assert tested == set(models.FAMILIES)
