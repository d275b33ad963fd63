"""Head needs: how much of a prompt each KV head of a model has to read, measured on text and kept as JSON."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ..state.cache import ModelShape

FILE = "head_needs.json"
VERSION = 1
MODEL_FIELDS = ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocabulary")


class HeadNeeds(NamedTuple):
    """The table of need per layer and KV head, the model that it was measured on, and how.

    A need is the number of earlier tokens that a head would read if the pages of most attention, of all heads
    together, were read at `budget` tokens a head on average. Only the ratios of needs matter to a method.
    """

    layers: int  # of the model, as the next five
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    tokens: int  # of the text
    segment: int  # queries of a segment
    page_size: int  # positions of a page
    budget: int  # tokens a head on average
    dense_layers: int  # lowest layers that do not compete for the budget
    need: tuple[tuple[float, ...], ...]  # [layers][kv_heads], tokens

    def check_model(self, shape: ModelShape) -> None:
        """Raises ValueError, which names the field, unless the table belongs to a model of this shape."""
        for name in MODEL_FIELDS:
            if getattr(self, name) != getattr(shape, name):
                raise ValueError(
                    f"the table of head needs is of another model: {name} must be {getattr(shape, name)}, "
                    f"as the model has; got {getattr(self, name)} (`entropic heads --calibrate` measures one)"
                )


def save_head_needs(needs: HeadNeeds, path: str | Path) -> None:
    """Writes a table as JSON to a file, or as `head_needs.json` into a directory, atomically."""
    file = _file(path)
    tree = {"version": VERSION, **needs._asdict()}
    tree["need"] = [[float(f"{value:.6g}") for value in row] for row in needs.need]
    text = json.dumps(tree, indent=2, allow_nan=False) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{FILE}.", delete=False) as stream:
        stream.write(text)
    os.chmod(stream.name, 0o644)
    os.replace(stream.name, file)


def load_head_needs(path: str | Path) -> HeadNeeds:
    """Load what `save_head_needs` wrote, from a file or from a directory.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if the file is invalid; names the file, the field, what it must be and its value.
    """
    file = _file(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"the table must be a file written by `entropic heads --calibrate`; {file} does not exist"
        )
    try:
        tree = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{file} must hold a JSON object; got {type(tree).__name__}")
    if tree.get("version") != VERSION or isinstance(tree["version"], bool):
        raise ValueError(f"{file}: version must be {VERSION}; got {tree.get('version')!r}")
    if odd := {*tree} ^ {"version", *HeadNeeds._fields}:
        name = min(odd)
        fault = f"{name} is unknown" if name in tree else f"{name} is missing"
        fields = ", ".join(HeadNeeds._fields)
        raise ValueError(f"{file} must have exactly the fields version, {fields}; {fault}")
    counts = {name: _count(file, name, tree[name]) for name in HeadNeeds._fields if name != "need"}
    if counts["dense_layers"] >= counts["layers"]:
        limit = counts["layers"]
        raise ValueError(f"{file}: dense_layers must be below layers = {limit}; got {counts['dense_layers']}")
    return HeadNeeds(**counts, need=_table(file, tree["need"], counts["layers"], counts["kv_heads"]))


def _file(path: str | Path) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _count(file: Path, name: str, value: Any) -> int:
    least = 0 if name == "dense_layers" else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{file}: {name} must be an integer of at least {least}; got {value!r}")
    return value


def _table(file: Path, rows: Any, layers: int, kv_heads: int) -> tuple[tuple[float, ...], ...]:
    shaped = isinstance(rows, list) and len(rows) == layers
    if not shaped or any(not isinstance(row, list) or len(row) != kv_heads for row in rows):
        raise ValueError(
            f"{file}: need must be a list of {layers} lists of {kv_heads} numbers, one per layer and KV head"
        )
    for layer, row in enumerate(rows):
        for head, value in enumerate(row):
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            if not numeric or not 0 < value < 2**31 or not math.isfinite(value):
                raise ValueError(
                    f"{file}: need[{layer}][{head}] must be a number above 0 and below 2³¹; got {value!r}"
                )
    return tuple(tuple(float(value) for value in row) for row in rows)
