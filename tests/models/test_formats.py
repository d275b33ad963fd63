"""Quantised checkpoints load as the matrices that they stand for; malformed ones are errors of one line."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from entropic_jax import models
from entropic_jax.models import Config, ModelError, formats
from entropic_jax.models.formats import gptq, weight_format
from entropic_jax.models.formats.settings import Settings
from tests.models import format_writers as write

# Widths are not multiples of what is read at a time, 64 rows, nor of the blocks of FP8, 128.
LLAMA = Config("LlamaForCausalLM", 61, 160, 224, 1, 5, 5, 32, attention_bias=True)
LAYER = "model.layers.0."
MATRICES = [
    *(f"{LAYER}self_attn.{name}_proj" for name in "qkvo"),
    *(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")),
]
ORDERS = {160: np.random.default_rng(0).permutation(160), 224: np.random.default_rng(1).permutation(224)}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}


def groups(*weights, **changes):
    entries = [{"targets": ["Linear"], "weights": w, "input_activations": None, **changes} for w in weights]
    return {
        **CT,
        "config_groups": {f"group_{i}": entry for i, entry in enumerate(entries)},
        "ignore": ["lm_head"],
    }


def int4(symmetric=True, **changes):
    return {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 16,
        **changes,
    }


FP8, GPTQ = (
    {"quant_method": "fp8", "activation_scheme": "dynamic"},
    {"quant_method": "gptq", "group_size": 16},
)
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FORMATS = {
    "fp8": (FP8, write.fp8),
    "fp8 of other names": (FP8, lambda *a: write.fp8(*a, scale_name="weight_scale")),
    "fp8 blocks": (BLOCKS, lambda *a: write.fp8(*a, block=(128, 128))),
    "fp8 powers": (BLOCKS, lambda *a: write.fp8(*a, block=(128, 128), scale_dtype=ml_dtypes.float8_e8m0fnu)),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda *a: write.fp8(*a, scale_name="weight_scale", per_row=True),
    ),
    "gptq": ({**GPTQ, "bits": 4, "desc_act": False, "sym": True}, write.gptq),
    "gptq by activation": (
        {**GPTQ, "bits": 4, "desc_act": True, "sym": False},
        lambda stem, w: write.gptq(stem, w, symmetric=False, order=ORDERS[w.shape[1]]),
    ),
    "gptq 8 bits v2": (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda *a: write.gptq(*a, bits=8, symmetric=False, version=2),
    ),
    "gptq 3 bits": (
        {**GPTQ, "bits": 3, "group_size": 32},
        lambda *a: write.gptq(*a, bits=3, size=32, symmetric=False),
    ),
    "fp8 blocks of other sizes": (
        {**FP8, "weight_block_size": [64, 32]},
        lambda *a: write.fp8(*a, block=(64, 32)),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None},
        lambda *a: write.fp8(*a, scale_name="weight_scale"),
    ),
    "nvfp4": (
        groups({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})
        | {"format": "nvfp4-pack-quantized"},
        write.nvfp4,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, write.awq),
    "int4": (groups(int4()), write.packed_integers),
    "int4 by activation": (
        groups(int4(False, actorder="group")),
        lambda stem, w: write.packed_integers(stem, w, symmetric=False, order=ORDERS[w.shape[1]]),
    ),
    "int8": (groups(CHANNELS, input_activations={"num_bits": 8, "dynamic": True}), write.int8_rows),
    "int8 asymmetric": (
        groups({**CHANNELS, "symmetric": False}),
        lambda *a: write.int8_rows(*a, symmetric=False),
    ),
    "two schemes": (
        groups(CHANNELS, int4()),
        lambda stem, w: (write.int8_rows if "mlp" in stem else write.packed_integers)(stem, w),
    ),
    "float8 channel": (
        groups({"num_bits": 8, "type": "float", "strategy": "channel"}),
        lambda *a: write.fp8(*a, scale_name="weight_scale", per_row=True),
    ),
    "nf4": (NF4, lambda *a: write.nf4(*a, nested=False)),
    "nf4 nested": ({**NF4, "bnb_4bit_use_double_quant": True}, write.nf4),
    "8 bits of bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, write.int8_scb),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A directory that is not quantised."""
    path = tmp_path_factory.mktemp("plain")
    models.save(models.initialise(LLAMA, seed=0), path)
    return path


