"""The engines of the decoding benchmark behind one protocol.

Every engine is imported where it is used, so that this file can be imported in whatever environment has one
of them; only numpy must be there. `weights` puts the weights where they are read from.
"""

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .llamacpp_engine import LlamaCpp
from .openvino_engine import BatchedOpenVINO, OpenVINO
from .transformers_engines import BatchedTransformers, CompiledTransformers, Transformers


class Engine(Protocol):
    """An engine to measure. Calls are timed from outside and return tokens that the host can read."""

    version: str
    detail: str  # which of its own ways the engine has chosen
    tokens_read: int  # prompt tokens that the last prefill computed; an engine may copy what rows share

    def open(self, batch: int, capacity: int) -> None:
        """Allocate `batch` rows of `capacity` tokens and drop earlier state."""

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        """Read prompts `int32 [batch, context]`, from the start; the greedy next token of each row."""

    def warm(self, steps: int) -> np.ndarray:
        """`decode`, with leave to compile and to try out which way is the fastest."""

    def decode(self, steps: int) -> np.ndarray:
        """The next `steps` greedy tokens of each row, `[batch, steps]`."""


class Ours:
    """`entropic_jax` with the null controller: `decode` is one launch of the compiled loop."""

    launch = 128  # most steps of a launch
    speculator: Any = None  # drafts nothing

    def __init__(self, directory: Path, threads: int, precision: str) -> None:
        import jax

        import entropic_jax
        from entropic_jax import models

        self.library, self.key = entropic_jax, jax.random.key(0)
        self.dtype = "float32" if precision == "float32" else "bfloat16"
        quantization = precision if precision.startswith("int") else None
        self.model = models.load(
            directory / "huggingface", dtype=self.dtype, quantization=quantization, blocked=True
        )
        self.controller = entropic_jax.chain()
        self.version, self.detail = f"entropic_jax on jax {jax.__version__}", ""
        if precision != "float32":
            rounded = self.model.operand_dtype == "bfloat16" and precision != "int4"
            operands = "bf16 products" if rounded else "products in float32"
            weights = {"half": "bf16", "int8": "int8 (columns)", "int4": "int4 (of 32; embedding int8)"}
            self.detail = f"{weights[precision]} weights, {operands}, bf16 KV"

    def open(self, batch: int, capacity: int) -> None:
        self.capacity, self.state = capacity, None

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        rows, context = prompts.shape
        self.state = None  # the memory of the one before
        self.state = self.library.start(
            self.model.decoder,
            self.model.params,
            self.controller,
            self.library.allocate(self.model.decoder.shape, rows, self.capacity, dtype=self.dtype),
            prompts.tolist(),
            key=self.key,
            max_tokens=self.capacity - context,
            sample=self.library.parameters(rows, temperature=0.0),
            speculator=self.speculator,
        )
        self.tokens_read = prompts.size
        return self.decode(1)[:, 0]

    def decode(self, steps: int) -> np.ndarray:
        model, state = self.model, self.state
        self.state, trace = self.library.generate(
            model.decoder, model.params, self.controller, state, steps, capacity=self.launch
        )
        return np.asarray(trace.token)[:steps].T

    warm = decode


class BatchedOurs:
    """Our engine behind `LLM`, without HTTP, for `benchmarks.serving`: all requests at once."""

    def __init__(self, directory: Path, threads: int, precision: str) -> None:
        import jax

        self.model, self.dtype = directory / "huggingface", precision
        self.llm: Any = None
        self.version, self.detail = f"entropic_jax on jax {jax.__version__}", ""

    def open(self, batch: int, capacity: int) -> None:
        from entropic_jax import LLM

        if self.llm is None:
            self.llm = LLM(
                self.model, dtype=self.dtype, max_num_seqs=batch, max_model_len=1024, warmup="full"
            )
            while not self.llm.ready():
                time.sleep(0.1)

    def requests(self, prompts: np.ndarray, steps: int) -> np.ndarray:
        """`steps` greedy tokens after each of the prompts `[requests, length]`, whatever they are."""
        from entropic_jax import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        texts = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        outputs = self.llm.generate(texts, params, use_tqdm=False)
        return np.array([output.outputs[0].token_ids for output in outputs])


ENGINES: dict[str, tuple[type, str]] = {  # the class, and the precision in which it computes
    "ours": (Ours, "float32"),
    "ours-batched": (BatchedOurs, "float32"),
    "transformers": (Transformers, "float32"),
    "transformers-batched": (BatchedTransformers, "float32"),
    "torch-compile": (CompiledTransformers, "float32"),
    "openvino": (OpenVINO, "float32"),
    "openvino-batched": (BatchedOpenVINO, "float32"),
    "llamacpp": (LlamaCpp, "float32"),
    **{
        f"{name}-{precision}": (engine, precision)
        for precision in ("half", "int8", "int4")
        for name, engine in (("ours", Ours), ("openvino", OpenVINO), ("llamacpp", LlamaCpp))
    },
}
