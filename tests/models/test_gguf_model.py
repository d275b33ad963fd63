"""The embedded model as the package `gguf` writes it: logits of its matrices in NumPy, and its tokenizer."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models.tensor_names import EMBEDDING
from tests.models.dense import run

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from tests.models.test_gguf_families import in_halves, in_pairs  # noqa: E402 - these modules need torch
from tests.models.test_other_writers import EMBEDDED, TOKENS, TOLERANCE, dense_model  # noqa: E402

FAST = "Q8_0"
KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
TEXT = "def f(x):\n    return x + 1234  # naïve ÅÄ, we'll see: 多\n\n\nclass A: pass"


def k_blocks(matrix: np.ndarray, kind) -> np.ndarray:
    """Random blocks of a kind that the package reads and does not write, about as large as the matrix."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*matrix.shape[:-1], matrix.shape[-1] // elements, size)
    blocks = np.random.default_rng(matrix.size).integers(0, 256, shape, np.uint8)
    halves = {"Q4_K": (0, 2), "Q6_K": (size - 2,)}[kind.name]  # where the scales are
    for place in halves:
        blocks[..., place : place + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-2], -1)


def metadata_of(writer, config) -> None:
    """What llama.cpp's converter writes of a Llama and its tokenizer."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    described = json.loads((EMBEDDED / "tokenizer.json").read_text())
    vocabulary, special = described["model"]["vocab"], {t["id"] for t in described["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    types = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id[0])
    writer.add_add_bos_token(True)


def write(file, kind) -> object:
    """Writes the model; returns that of transformers with the matrices that the package reads."""
    model, config = dense_model(), models.load(progress=False).config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(file, "llama")
    metadata_of(writer, config)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        there = names.get_name(name, try_suffixes=(".weight",))
        value = weight.numpy()
        if value.ndim == 1:
            writer.add_tensor(there, value)
            continue
        count = heads.get(name.split(".")[-2])
        value = in_pairs(value, count) if count else value
        # The embedding stays readable, so that logits are of the size that a model has.
        chosen = gguf.GGMLQuantizationType.Q8_0 if name == EMBEDDING else kind
        written = chosen.name in ("Q8_0", "Q4_0")
        stored = gguf.quants.quantize(value, chosen) if written else k_blocks(value, chosen)
        writer.add_tensor(there, stored, raw_dtype=chosen)
        read = gguf.quants.dequantize(stored, chosen)
        weight.copy_(torch.tensor(np.ascontiguousarray(in_halves(read, count) if count else read)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


EACH = [pytest.param(kind, marks=() if kind == FAST else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("name", EACH)
def test_model_and_tokenizer_in_one_file(name, tmp_path):
    """No other file stands next to it."""
    reference = write(tmp_path / "model.gguf", getattr(gguf.GGMLQuantizationType, name))
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS[None])).logits[0].numpy()
    assert np.abs(expected).max() > 1
    model, original = models.load(tmp_path, progress=False), models.load(progress=False)
    actual = run(model.decoder, model.params, jnp.asarray(TOKENS[None], jnp.int32), len(TOKENS))[0]
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    assert model.tokenizer.encode(TEXT) == original.tokenizer.encode(TEXT)
    assert model.tokenizer.decode(model.tokenizer.encode(TEXT)) == TEXT
    assert model.stop_tokens == original.stop_tokens
    assert model.config.bos_token_id == original.config.bos_token_id
