"""Writes a trained model as a Hugging Face directory.

    python -m entropic_jax.models.train.export --work DIR --out DIR

The weights are rounded to bfloat16 and transposed to `[out, in]`, as `torch.nn.Linear` keeps them. A model
with experts is a Mixtral, another one a Llama.
`read` is the inverse, for the evaluation: float32 parameters in the layout of `models.train.forward`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from . import history
from .data import BEGIN, END
from .forward import Params
from .shape import Shape, recorded_shape
from .trainer import unstack

NORMS = ("input_layernorm", "post_attention_layernorm")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # Mixtral's names
ABSENT_IF_DENSE = ("num_local_experts", "num_experts_per_tok")  # in config.json
GENERATION = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
LOOPS = {"dry_multiplier": 1.0, "dry_allowed_length": 4}  # in generation_config.json too: ends loops


def newest(checkpoints: Path) -> tuple[Params, int]:
    """The averaged parameters of the newest complete checkpoint, as numpy arrays, and its step."""
    options = ocp.CheckpointManagerOptions(create=False)
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.CheckpointManager(checkpoints, item_handlers=handler, options=options) as manager:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"checkpoints: no complete checkpoint in {checkpoints}; train one first")
        saved = manager.item_metadata(step).tree["average"]
        template = {"average": jax.tree.map(lambda _: 0, saved)}
        numpy_arrays = {"average": jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)}
        restore = ocp.args.PyTreeRestore(template, restore_args=numpy_arrays, partial_restore=True)
        return unstack(manager.restore(step, args=restore)["average"]), step


def tensors(params: Params) -> dict[str, np.ndarray]:
    """Parameters `[in, out]` under their Hugging Face names `[out, in]`, in bfloat16; no `lm_head`: tied."""

    def half(x):
        return np.ascontiguousarray(np.asarray(x).astype(ml_dtypes.bfloat16))

    result = {
        "model.embed_tokens.weight": half(params["embed_tokens"]),
        "model.norm.weight": half(params["norm"]),
    }
    for number, layer in enumerate(params["layers"]):
        for name, value in layer.items():
            if np.ndim(value) == 3:
                for expert, matrix in enumerate(np.asarray(value)):
                    result[_tensor_name(number, name, expert)] = half(matrix.T)
            else:
                result[_tensor_name(number, name)] = half(value if name in NORMS else np.asarray(value).T)
    return result


def _tensor_name(layer: int, name: str, expert: int | None = None) -> str:
    if name == "router":
        name, part = "gate", "block_sparse_moe."
    elif expert is not None:
        name, part = EXPERTS[name], f"block_sparse_moe.experts.{expert}."
    else:
        part = "" if name in NORMS else "self_attn." if name in ATTENTION else "mlp."
    return f"model.layers.{layer}.{part}{name}.weight"


def configuration(shape: Shape, begin: int, end: int) -> dict[str, Any]:
    """`config.json`: `rope_theta` is what transformers 4 reads, `rope_parameters` what 5 reads.

    Args:
        shape: the model's shape.
        begin: id of the token that begins a text.
        end: id of the token that ends it.
    """
    family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if shape.num_local_experts:
        family = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    return {
        **family,
        **{name: n for name, n in shape._asdict().items() if n or name not in ABSENT_IF_DENSE},
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }


def check(params: Params, shape: Shape, vocabulary: int) -> None:
    """Raise ValueError when the arrays are not those of `shape`, or the tokenizer does not fit.

    Args:
        params: weights.
        shape: the shape that the arrays should have.
        vocabulary: tokens of the tokenizer.
    """
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    widths = (
        params["embed_tokens"].shape,
        len(params["layers"]),
        *(params["layers"][0][name].shape[-1] for name in ("q_proj", "k_proj", "gate_proj")),
    )
    hidden, inner = shape.hidden_size, shape.intermediate_size
    expected = ((shape.vocab_size, hidden), shape.num_hidden_layers, q, kv, inner)
    if widths != expected:
        raise ValueError(
            "params must have the embedding, layers and widths of q, k and gate of their shape, "
            f"{shape}: {expected}; got {widths}"
        )
    if vocabulary > shape.vocab_size:
        raise ValueError(
            f"tokenizer must have at most {shape.vocab_size} tokens, one per embedding row; got {vocabulary}"
        )


def export(params: Params, shape: Shape, tokenizer: Tokenizer, out: Path, step: int = 0) -> None:
    """Write config, weights, tokenizer and generation defaults into the folder `out`.

    Args:
        params: weights.
        shape: the model's shape.
        tokenizer: the model's tokenizer.
        out: folder, which is made.
        step: updates behind the weights, noted in the metadata of the safetensors file.
    """
    check(params, shape, tokenizer.get_vocab_size())
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    if begin is None or end is None:
        raise ValueError(f"tokenizer must have the tokens {BEGIN} and {END}; got ids {begin} and {end}")
    out.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "training_step": str(step)}
    save_file(tensors(params), out / "model.safetensors", metadata=metadata)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    description = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    generation = {**GENERATION, **LOOPS, "bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    for name, content in (
        ("config", configuration(shape, begin, end)),
        ("tokenizer_config", description),
        ("generation_config", generation),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> tuple[Params, Shape, int]:
    """Parameters (float32, `[in, out]`), shape and training step of an exported directory."""
    config = json.loads((folder / "config.json").read_text())
    stated = [name for name in Shape._fields if name in config or name not in ABSENT_IF_DENSE]
    shape = Shape(**{name: config[name] for name in stated})
    with safe_open(folder / "model.safetensors", "np") as archive:
        step = int((archive.metadata() or {}).get("training_step", 0))
    stored = {k: v.astype(np.float32) for k, v in load_file(folder / "model.safetensors").items()}

    experts = range(shape.num_local_experts)

    def array(number: int, name: str) -> np.ndarray:
        if experts and name in EXPERTS:
            return np.stack([stored[_tensor_name(number, name, expert)].T for expert in experts])
        value = stored[_tensor_name(number, name)]
        return value if name in NORMS else np.ascontiguousarray(value.T)

    def layer(number: int) -> Params:
        names = (*NORMS, *ATTENTION, *(("router",) if experts else ()), *EXPERTS)
        return {name: array(number, name) for name in names}

    params = {
        "embed_tokens": stored["model.embed_tokens.weight"],
        "layers": [layer(i) for i in range(shape.num_hidden_layers)],
        "norm": stored["model.norm.weight"],
    }
    return params, shape, step


def main() -> None:
    """Read the command line and export the newest checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m entropic_jax.models.train.export", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder that models.train worked in")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    params, step = newest(work / "checkpoints")
    export(
        params, recorded_shape(work), Tokenizer.from_file(str(work / "tokenizer.json")), arguments.out, step
    )
    (arguments.out / history.FILE).write_text(json.dumps(history.round_history(work, step), indent=1) + "\n")
    size = sum(f.stat().st_size for f in arguments.out.iterdir() if f.suffix in (".json", ".safetensors"))
    print(f"step {step}: wrote {arguments.out}, {size / 1e6:.1f} MB with tokenizer")


if __name__ == "__main__":
    main()
