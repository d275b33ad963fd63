"""OpenVINO GenAI as an engine."""

import gc
import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np

from .weights import conversion_of


class OpenVINO:
    """OpenVINO GenAI's continuous batching, stepped by hand; all prompts are prefilled before rows decode."""

    block = 32  # tokens of a KV block on the CPU device
    spare = 1  # KV blocks for each that the rows need

    def __init__(self, directory: Path, threads: int, precision: str) -> None:
        import openvino
        import openvino_genai

        self.openvino, self.genai = openvino, openvino_genai
        self.version = f"openvino_genai {importlib.metadata.version('openvino-genai')}"
        exact = precision == "float32"
        self.model = directory / conversion_of("openvino", precision)
        self.properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32" if exact else "bf16",
            "KV_CACHE_PRECISION": "f32" if exact else "f16",
        }
        weights = {"int8": "int8 (columns)", "int4": "int4 (of 32; embedding int8)"}
        self.detail = "" if exact else f"{weights.get(precision, 'f32')} weights, bf16 products, f16 KV"
        self.drafting: dict[str, Any] = {}  # fields of every request, about drafts
        self.handles: list[Any] = []

    def open(self, batch: int, capacity: int) -> None:
        self.handles, self.pipeline = [], None
        gc.collect()
        self.capacity, scheduler = capacity, self._scheduler(batch, capacity)
        self.pipeline: Any = self.genai.ContinuousBatchingPipeline(
            self.model, scheduler, "CPU", self._pipeline_properties()
        )

    def _scheduler(self, batch: int, capacity: int) -> Any:
        """How a pipeline schedules; arguments as in `open`."""
        scheduler = self.genai.SchedulerConfig()
        scheduler.num_kv_blocks = self.spare * (batch * -(-capacity // self.block) + batch)
        scheduler.max_num_batched_tokens = max(capacity, 2048)
        scheduler.dynamic_split_fuse = False  # prompts first, so that all rows start to decode together
        scheduler.enable_prefix_caching = False
        return scheduler

    def _pipeline_properties(self) -> dict[str, Any]:
        """The properties of a pipeline."""
        return self.properties

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        for handle in self.handles:
            handle.stop()
        while self.handles and self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self._add(prompts, self.capacity - prompts.shape[1])
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.taken, self.tokens_read = 0, prompts.size
        return self.decode(1)[:, 0]

    def _add(self, prompts: np.ndarray, tokens: int) -> None:
        """Add a request for so many greedy tokens after each of the prompts `[requests, length]`."""
        config = self.genai.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, ignore_eos=True, **self.drafting
        )
        config.set_eos_token_id(0)  # some end must be named, and is then ignored
        self.handles = [
            self.pipeline.add_request(index, self.openvino.Tensor(row[None].astype(np.int64)), config)
            for index, row in enumerate(prompts)
        ]

    def decode(self, steps: int) -> np.ndarray:
        goal, self.passes = self.taken + steps, 0
        while min(map(len, self.tokens)) < goal:
            self.pipeline.step()
            self.passes += 1
            for handle, tokens in zip(self.handles, self.tokens, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.extend(output.generated_ids)
        result = np.array([tokens[self.taken : goal] for tokens in self.tokens])
        self.taken = goal
        return result

    warm = decode


class BatchedOpenVINO(OpenVINO):
    """OpenVINO GenAI's continuous batching with its defaults: prompts are prefilled in chunks."""

    def _scheduler(self, batch: int, capacity: int) -> Any:
        scheduler = super()._scheduler(batch, capacity)
        scheduler.max_num_seqs, scheduler.dynamic_split_fuse = batch, True
        scheduler.max_num_batched_tokens = 256  # its default
        return scheduler

    def requests(self, prompts: np.ndarray, steps: int) -> np.ndarray:
        """`steps` greedy tokens after each of the prompts `[requests, length]`, whatever they are."""
        self._add(prompts, steps)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return np.array([next(iter(handle.read_all())).generated_ids for handle in self.handles])
