"""Weights of the reference model (a Llama of 25M parameters) in the format of each engine.

`directory / "huggingface"` is the original, in float32; the others are converted from it. Needs NumPy only,
until something is converted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "float32",
}
GGUF_NAMES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rope_theta": "rope_freq_base",
    "rms_norm_eps": "layer_norm_rms_eps",
    "vocab_size": "vocab_size",
}


def write_huggingface(directory: Path) -> None:
    """Write a Hugging Face directory with random weights, such that every layer moves the next token."""
    from safetensors.numpy import save_file

    directory = directory / "huggingface"
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    query, key = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], hidden), "model.norm": (hidden,)}
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm": (hidden,),
            f"{layer}.self_attn.q_proj": (query, hidden),
            f"{layer}.self_attn.k_proj": (key, hidden),
            f"{layer}.self_attn.v_proj": (key, hidden),
            f"{layer}.self_attn.o_proj": (hidden, query),
            f"{layer}.post_attention_layernorm": (hidden,),
            f"{layer}.mlp.gate_proj": (inner, hidden),
            f"{layer}.mlp.up_proj": (inner, hidden),
            f"{layer}.mlp.down_proj": (hidden, inner),
        }
    weights = {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else random.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
        for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))


def write_openvino(directory: Path, precision: str) -> None:
    """Export the weights as OpenVINO IR: uncompressed, or compressed by NNCF to 8 or 4 bits.

    Args:
        directory: the folder that holds `huggingface/`.
        precision: the precision of the engine.
    """
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    compressed = None
    if precision == "int8":
        compressed = OVWeightQuantizationConfig(bits=8, sym=True)
    elif precision == "int4":
        compressed = OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0)
    exported = OVModelForCausalLM.from_pretrained(
        directory / "huggingface",
        export=True,
        compile=False,
        load_in_8bit=False if compressed is None else None,
        quantization_config=compressed,
    )
    name = conversion_of("openvino", precision)
    exported.save_pretrained(directory / f"{name}.part")
    if (directory / "huggingface" / "tokenizer.json").exists():
        write_openvino_tokenizer(directory / "huggingface", directory / f"{name}.part")
    (directory / f"{name}.part").rename(directory / name)


def write_openvino_tokenizer(source: Path, target: Path) -> None:
    """Convert a tokenizer, which a pipeline with a draft model must have even where it gets token ids."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    converted = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
    for name, model in zip(("tokenizer", "detokenizer"), converted, strict=True):
        openvino.save_model(model, target / f"openvino_{name}.xml")


def write_vocabulary(writer: Any, file: Path, size: int) -> None:
    """Give a GGUF the vocabulary of a byte-level BPE tokenizer, or none where there is no file."""
    if not file.exists():
        writer.add_tokenizer_model("none")
        return
    tree = json.loads(file.read_text("utf-8"))
    special = {token["id"]: token["content"] for token in tree["added_tokens"]}
    tokens = {number: text for text, number in tree["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([tokens.get(i, f"[unused{i}]") for i in range(size)])
    writer.add_token_types([3 if i in special else 1 if i in tokens else 5 for i in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in tree["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def write_llamacpp(directory: Path, precision: str) -> None:
    """Write the weights as GGUF: in float32 or float16, or quantised by llama.cpp from float32.

    Args:
        directory: the folder that holds `huggingface/`.
        precision: the precision of the engine.
    """
    name = conversion_of("llamacpp", precision)
    partial = directory / f"{name}.part"
    if precision in ("float32", "half"):
        write_gguf(directory, partial, np.float32 if precision == "float32" else np.float16)
    else:
        import llama_cpp

        source = directory / conversion_of("llamacpp", "float32")
        if not source.exists():
            write_llamacpp(directory, "float32")
        parameters = llama_cpp.llama_model_quantize_default_params()
        kinds = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
        parameters.ftype = kinds[precision]
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), parameters)
        if failed:
            raise RuntimeError(f"llama.cpp cannot quantise {source}")
    partial.rename(directory / name)


def write_gguf(directory: Path, partial: Path, dtype: Any) -> None:
    """Write the weights as GGUF.

    Args:
        directory: the folder that holds `huggingface/`.
        partial: the file to write.
        dtype: the dtype of matrices.
    """
    import gguf
    from safetensors.numpy import load_file

    source = directory / "huggingface"
    config = json.loads((source / "config.json").read_text("utf-8"))
    weights = load_file(source / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(partial, "llama")
    for ours, theirs in GGUF_NAMES.items():
        getattr(writer, f"add_{theirs}")(config[ours])
    for size in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        size(config["head_dim"])
    write_vocabulary(writer, source / "tokenizer.json", config["vocab_size"])
    for name, weight in weights.items():
        projection = name.split(".")[-2]
        if projection in heads:  # llama.cpp rotates neighbours, Hugging Face the two halves of a head
            halves = weight.reshape(heads[projection], 2, -1, weight.shape[-1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        stored = weight.astype(dtype if weight.ndim > 1 else np.float32)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def library_of(engine: str) -> str:
    """The library that an engine's name stands for: the part before the first hyphen."""
    return engine.partition("-")[0]


def conversion_of(library: str, precision: str) -> str:
    """The file or folder that holds the weights for an engine.

    Args:
        library: the library of the engine.
        precision: the precision in which it computes.
    """
    if library == "openvino":
        return f"openvino-{precision}" if precision.startswith("int") else "openvino"
    kinds = {"float32": "f32", "half": "f16", "int8": "q8_0", "int4": "q4_0"}
    return f"llamacpp-{kinds[precision]}.gguf" if library == "llamacpp" else "huggingface"


CONVERSIONS: dict[str, Callable[[Path, str], None]] = {"openvino": write_openvino, "llamacpp": write_llamacpp}
