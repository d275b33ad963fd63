"""Random damage to model directories: fields, structure and text of JSON files, headers, kinds of files."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VALUES = [
    *(0, -1, 1, 2, 3, 61, 10**6, 10**9, 10**400, 0.5, -1e-3, 1e-30, 1e300, float("nan"), float("inf")),
    *(True, False, None, "", "16", "swish", "default", "yarn", "dynamic", "a\nb", "\ud800", "é" * 300),
    *([], [1], [0, 0], ["full_attention"], [[[1]]], [None], [{}], {}, {"a": {"b": 1}}, {"": None}),
    [{"name": "default", "template": 5}],
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    {"content": "<s>"},
]
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
OTHER_FILES = ("model-1.safetensors", "model-2.safetensors", "chat_template.jinja")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, inner in items for p in ((*path, key), *places(inner, (*path, key)))]


def pick(rng: np.random.Generator, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def change_values(directory: Path, rng: np.random.Generator) -> str:
    """One to three values anywhere in a JSON file become others, or go."""
    name = pick(rng, (*JSON_FILES, *("config.json",) * 5))
    value, changes = json.loads((directory / name).read_text()), []
    for _ in range(int(rng.integers(1, 4))):
        path = pick(rng, places(value) or [("new",)])
        parent = value
        try:
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = copy.deepcopy(pick(rng, VALUES))  # which a later change may reach into
            changes.append(f"{path} = {str(parent[path[-1]])[:40]}")
            if rng.random() < 0.15:
                changes.append("deleted")
                del parent[path[-1]]
        except (TypeError, KeyError, IndexError):  # replaced by an earlier change
            continue
    (directory / name).write_text(json.dumps(value))
    return f"{name}: {changes}"


def change_bytes(directory: Path, rng: np.random.Generator) -> str:
    """A few bytes of a text file or of a header change, or the file ends early."""
    name = pick(rng, (*JSON_FILES, *OTHER_FILES))
    data = bytearray((directory / name).read_bytes())
    if rng.random() < 0.3:
        data = data[: int(rng.integers(len(data)))]
    else:
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(min(len(data), 600)))] = int(rng.integers(256))
    (directory / name).write_bytes(data)
    return f"{name}: bytes"


def replace_file(directory: Path, rng: np.random.Generator) -> str:
    """A file is a directory, a pipe, a link to itself, or holds something else."""
    name = pick(rng, (*JSON_FILES, *OTHER_FILES, "model.safetensors", "tokenizer.model"))
    path = directory / name
    kind = pick(
        rng, ("missing", "directory", "pipe", "loop", "empty", "deep", "list", "utf-16", "bom", "zeros")
    )
    text = path.read_text("utf-8", "replace") if path.exists() else "{}"
    path.unlink(missing_ok=True)
    contents: dict[str, Callable[[], Any]] = {
        "missing": lambda: None,
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path),
        "empty": path.touch,
        "deep": lambda: path.write_text('{"a":' * 10**5),
        "list": lambda: path.write_text("[1, 2]"),
        "utf-16": lambda: path.write_bytes(text.encode("utf-16")),
        "bom": lambda: path.write_bytes(b"\xef\xbb\xbf" + text.encode()),
        "zeros": lambda: path.write_bytes(bytes(4096)),
    }
    kind = pick(rng, list(contents))
    contents[kind]()
    return f"{name}: {kind}"


def change_header(directory: Path, rng: np.random.Generator) -> str:
    """An entry of a safetensors header changes."""
    path = directory / pick(rng, OTHER_FILES[:2])
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = pick(rng, [key for key in header if key != "__metadata__"])
    kind = pick(rng, ("dtype", "shape", "data_offsets", "name", "gone"))
    if kind in ("name", "gone"):
        entry = header.pop(name)
        header |= {name.replace("0", "7") + "x": entry} if kind == "name" else {}
    else:
        others = {"dtype": ["I8", "F8_E4M3", "F32", "BF16", 5], "shape": [[], [1], [-1], [2**62, 4], "a"]}
        header[name][kind] = pick(rng, others.get(kind, [[0, 0], [4, 2**63], [-1, 3], [], None]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return f"{path.name}: {name} {kind}"


KINDS = (
    change_values,
    change_values,
    change_values,
    change_values,
    change_bytes,
    replace_file,
    change_header,
)


def damage(directory: Path, seed: int) -> str:
    """Damages a directory, the same way for the same seed; says how."""
    rng = np.random.default_rng(seed)
    return pick(rng, KINDS)(directory, rng)
