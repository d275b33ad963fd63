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


def write_openvino(directory: Path) -> None:
    """Export the weights as OpenVINO IR, uncompressed."""
    from optimum.intel import OVModelForCausalLM

    exported = OVModelForCausalLM.from_pretrained(
        directory / "huggingface", export=True, compile=False, load_in_8bit=False
    )
    exported.save_pretrained(directory / "openvino.part")
    (directory / "openvino.part").rename(directory / "openvino")


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


def write_gguf(directory: Path) -> None:
    """Write the weights as GGUF, once in float32 and once in float16."""
    import gguf
    from safetensors.numpy import load_file

    source = directory / "huggingface"
    config = json.loads((source / "config.json").read_text("utf-8"))
    weights = load_file(source / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for kind, dtype in (("f32", np.float32), ("f16", np.float16)):
        partial = directory / f"llamacpp-{kind}.part"
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
        partial.rename(directory / f"llamacpp-{kind}.gguf")


def library_of(engine: str) -> str:
    """The library that an engine's name stands for: the part before the first hyphen."""
    return engine.partition("-")[0]


# By library: the file or folder that a conversion makes, and the conversion.
CONVERSIONS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "openvino": ("openvino", write_openvino),
    "llamacpp": ("llamacpp-f16.gguf", write_gguf),
}
