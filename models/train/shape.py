"""The shape of a model to train."""

import json
from pathlib import Path
from typing import NamedTuple


class Shape(NamedTuple):
    """A shape in the names of its `config.json`; the defaults are those of the recipe."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    num_local_experts: int = 0  # 0: the feed-forward blocks are no mixtures of experts
    num_experts_per_tok: int = 0  # at most; `intermediate_size` is then the width of an expert


FILE = "shape.json"  # in the work folder: what was trained


def parse_shape(text: str) -> Shape:
    """The shape of `num_hidden_layers=6,hidden_size=128`: the defaults with changes.

    Raises:
        ValueError: for an unknown name, a size below 1, heads that cannot share keys, or experts of which a
            token would read none or more than there are.
    """
    kinds = Shape.__annotations__
    changes = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in kinds:
            raise ValueError(f"--shape must name {', '.join(kinds)}; got {name!r}")
        try:
            changes[name] = kinds[name](value)
        except ValueError:
            raise ValueError(f"--shape must give {name} a number; got {value!r}") from None
        if changes[name] <= 0:
            raise ValueError(f"--shape must give {name} a number above 0; got {value}")
    shape = Shape()._replace(**changes)
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ValueError(
            "--shape must have num_attention_heads in multiples of num_key_value_heads; "
            f"got {shape.num_attention_heads} and {shape.num_key_value_heads}"
        )
    if (shape.num_local_experts == 0) != (shape.num_experts_per_tok == 0) or (
        shape.num_experts_per_tok > shape.num_local_experts
    ):
        raise ValueError(
            "--shape must have num_experts_per_tok from 1 to num_local_experts, or neither; "
            f"got {shape.num_experts_per_tok} and {shape.num_local_experts}"
        )
    return shape


def record_shape(work: Path, shape: Shape) -> None:
    """Keep the shape of a run in its work folder; a run goes on only with its own.

    Raises:
        ValueError: when the folder holds a run of another shape.
    """
    file = work / FILE
    if file.exists() and (before := recorded_shape(work)) != shape:
        raise ValueError(f"--shape must be that of the run in --work, {before}; got {shape}")
    file.write_text(json.dumps(shape._asdict(), indent=1) + "\n")


def recorded_shape(work: Path) -> Shape:
    """The shape of the run in a work folder."""
    return Shape(**json.loads((work / FILE).read_text()))
