"""The engines of the decoding benchmark behind one protocol.

Every engine is imported where it is used, so that this file can be imported in whatever environment has one
of them; only numpy must be there. `benchmarks.weights` puts the weights where they are read from.
"""

import gc
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np


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

    def __init__(self, directory: Path, threads: int, half: bool) -> None:
        import jax

        import entropic_jax
        from entropic_jax import models

        self.library, self.key = entropic_jax, jax.random.key(0)
        self.dtype = "bfloat16" if half else "float32"
        self.model = models.load(directory / "huggingface", dtype=self.dtype, blocked=True)
        self.controller = entropic_jax.chain()
        self.version, self.detail = f"entropic_jax on jax {jax.__version__}", ""
        if half:
            rounded = self.model.operand_dtype == "bfloat16"
            operands = "bf16 products" if rounded else "products in float32"
            self.detail = f"bf16 weights, {operands}, bf16 KV"

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


class Transformers:
    """Hugging Face transformers on PyTorch, driven by its forward pass (`generate` adds to every step).

    `warm` tries each cache with each kind of attention where the sequences stand, and keeps the fastest.
    """

    configurations: tuple[tuple[str, str], ...] = (
        ("dynamic", "sdpa"), ("dynamic", "eager"), ("static", "sdpa"), ("static", "eager"),
    )  # fmt: skip
    together = 16384  # prompt tokens read at once, in whole rows: beyond, activations take gigabytes

    def __init__(self, directory: Path, threads: int, half: bool) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.transformers = torch, transformers
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.detail = ""
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory / "huggingface", dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model = loaded.eval()
        self.forward: Callable[..., Any] = self.model

    def open(self, batch: int, capacity: int) -> None:
        self.capacity = capacity
        self.cache: Any = None

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        self.model.set_attn_implementation("sdpa")
        self.forward, self.length = self.model, prompts.shape[1]
        read = distinct(prompts)
        group = max(1, self.together // self.length)
        parts, tokens = [], []
        for start in range(0, len(read), group):
            self.cache = self.transformers.DynamicCache(config=self.model.config)
            tokens.append(self._step(self.torch.from_numpy(read[start : start + group].astype(np.int64)), 0))
            parts.append(self.cache.layers)
        copies = len(prompts) // len(read)
        if len(parts) * copies > 1:

            def gather(layers, name):
                return self.torch.cat([getattr(x, name) for x in layers] * copies)

            joined = (
                (gather(layers, "keys"), gather(layers, "values")) for layers in zip(*parts, strict=True)
            )
            self.cache = self.transformers.DynamicCache(joined, config=self.model.config)
        self.token, self.tokens_read = self.torch.cat(tokens * copies), read.size
        return self.token[:, 0].numpy()

    def _step(self, tokens: Any, position: int) -> Any:
        """Feed tokens `[rows, n]` at `position`; the greedy next token `[rows, 1]`."""
        places = self.torch.arange(position, position + tokens.shape[1])[None]
        output = self.forward(
            input_ids=tokens,
            position_ids=places,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1:].argmax(-1)

    def decode(self, steps: int) -> np.ndarray:
        tokens = []
        for _ in range(steps):
            self.token = self._step(self.token, self.length)
            self.length += 1
            tokens.append(self.token)
        return self.torch.cat(tokens, 1).numpy()

    def _choose(self, configuration: tuple[str, str], dynamic: Any) -> None:
        """Continue with this cache and attention; the keys and values come from the dynamic cache."""
        kind, attention = configuration
        self.model.set_attn_implementation(attention)
        self.cache = dynamic
        if kind == "static":
            self.cache = self.transformers.StaticCache(config=self.model.config, max_cache_len=self.capacity)
            for index, layer in enumerate(dynamic.layers):
                self.cache.update(layer.keys, layer.values, index)
        self.detail = f"{kind} cache, {attention}"

    def warm(self, steps: int) -> np.ndarray:
        dynamic, begin, token, seconds = self.cache, self.length, self.token, {}
        for configuration in self.configurations:
            self._choose(configuration, dynamic)
            self.decode(1)
            start = time.perf_counter()
            self.decode(3)
            seconds[configuration] = time.perf_counter() - start
            if self.cache is dynamic:
                dynamic.crop(-4)
            self.length, self.token = begin, token
        self._choose(min(seconds, key=lambda configuration: seconds[configuration]), dynamic)
        return self.decode(steps)


class BatchedTransformers(Transformers):
    """transformers' own continuous batching, for `benchmarks.serving`: all requests at once."""

    def open(self, batch: int, capacity: int) -> None:
        self.model.set_attn_implementation("paged|sdpa")
        self.detail = "generate_batch, paged sdpa"

    def requests(self, prompts: np.ndarray, steps: int) -> np.ndarray:
        """`steps` greedy tokens after each of the prompts `[requests, length]`, whatever they are."""
        config = self.transformers.GenerationConfig(
            max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )
        outputs = self.model.generate_batch(prompts.tolist(), generation_config=config, progress_bar=False)
        tokens = [output.generated_tokens for output in outputs.values()]
        if len(tokens) != len(prompts) or any(len(row) != steps for row in tokens):
            raise RuntimeError(f"{len(tokens)} of {len(prompts)} requests were answered")
        return np.array(tokens)


class CompiledTransformers(Transformers):
    """transformers with a static cache and a step compiled by torch.compile (needs a C++ compiler)."""

    configurations = (("static", "sdpa"),)

    def _choose(self, configuration: tuple[str, str], dynamic: Any) -> None:
        super()._choose(configuration, dynamic)
        self.torch.compiler.reset()
        self.forward = self.torch.compile(self.model, dynamic=False)
        self.detail += ", compiled"


class OpenVINO:
    """OpenVINO GenAI's continuous batching, stepped by hand; all prompts are read before any row decodes."""

    block = 32  # tokens of a KV block on the CPU device

    def __init__(self, directory: Path, threads: int, half: bool) -> None:
        import openvino
        import openvino_genai

        self.openvino, self.genai = openvino, openvino_genai
        self.version = f"openvino_genai {importlib.metadata.version('openvino-genai')}"
        self.model = directory / "openvino"
        self.properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
            "KV_CACHE_PRECISION": "f16" if half else "f32",
        }
        self.detail = "bf16 products, f16 KV" if half else ""
        self.handles: list[Any] = []

    def open(self, batch: int, capacity: int) -> None:
        self.handles, self.pipeline = [], None
        gc.collect()
        scheduler = self.genai.SchedulerConfig()
        scheduler.num_kv_blocks = batch * -(-capacity // self.block) + batch
        scheduler.max_num_batched_tokens = max(capacity, 2048)
        scheduler.dynamic_split_fuse = False  # prompts first, so that all rows start to decode together
        scheduler.enable_prefix_caching = False
        self.capacity = capacity
        self.pipeline: Any = self.genai.ContinuousBatchingPipeline(
            self.model, scheduler, "CPU", self.properties
        )

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        for handle in self.handles:
            handle.stop()
        while self.handles and self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        config = self.genai.GenerationConfig(
            max_new_tokens=self.capacity - prompts.shape[1], do_sample=False, ignore_eos=True
        )
        config.set_eos_token_id(0)  # some end must be named, and is then ignored
        self.handles = [
            self.pipeline.add_request(index, self.openvino.Tensor(row[None].astype(np.int64)), config)
            for index, row in enumerate(prompts)
        ]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.taken, self.tokens_read = 0, prompts.size
        return self.decode(1)[:, 0]

    def decode(self, steps: int) -> np.ndarray:
        goal = self.taken + steps
        while min(map(len, self.tokens)) < goal:
            self.pipeline.step()
            for handle, tokens in zip(self.handles, self.tokens, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.extend(output.generated_ids)
        result = np.array([tokens[self.taken : goal] for tokens in self.tokens])
        self.taken = goal
        return result

    warm = decode


class LlamaCpp:
    """llama.cpp through the low-level interface of llama-cpp-python: one stream of KV cells per row."""

    chunk = 2048  # prompt tokens handed over at once; llama.cpp computes them 512 at a time

    def __init__(self, directory: Path, threads: int, half: bool) -> None:
        import llama_cpp

        self.library = library = llama_cpp
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.detail = "f16 weights, f16 KV" if half else ""
        self.threads, self.context = threads, None
        self.kv_type = library.GGML_TYPE_F16 if half else library.GGML_TYPE_F32
        name = f"llamacpp-{'f16' if half else 'f32'}.gguf"
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(
            str(directory / name).encode(), library.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {directory / name}")
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self.batch = library.llama_batch_init(self.chunk, 0, 1)

    def open(self, batch: int, capacity: int) -> None:
        library = self.library
        if self.context:
            library.llama_free(self.context)
        parameters = library.llama_context_default_params()
        parameters.n_ctx = batch * -(-capacity // 256) * 256
        parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = self.chunk, 512, batch
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = self.kv_type
        # Flash attention rounds to float16 whatever the KV type, and decodes slower than plain attention.
        parameters.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.kv_unified = False
        self.context = library.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {batch} × {capacity} tokens")

    def _feed(
        self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, with_logits: np.ndarray
    ) -> np.ndarray:
        """Evaluate tokens (all arguments `[n]`); the greedy next token after each of those wanted."""
        batch, size = self.batch, len(tokens)
        batch.n_tokens = size
        for field, values in ((batch.token, tokens), (batch.pos, positions), (batch.logits, with_logits)):
            np.ctypeslib.as_array(field, (size,))[:] = values
        np.ctypeslib.as_array(batch.n_seq_id, (size,))[:] = 1
        for index, row in enumerate(rows):
            batch.seq_id[index][0] = row
        status = self.library.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if not with_logits.any():
            return np.empty(0, np.int32)
        logits = np.ctypeslib.as_array(
            self.library.llama_get_logits(self.context), (int(with_logits.sum()), self.vocabulary)
        )
        return logits.argmax(-1)

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        memory = self.library.llama_get_memory(self.context)
        self.library.llama_memory_clear(memory, True)
        context, read, tokens = prompts.shape[1], distinct(prompts), []
        for row, prompt in enumerate(read):
            token = np.empty(0, np.int32)
            for start in range(0, context, self.chunk):
                positions = np.arange(start, min(start + self.chunk, context))
                with_logits = positions == context - 1
                token = self._feed(prompt[positions], positions, np.full_like(positions, row), with_logits)
            tokens.append(token)
        copies = len(prompts) // len(read)
        for row in range(len(read), len(prompts)):
            self.library.llama_memory_seq_cp(memory, 0, row, -1, -1)
        self.length, self.token, self.tokens_read = context, np.concatenate(tokens * copies), read.size
        return self.token

    def decode(self, steps: int) -> np.ndarray:
        rows, tokens = np.arange(len(self.token)), []
        for _ in range(steps):
            self.token = self._feed(self.token, np.full_like(rows, self.length), rows, np.ones_like(rows))
            self.length += 1
            tokens.append(self.token)
        return np.stack(tokens, 1)

    warm = decode


def distinct(prompts: np.ndarray) -> np.ndarray:
    """The first row alone if all rows of `[rows, context]` are the same, else all of them."""
    return prompts[:1] if (prompts == prompts[0]).all() else prompts


ENGINES: dict[str, tuple[type, bool]] = {  # the class, and whether it computes in half precision
    "ours": (Ours, False),
    "transformers": (Transformers, False),
    "transformers-batched": (BatchedTransformers, False),
    "torch-compile": (CompiledTransformers, False),
    "openvino": (OpenVINO, False),
    "llamacpp": (LlamaCpp, False),
    "ours-half": (Ours, True),
    "openvino-half": (OpenVINO, True),
    "llamacpp-half": (LlamaCpp, True),
}
