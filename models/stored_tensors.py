"""Tensors of a model directory under the names and in the shapes of an unquantised model.

Which files hold them and how quantised ones are stored is the business of `formats`. Nothing is read but what
the checks need.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .config import Config, ModelError
from .formats.foreign_names import ForeignTensor
from .formats.model_files import open_tensors
from .formats.stored import DTYPES, StoredTensor
from .formats.weight_format import DequantizedTensor, WeightFormat
from .tensor_names import EMBEDDING, HEAD, ParameterSource
from .text_towers import text_tensors

# Old Llama files carry what follows from the config; layers that predict further tokens are not computed.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$|(^|\.)mtp[._]")
STRIP = 64  # rows converted at a time; a whole matrix at once takes longer to transpose
PREFIX = "model."
Tensor = ForeignTensor | DequantizedTensor


class StoredTensors:
    """The tensors of a model directory. Raises ModelError for broken files.

    Args:
        directory: the directory of the model.
        config: the model's configuration.
        weight_format: the format of quantised matrices; None where there are none.
        text_tower: whether the model is a part of one that sees images, whose other tensors are passed over.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        weight_format: WeightFormat | None = None,
        text_tower: bool = False,
    ) -> None:
        self.directory = directory
        stored = open_tensors(directory, config)
        if text_tower:
            stored = {name: stored[in_file] for name, in_file in text_tensors(stored).items()}
        stored = with_prefix(stored)
        self.tensors: dict[str, Tensor] = (
            dict(stored) if weight_format is None else weight_format.dense_tensors(stored)
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def int8_rows(self, entry: ParameterSource) -> tuple[StoredTensor, np.ndarray] | None:
        """The matrix of an array in int8 with a scale per row, if it is stored so; None otherwise."""
        piece = entry.pieces[0]
        tensor = self.tensors[piece.name]
        one_matrix = len(entry.pieces) == 1 and piece.transposed and piece.expert is None
        return tensor.int8_rows() if one_matrix and isinstance(tensor, DequantizedTensor) else None

    def check_sizes(self, config: Config) -> None:
        """Raise ModelError for more layers or experts than there are tensors, before anything is built."""
        for name in ("num_hidden_layers", "n_shared_experts", "num_nextn_predict_layers"):
            value, most = getattr(config, name), len(self.tensors)
            if value > most:
                raise ModelError(
                    f"{self.directory}/config.json: {name} must be at most {most}, the number of tensors; "
                    f"got {value}"
                )
        for name in ("vocab_size", "hidden_size"):
            shape = self.shape_of(EMBEDDING)
            value, held = getattr(config, name), shape[name == "hidden_size"] if len(shape) == 2 else None
            if held is not None and value != held:
                raise ModelError(
                    f"{self.directory / 'config.json'}: {name} must be {held}, as in {EMBEDDING}; got {value}"
                )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; () if there is none of this name."""
        return self.tensors[name].shape if name in self.tensors else ()

    def check(self, expected: list[ParameterSource], config: Config) -> None:
        """Raise ModelError unless there are exactly these tensors, in these shapes and a known dtype."""
        shapes = {piece.name: piece.stored_shape for entry in expected for piece in entry.pieces}
        missing = [name for name in shapes if name not in self.tensors]
        if missing:
            raise ModelError(f"{self.directory} lacks {abbreviated(missing)}; config.json asks for them")
        tied = {HEAD} if config.tie_word_embeddings else set()
        layers = config.num_hidden_layers
        drafting = tuple(f"model.layers.{layers + i}." for i in range(config.num_nextn_predict_layers))
        unexpected = [
            name
            for name in self.tensors
            if name not in shapes
            and name not in tied
            and not HARMLESS.search(name)
            and not name.startswith(drafting)
            and not self.is_zero_bias(name)
            and 0 not in self[name].shape  # as transformers writes experts that there are none of
        ]
        if unexpected:
            size = f"{config.num_hidden_layers} layers of {config.architecture}"
            raise ModelError(f"{self.directory} holds {abbreviated(unexpected)}, which {size} do not have")
        for name, shape in shapes.items():
            tensor = self[name]
            if tensor.shape != shape:
                raise ModelError(f"{tensor.file}: {name} must have shape {shape}; got {tensor.shape}")
            if tensor.dtype not in DTYPES:
                raise ModelError(f"{tensor.file}: {name} must be of {', '.join(DTYPES)}; got {tensor.dtype}")
        if tied & self.tensors.keys() and not self.same(HEAD, EMBEDDING):
            raise ModelError(
                f"{self.directory}: with tie_word_embeddings, {HEAD} must be absent or equal {EMBEDDING}; "
                "got another tensor"
            )

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, which older GPTQ files have next to every quantised matrix."""
        matrix = self.tensors.get(name.removesuffix(".bias") + ".weight")
        return isinstance(matrix, DequantizedTensor) and name.endswith(".bias") and not self[name][...].any()

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors have equal shapes and values; reads them in strips."""
        left, right = self[first], self[second]
        if left.shape != right.shape:
            return False
        return all(np.array_equal(left[rows], right[rows]) for rows in strips(left.shape[0]))


def with_prefix(tensors: Mapping[str, ForeignTensor]) -> Mapping[str, ForeignTensor]:
    """The tensors under names that begin with `model.`, which files of a model without its head leave out."""
    if any(name.startswith(PREFIX) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else PREFIX + name: t for name, t in tensors.items()}


def abbreviated(names: list[str]) -> str:
    """The first three names, and how many follow."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def strips(length: int) -> list[slice]:
    """Slices of at most `STRIP` rows that cover `length` rows."""
    return [slice(start, min(start + STRIP, length)) for start in range(0, length, STRIP)]