def quantise(plain, path, name):
    """Write a quantised copy of a model; returns the matrices that it stands for."""
    settings, writer = FORMATS[name]
    tensors = load_file(plain / "model.safetensors")
    dense = dict(tensors)
    for stem in MATRICES:
        stored, matrix = writer(stem, tensors.pop(f"{stem}.weight"))
        tensors |= stored
        dense[f"{stem}.weight"] = matrix
    write.save(tensors, path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    return dense


def tensors_of(model, path):
    """The tensors of a model as `save` writes them."""
    models.save(model, path, dtype="float32")
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_dequantised(name, plain, tmp_path):
    dense = quantise(plain, tmp_path, name)
    actual = tensors_of(models.load(tmp_path, progress=False), tmp_path / "dense")
    assert actual.keys() == dense.keys()
    for tensor, expected in dense.items():
        np.testing.assert_allclose(actual[tensor], expected, rtol=1e-5, atol=1e-6, err_msg=tensor)
        assert np.abs(expected - load_file(plain / "model.safetensors")[tensor]).max() < 0.2, tensor


def test_experts_of_gpt_oss(tmp_path):
    """Stacks of experts in MXFP4, of which gate and up take turns."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = Config(
        *("GptOssForCausalLM", 61, 64, 96, 1, 4, 2, 16), num_local_experts=3, num_experts_per_tok=2
    )
    assert config.head_dim == sizes["head_dim"]
    models.save(models.initialise(config, seed=0), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense = dict(tensors)
    for name in (f"{LAYER}mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")):
        stored, dense[name] = write.mxfp4(name, tensors.pop(name))
        tensors |= stored
    write.save(tensors, tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    actual = tensors_of(models.load(tmp_path, progress=False), tmp_path / "dense")
    for tensor, expected in dense.items():
        np.testing.assert_array_equal(actual[tensor], expected, err_msg=tensor)


OTHERS = {
    "fused": Config("Phi3ForCausalLM", 61, 160, 224, 1, 5, 5),
    "experts": Config(
        *("MixtralForCausalLM", 61, 160, 224, 1, 5, 5), num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", OTHERS)
def test_fused_matrices_and_experts(family, quantization, tmp_path):
    """Parts of a stored matrix are arrays of their own, and matrices of experts are one array."""
    models.save(models.initialise(OTHERS[family], seed=0), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dense = dict(tensors)
    for name in [n for n, x in tensors.items() if x.ndim == 2 and LAYER in n and ".gate." not in n]:
        stored, dense[name] = write.int8_rows(name.removesuffix(".weight"), tensors.pop(name))
        tensors |= stored
    write.save(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": groups(CHANNELS)}))
    model = models.load(tmp_path, progress=False, quantization=quantization)
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    write.save({n: x.astype(np.float32) for n, x in dense.items()}, tmp_path / "dense" / "model.safetensors")
    expected = models.load(tmp_path / "dense", progress=False)
    for name, part in expected.params["layers"][0]["self_attn"].items():
        actual = model.params["layers"][0]["self_attn"][name]
        assert (actual["kernel"].dtype == np.int8) == (quantization is not None)
        wide = np.asarray(actual["kernel"], np.float32) * np.asarray(actual.get("scale", 1.0))
        np.testing.assert_allclose(wide, part["kernel"], rtol=1e-5, atol=1e-6, err_msg=name)
    if quantization is None:
        close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, model.params, expected.params)


def test_the_settings_of_a_text_tower_are_read():
    raw = {"text_config": {"quantization_config": {**GPTQ, "bits": 4}}, "quantization_config": None}
    assert isinstance(weight_format(raw), formats.GPTQ)


def test_activations_that_stay_are_logged(plain, tmp_path, caplog):
    quantise(plain, tmp_path, "int8")
    models.load(tmp_path, dtype="bfloat16", progress=False)
    assert "activations stay bfloat16; its configuration asks for 8 bits" in caplog.text


ACTIVATIONS = {"num_bits": 4, "type": "float"}
REFUSED = {
    "method": ({"quant_method": "hqq"}, r"quantization_config\.quant_method must be one of .*; got 'hqq'"),
    "not an object": ([1], r"quantization_config must be an object; got \[1\]"),
    "bits of gptq": ({**GPTQ, "bits": 5}, r"quantization_config\.bits must be 2 or 3 or 4 or 8; got 5"),
    "bits that are true": (
        {**GPTQ, "bits": True},
        r"quantization_config\.bits must be 2 or 3 or 4 or 8; got True",
    ),
    "bits of layers": (
        {**GPTQ, "bits": 4, "dynamic": {"a": 1}},
        r"config\.dynamic must be absent or null; got",
    ),
    "group of gptq": (
        {**GPTQ, "bits": 4, "group_size": 0},
        r"config\.group_size must be a positive integer or -1",
    ),
    "awq layout": (
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        r"quantization_config\.version must be 'gemm' or 'GEMM'; got 'gemv'",
    ),
    "block of fp8": (
        {**FP8, "weight_block_size": [128]},
        r"weight_block_size must be a list of two positive",
    ),
    "no groups": (
        {**CT, "config_groups": {}},
        r"quantization_config\.config_groups must be an object of groups",
    ),
    "algorithm of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        r"quantization_config\.quant_algo must be 'FP8'; got 'NVFP4'",
    ),
    "activations of 4 bits": (
        groups(int4(), input_activations=ACTIVATIONS),
        r"config_groups\.group_0\.input_activations\.num_bits must be at least 8, .*; got 4",
    ),
    "sparsity": (
        {**groups(int4()), "sparsity_config": {"format": "sparse-24-bitmask"}},
        r"quantization_config\.sparsity_config\.format must be 'dense'; got 'sparse-24-bitmask'",
    ),
    "rotations": (
        {**groups(int4()), "transform_config": {"a": 1}},
        r"transform_config must be absent or null",
    ),
    "both widths": (
        {**NF4, "load_in_8bit": True},
        r"load_in_4bit must be true, or load_in_8bit instead; got True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_not_honoured_are_refused(name, plain, tmp_path):
    settings, expected = REFUSED[name]
    (tmp_path / "model.safetensors").symlink_to(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=expected) as raised:
        models.load(tmp_path, progress=False)
    assert "\n" not in str(raised.value) and str(tmp_path / "config.json") in str(raised.value)


Q = MATRICES[0]
DAMAGE = {
    "no scale of fp8": (
        "fp8",
        f"{Q}.weight_scale_inv",
        None,
        r"q_proj\.weight must be of F64, .*; got F8_E4M3",
    ),
    "scale of fp8": (
        "fp8 blocks",
        f"{Q}.weight_scale_inv",
        np.ones((2, 3), "f4"),
        r"must have shape \(2, 2\)",
    ),
    "no scales of gptq": (
        "gptq",
        f"{Q}.scales",
        None,
        r"q_proj\.weight is quantised, but its scales is missing",
    ),
    "order": ("gptq", f"{Q}.g_idx", np.full(160, 10, "i4"), r"g_idx must be from 0 to 9; got 10"),
    "no order": (
        "gptq by activation",
        f"{Q}.g_idx",
        None,
        r"q_proj\.weight is quantised, but its g_idx is missing",
    ),
    "a bias": (
        "gptq",
        f"{MATRICES[-1]}.bias",
        np.ones(160, "f4"),
        r"holds .*down_proj\.bias, which 1 layers of",
    ),
    "zeros of gptq": ("gptq", f"{Q}.qzeros", np.ones((10, 3), "i4"), r"qzeros must have shape \(10, 20\)"),
    "words of awq": (
        "awq",
        f"{Q}.qweight",
        np.ones((160, 20), "f4"),
        r"qweight must be of I32, U32; got F32",
    ),
    "shape of int4": (
        "int4",
        f"{Q}.weight_shape",
        np.array([160, 999]),
        r"weight_shape must fit .*; got \(160, 999\)",
    ),
    "state of nf4": (
        "nf4",
        f"{Q}.weight.quant_state.bitsandbytes__nf4",
        np.frombuffer(b'{"shape": [1, 99999999999999]}', np.uint8),
        r"quant_state of .*q_proj\.weight: shape must be two positive integers",
    ),
    "scales of nf4": (
        "nf4",
        f"{Q}.weight.absmax",
        np.ones(3, "f4"),
        r"absmax must have shape \(400,\); got \(3,\)",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_parts_that_do_not_fit_are_named(name, plain, tmp_path):
    kind, tensor, value, expected = DAMAGE[name]
    quantise(plain, tmp_path, kind)
    tensors = read(tmp_path / "model.safetensors")
    assert tensor in tensors or tensor.endswith(".bias")
    tensors = {n: x for n, x in tensors.items() if n != tensor} | ({} if value is None else {tensor: value})
    write.save(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=expected) as raised:
        models.load(tmp_path, progress=False)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def read(path):
    """Tensors of any dtype."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    names = {
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F32": "f4",
        "F16": "f2",
        "I32": "i4",
        "I64": "i8",
        "I8": "i1",
        "U8": "u1",
    }
    header = {n: e for n, e in json.loads(data[8 : 8 + length]).items() if n != "__metadata__"}
    parts = {n: data[8 + length :][slice(*e["data_offsets"])] for n, e in header.items()}
    return {n: np.frombuffer(parts[n], names[e["dtype"]]).reshape(e["shape"]) for n, e in header.items()}


def test_rules_of_gptq_that_leave_modules_out_are_what_the_tensors_say():
    settings = Settings({"bits": 4, "dynamic": {r"-:.*lm_head.*": {}}})
    assert gptq.GPTQ(settings).bits == 4
    with pytest.raises(ModelError, match=r"quantization_config\.dynamic must be absent or null"):
        gptq.GPTQ(Settings({"bits": 4, "dynamic": {r"+:.*down.*": {"bits": 8}}}))


def test_biases_of_zeros_next_to_gptq_are_passed_over(plain, tmp_path):
    """A model without biases in its feed-forward block has them in older files."""
    quantise(plain, tmp_path, "gptq")
    tensors = read(tmp_path / "model.safetensors") | {f"{MATRICES[-1]}.bias": np.zeros(160, "f4")}
    write.save(tensors, tmp_path / "model.safetensors")
    assert "bias" not in models.load(tmp_path, progress=False).params["layers"][0]["mlp"]["down_proj"]
