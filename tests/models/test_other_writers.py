"""The embedded model as bitsandbytes and compressed-tensors write it: logits of its matrices in NumPy."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import models
from tests.models.dense import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EMBEDDED = Path(models.__file__).parent / "embedded"
TOLERANCE = 1e-3
TOKENS = np.random.default_rng(0).integers(0, 4096, 24)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CHANNELS = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
BITSANDBYTES = {
    "NF4": NF4,
    "FP4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
COMPRESSED = {
    "int4": INT4,
    "int4 with zero points": {**INT4, "symmetric": False},
    "int8": {**CHANNELS, "type": "int"},
    "fp8": {**CHANNELS, "type": "float"},
    "fp8 with one scale": {**CHANNELS, "type": "float", "strategy": "tensor"},
}


def dense_model(**settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32, **settings).eval()


def write_bitsandbytes(directory: Path, settings: dict[str, Any]) -> None:
    quantised = transformers.BitsAndBytesConfig(**settings)
    dense_model(device_map="cpu", quantization_config=quantised).save_pretrained(directory)


def write_compressed(directory: Path, settings: dict[str, Any]) -> None:
    from compressed_tensors import quantization
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    model, weights = dense_model(), quantization.QuantizationArgs(**settings)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        rows = {"tensor": 1}.get(settings["strategy"], module.weight.shape[0])
        parts = module.weight.data.reshape(
            rows, -1, settings.get("group_size", module.weight.numel() // rows)
        )
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), weights)
        for name, value in (("weight_scale", scale), ("weight_zero_point", zero)):
            if (held := getattr(module, name, None)) is not None:
                held.data = value.reshape(held.shape).to(held.dtype)
        module.quantization_status = quantization.QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


def from_bitsandbytes(parts: dict[str, Any]) -> np.ndarray:
    """The matrix of the tensors that bitsandbytes writes, by the ends of their names."""
    if "SCB" in parts:
        return parts["weight"].numpy().astype(np.float32) * parts["SCB"].numpy()[:, None] / 127
    state = next(value for name, value in parts.items() if "quant_state" in name)
    state, codes = json.loads(bytes(state.numpy().tolist())), parts["weight"].numpy().reshape(-1)
    values = parts["weight.quant_map"].numpy()[np.stack([codes >> 4, codes & 15], -1).reshape(-1)]
    scales = parts["weight.absmax"].numpy()
    if "weight.nested_absmax" in parts:
        outer = np.repeat(parts["weight.nested_absmax"].numpy(), state["nested_blocksize"])[: scales.size]
        scales = parts["weight.nested_quant_map"].numpy()[scales] * outer + state["nested_offset"]
    return (values * np.repeat(scales, state["blocksize"])[: values.size]).reshape(state["shape"])


def from_compressed(parts: dict[str, Any], bits: int) -> np.ndarray:
    """The matrix of the tensors that compressed-tensors writes, by the ends of their names."""
    scales = parts["weight_scale"].float().numpy().reshape(-1, parts["weight_scale"].shape[-1])
    if "weight_packed" not in parts:
        return parts["weight"].float().numpy() * scales
    rows, columns = parts["weight_shape"].tolist()
    values = unpacked(parts["weight_packed"].numpy(), bits)[:, :columns]
    width = columns // scales.shape[1]
    if "weight_zero_point" in parts:
        zeros = unpacked(parts["weight_zero_point"].numpy().T, bits)[:, :rows].T
        values = values - np.repeat(zeros, width, 1)
    return values * np.repeat(scales, width, 1)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Integers, as floats, of words of 32 bits along the last axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return values.reshape(len(words), -1).astype(np.float32) - 2 ** (bits - 1)


def expected_logits(directory: Path, decode: Any) -> np.ndarray:
    """Logits of transformers with the matrices of a directory, decoded one by one."""
    from safetensors.torch import load_file

    tensors, model, decoded = load_file(directory / "model.safetensors"), dense_model(), 0
    with torch.no_grad():
        for name, module in model.named_modules():
            parts = {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}
            if not isinstance(module, torch.nn.Linear) or len(parts) < 2:
                continue
            matrix = decode(parts)
            exact = module.weight.numpy()
            assert 0 < np.abs(matrix - exact).max() < 0.2 * np.abs(exact).max()
            module.weight.copy_(torch.tensor(np.ascontiguousarray(matrix)))
            decoded += 1
        assert decoded == 7 * model.config.num_hidden_layers
        return model(torch.tensor(TOKENS[None])).logits[0].numpy()


def require_equal(directory: Path, decode: Any) -> None:
    """Loads a directory, and compares its logits and its tokenizer."""
    transformers.AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(directory)
    expected, model = expected_logits(directory, decode), models.load(directory, progress=False)
    actual = run(model.decoder, model.params, jnp.asarray(TOKENS[None], jnp.int32), len(TOKENS))[0]
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    original = models.load(progress=False)
    assert model.tokenizer.encode("def f(x): 12") == original.tokenizer.encode("def f(x): 12")
    assert model.stop_tokens == original.stop_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_bitsandbytes(name, tmp_path):
    pytest.importorskip("bitsandbytes")
    write_bitsandbytes(tmp_path, BITSANDBYTES[name])
    require_equal(tmp_path, from_bitsandbytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    write_compressed(tmp_path, COMPRESSED[name])
    require_equal(tmp_path, lambda parts: from_compressed(parts, COMPRESSED[name]["num_bits"]))
