"""Families in GGUF files that the package `gguf` writes: logits of transformers with the same matrices."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entropic_jax import models
from entropic_jax.models import ModelError
from entropic_jax.models.formats.ggml_blocks import BLOCK_TYPES
from tests.models.family_cases import SIZES
from tests.models.oracle import paged_logits, random_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

TOLERANCE = 1e-3
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 256}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
HEADS, KV_HEADS, HEAD_DIM, EPSILON = 4, 2, 64, 1e-6
CASES = {  # family, what differs from a Llama, whether the metadata stand for config.json
    "llama": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}, True),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 256}, True),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "head_dim": HEAD_DIM, "norm_topk_prob": True}, True),
    "gemma": ("Gemma", {"head_dim": HEAD_DIM}, True),
    "gemma2": ("Gemma2", {"head_dim": HEAD_DIM, "sliding_window": 6, "query_pre_attn_scalar": 64}, False),
    "gemma3": ("Gemma3", {"head_dim": HEAD_DIM, "sliding_window": 6, "query_pre_attn_scalar": 64}, False),
    "phi3": ("Phi3", {}, False),
}
FAST = "gemma"


def in_pairs(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of the heads in the order of pairs, as llama.cpp's converter writes those of Llama."""
    return x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def in_halves(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(heads, -1, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def converted(architecture: str, tensors: dict, kind) -> tuple[dict, dict]:
    """Tensors by their names in GGUF, as the converter stores them, and what they stand for by their own."""
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture.upper()), SIZES["num_hidden_layers"]
    )
    stored, dense, experts = {}, {}, {}
    for name, x in tensors.items():
        if ".experts." in name:
            stem, number, part, _ = name.rsplit(".", 3)
            experts.setdefault(f"{stem}.{part}.weight", {})[int(number)] = name
            continue
        heads = (
            {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
            if architecture == "llama"
            else 0
        )
        shift = np.float32(architecture.startswith("gemma") and name.endswith("norm.weight"))
        value = in_pairs(x, heads) if heads else x + shift
        value = value[0] if "shared_expert_gate" in name else value
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        is_matrix = value.ndim == 2 and "gate_inp" not in there
        stored[there] = gguf.quants.quantize(value, kind) if is_matrix else value, is_matrix
        read = gguf.quants.dequantize(stored[there][0], kind) if is_matrix else value
        dense[name] = (in_halves(read, heads) if heads else read - shift).reshape(x.shape)
    for name, parts in experts.items():
        stack = np.stack([tensors[parts[number]] for number in sorted(parts)])
        there = names.get_name(name, try_suffixes=(".weight",))
        stored[there] = gguf.quants.quantize(stack, kind), True
        for number, matrix in enumerate(gguf.quants.dequantize(stored[there][0], kind)):
            dense[parts[number]] = matrix
    return stored, dense


def write(path, architecture: str, stored: dict, kind, theta: float) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(256)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    if any("_exps" in name for name in stored):
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(256)
        writer.add_expert_shared_feed_forward_length(256)
    for name, (data, is_matrix) in stored.items():
        writer.add_tensor(name, data, raw_dtype=kind if is_matrix else gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=() if a == FAST else pytest.mark.slow) for a in CASES]
)
def test_agrees_with_transformers(architecture, kind, tmp_path):
    family, changes, complete = CASES[architecture]
    theirs, ours, kind = tmp_path / "theirs", tmp_path / "ours", getattr(gguf.GGMLQuantizationType, kind)
    ours.mkdir()
    random = random_model(family, {**WIDE, "rms_norm_eps": EPSILON, **changes}, seed=0)
    random.save_pretrained(theirs)
    stored, dense = converted(architecture, load_file(theirs / "model.safetensors"), kind)
    theta = random.config.rope_parameters.get("rope_theta", 1e4)
    write(ours / "model.gguf", architecture, stored, kind, theta)
    if not complete:
        with pytest.raises(ModelError, match=r"config\.json is missing: the metadata of .* do not state all"):
            models.load(ours, progress=False)
        shutil.copy(theirs / "config.json", ours)
    contiguous = {name: np.ascontiguousarray(x, np.float32) for name, x in dense.items()}
    save_file(contiguous, theirs / "model.safetensors", metadata={"format": "pt"})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # which take float64
    reference = transformers.AutoModelForCausalLM.from_pretrained(theirs, **eager)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 30)
    with torch.no_grad():
        single = reference(input_ids=torch.tensor(tokens[None])).logits[0].numpy()
        expected = reference.double()(input_ids=torch.tensor(tokens[None])).logits[0].numpy()
    actual = paged_logits(models.load(ours, progress=False), tokens, len(tokens))
    assert np.abs(expected).max() > 1
    # The random model enlarges rounding errors; how much of them there are depends on the processor.
    rounding = np.abs(single - expected).max()
    assert rounding < 4 * TOLERANCE
    np.testing.assert_allclose(actual, expected, rtol=0, atol=max(TOLERANCE, 4 * rounding))


QUANTISED = [number for number, block in BLOCK_TYPES.items() if block.numbers > 1]


@pytest.mark.parametrize("number", QUANTISED, ids=[BLOCK_TYPES[number].name for number in QUANTISED])
def test_blocks_are_those_of_the_package(number):
    """Any bytes form blocks; scales that are not finite are left out."""
    block, rng = BLOCK_TYPES[number], np.random.default_rng(number)
    stored = rng.integers(0, 256, (64, block.size)).astype(np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(number))
        actual = block.decode(stored).reshape(expected.shape)
    finite = np.isfinite(expected).all(-1)
    assert finite.sum() > 32
    np.testing.assert_array_equal(actual[finite], expected[finite])


def test_a_part_of_the_metadata_that_changes_the_result_is_refused(tmp_path):
    stored, _ = converted("gemma", load_random("Gemma", tmp_path), gguf.GGMLQuantizationType.Q8_0)
    write(tmp_path / "model.gguf", "gemma", stored, gguf.GGMLQuantizationType.Q8_0, 1e4)
    assert models.load(tmp_path, progress=False).config.architecture == "GemmaForCausalLM"
    data = (tmp_path / "model.gguf").read_bytes()
    old, new = b"gemma.attention.value_length", b"gemma.attention.clamp_kqv___"
    (tmp_path / "model.gguf").write_bytes(data.replace(old, new[: len(old)]))
    models.load(tmp_path, progress=False)  # a key of no meaning
    (tmp_path / "model.gguf").write_bytes(data.replace(b"gemma.rope.freq_base", b"gemma.residual_scale"))
    with pytest.raises(ModelError, match=r"gemma\.residual_scale must be absent; got 10000\.0"):
        models.load(tmp_path, progress=False)


def load_random(family: str, directory) -> dict:
    random_model(family, {**WIDE, "head_dim": HEAD_DIM}, seed=0).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    assert json.loads((directory / "config.json").read_text())["hidden_size"] == 256
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        (directory / file).unlink(missing_ok=True)
    return tensors
