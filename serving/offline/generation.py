"""Interface between the command line and a loaded model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from entropic_jax.parameter_tables.speculation_names import drafter_of

from ..options import parallelism, speculation_options
from ..options.control_options import SAMPLERS, Control, build, calibration_of
from ..options.model import computing_dtype
from ..request import Request

if TYPE_CHECKING:
    from entropic_jax import models

    from ..options.kv_cache import KvCacheDtype
from ..request.transcript import Completion, Token


class Generator(Protocol):
    """A model with its tokenizer, ready to continue prompts."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling fields of `Request` that the model's makers recommend."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids of the model."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str | Sequence[int]:
        """The prompt that the model's chat template makes of messages, each with `role` and `content`.

        Raises RequestError if the template does not accept the messages.
        """

    def stream(self, request: Request) -> Iterator[Token]:
        """The tokens of one request as they become certain; RequestError if it cannot be served."""

    def batch(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """The completions of many requests, in their order.

        A request that cannot be served is completed with `finish_reason` "error"; the others go on.
        """


def load(
    path: Path,
    dtype: str | None = None,
    control: Control | None = None,
    kv_cache_dtype: "KvCacheDtype" = "auto",
    speculate: str | None = None,
    tensor_parallel_size: int = 1,
    quantization: str | None = None,
    parse_special: bool = True,
    expert_parallel_size: int = 1,
    data_parallel_size: int = 1,
    decode_context_parallel_size: int | None = None,
) -> Generator:
    """The model of a directory, with the calibration that it has.

    Raises ValueError, or OSError, which say what in the directory is at fault.

    Args:
        path: the path of the directory.
        dtype: the dtype that the model computes in, a value of `--dtype`; None is "auto".
        control: names the preset and its gains; None samples plainly.
        kv_cache_dtype: the dtype of the KV cache.
        speculate: name of the drafter of speculative decoding, or the directory of a draft model; "off" for
            none; None is that of the preset.
        tensor_parallel_size: devices over which the model is divided.
        quantization: the quantization of the weights, a value of `--quantization`; None keeps their dtype.
        parse_special: whether special tokens in prompts and messages are more than plain text.
        expert_parallel_size: groups of so many devices over which experts are divided.
        data_parallel_size: engines, each with a copy of the model, that share the work of a batch.
        decode_context_parallel_size: devices that divide the pages of a KV head, of those that share it; None
            for all.
    """
    from entropic_jax.mesh.devices import use_device

    from ..executable_cache import read_ahead

    on_mesh = (tensor_parallel_size, expert_parallel_size) != (1, 1)
    if not on_mesh and data_parallel_size == 1:  # before other imports, which take as long
        read_ahead(f"generate {(str(path), dtype, control, kv_cache_dtype, speculate, quantization)}")

    from entropic_jax import models

    from ..options import draft_model
    from . import engine, search_engine
    from .data_parallel import DataParallelGenerator

    control, dtype = control or Control(), computing_dtype(dtype, path)
    speculation_options.check(speculate, control.preset, control.method, divided=on_mesh)
    if on_mesh:
        parallelism.check_control(control.preset, control.method)
    calibration = calibration_of(path)
    belief = 1.0 if calibration is None else calibration.temperature
    preset = None
    if control.preset not in SAMPLERS:
        preset = build(control, calibration, engine.MOST_ROWS)
        preset = preset._replace(speculate=drafter_of(control.preset, speculate))
    places = parallelism.places_of(tensor_parallel_size, data_parallel_size, expert_parallel_size)
    device, mesh = places[0]
    with use_device(device):
        model = models.load(
            path,
            dtype,
            mesh=mesh,
            quantization=quantization,
            blocked=len(places) == 1,
            stacked=None,
            page_shards=decode_context_parallel_size,
        )
        set_parse_special(model, parse_special)
        if preset is not None:
            model = draft_model.load(model, preset.speculate, dtype, quantization, path, mesh is None)

    def engine_of(model: models.Model) -> engine.Engine:
        if preset is None:
            return search_engine.make_engine(control, calibration, model, kv_cache_dtype)
        return engine.Engine(model, preset, belief, kv_cache_dtype)

    return engine_of(model) if len(places) == 1 else DataParallelGenerator(model, places, engine_of)


def set_parse_special(model: "models.Model", parse_special: bool) -> None:
    """Have the tokenizer of a model take special tokens in the text of a user for what they mean, or not."""
    if model.tokenizer is not None:
        model.tokenizer.parse_special = parse_special
