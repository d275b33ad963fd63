"""transformers on PyTorch as an engine: its forward pass, its continuous batching, and compiled by torch."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .prompts import distinct


class Transformers:
    """Hugging Face transformers on PyTorch, driven by its forward pass (`generate` adds to every step).

    `warm` tries each cache with each kind of attention where the sequences stand, and keeps the fastest.
    """

    configurations: tuple[tuple[str, str], ...] = (
        ("dynamic", "sdpa"), ("dynamic", "eager"), ("static", "sdpa"), ("static", "eager"),
    )  # fmt: skip
    together = 16384  # prompt tokens read at once, in whole rows: beyond, activations take gigabytes

    def __init__(self, directory: Path, threads: int, precision: str) -> None:
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
