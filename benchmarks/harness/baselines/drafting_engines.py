"""Engines that decode one sequence speculatively, for `benchmarks.speculation.peers`.

`prefill` returns all tokens of the event that ends the prompt, which may be several. `passes` counts the
passes of the model in the latest `decode`.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from .engines import ENGINES, Ours
from .llamacpp_engine import LlamaCpp
from .openvino_engine import OpenVINO

DRAFT = "draft"  # the folder, beside the weights, of the model that drafts
LOOKUP = "lookup"
OFF, SUFFIX, AUTO = "off", "suffix", "auto"  # drafters of ours, by their names
MOST_DRAFTED = 15  # tokens of a draft of ours


class DraftingOurs(Ours):
    """`entropic_jax` with the drafter that a name says, and with the pass costs of this machine."""

    launch = 32  # most passes of a launch

    def __init__(self, directory: Path, threads: int, precision: str, drafter: str) -> None:
        super().__init__(directory, threads, precision)
        from entropic_jax.serving.options import draft_model

        self.drafter = str(directory / DRAFT / "huggingface") if drafter == DRAFT else drafter
        path = directory / "huggingface"
        self.model = draft_model.load(self.model, self.drafter, self.dtype, path=path)
        self.costs: Any = None

    def open(self, batch: int, capacity: int) -> None:
        from entropic_jax.speculation import HeadedDecoder, make_speculator, measure_pass_costs
        from entropic_jax.speculation.pass_timing import SHORT
        from entropic_jax.speculation.pruned import WINDOW

        super().open(batch, capacity)
        model = self.model
        if self.costs is None and self.drafter != OFF:
            context = max(2 * SHORT, capacity)
            self.costs = measure_pass_costs(
                model.decoder, model.params, most_tokens=MOST_DRAFTED + 1, context=context, pages=WINDOW
            )
        headed = isinstance(model.decoder, HeadedDecoder)
        most = None if self.drafter == OFF else MOST_DRAFTED
        self.speculator = make_speculator(self.drafter, batch, most, self.costs, headed)

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        self.text: list[int] = []
        self.taken = 0
        super().prefill(prompts)
        self.taken = len(self.text)
        return np.array([self.text])

    def decode(self, steps: int) -> np.ndarray:
        goal, self.passes = self.taken + steps, 0
        while len(self.text) < goal:
            most = min(self.launch, goal - len(self.text))  # each emits a token at least
            self.state, trace = self.library.generate(
                self.model.decoder,
                self.model.params,
                self.controller,
                self.state,
                most,
                capacity=self.launch,
                speculator=self.speculator,
            )
            token, emitted, drafted = (
                np.asarray(x)[:, 0] for x in (trace.token, trace.emitted, trace.from_draft)
            )
            if not emitted.any():
                raise RuntimeError(f"the text ended after {len(self.text)} of {goal} tokens")
            self.text += token[emitted].tolist()
            self.passes += int((emitted & ~drafted).sum())
        result, self.taken = self.text[self.taken : goal], goal
        return np.array([result])

    warm = decode


class Tuned:
    """An engine that tries several settings of its drafts and keeps the fastest."""

    settings: tuple[dict[str, float], ...] = ()
    detail: str

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        """See `Engine`."""
        raise NotImplementedError

    def decode(self, steps: int) -> np.ndarray:
        """See `Engine`."""
        raise NotImplementedError

    def use(self, setting: dict[str, float]) -> None:
        """Draft by a setting from the next prompt on."""
        raise NotImplementedError

    def tune(self, prompts: np.ndarray, tokens: int) -> None:
        """Continue prompts by every setting, and keep the one with the least time; the first is not timed.

        Args:
            prompts: int32 `[prompts, context]`, two at least.
            tokens: the number of tokens after each.
        """
        seconds = np.zeros(len(self.settings))
        for number, prompt in enumerate(prompts):
            for index, setting in enumerate(self.settings):
                self.use(setting)
                first = self.prefill(prompt[None]).size
                begin = time.perf_counter()
                self.decode(tokens - first)
                if number:
                    seconds[index] += time.perf_counter() - begin
        best = self.settings[int(seconds.argmin())]
        self.use(best)
        self.detail = ", ".join(f"{name} {value:g}" for name, value in best.items())


class DraftingOpenVINO(OpenVINO, Tuned):
    """OpenVINO GenAI's prompt lookup, or its speculative decoding with a draft model."""

    spare = 4  # the scheduler divides the blocks between two models, and drafts need further ones

    def __init__(self, directory: Path, threads: int, precision: str, drafter: str) -> None:
        super().__init__(directory, threads, precision)
        self.draft = None if drafter == LOOKUP else directory / DRAFT / self.model.name
        if self.draft is None:
            self.settings = tuple(
                {"num_assistant_tokens": number, "max_ngram_size": size}
                for number, size in product((3, 5, 10, 15), (2, 3, 5))
            )
        else:
            fixed: list[dict[str, float]] = [{"num_assistant_tokens": n} for n in (2, 3, 5, 10)]
            self.settings = (*fixed, {"assistant_confidence_threshold": 0.4})
        self.use(self.settings[1])

    def _pipeline_properties(self) -> dict[str, Any]:
        if self.draft is None:
            return {**self.properties, "prompt_lookup": True}
        model = self.genai.draft_model(self.draft, "CPU", **self.properties)
        return {**self.properties, "draft_model": model}

    def use(self, setting: dict[str, float]) -> None:
        self.drafting = setting

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        super().prefill(prompts)
        self.taken = len(self.tokens[0])
        return np.array(self.tokens)


class DraftingLlamaCpp(LlamaCpp, Tuned):
    """llama.cpp with the prompt lookup of llama-cpp-python, whose drafts one `llama_decode` verifies."""

    settings = tuple(
        {"num_pred_tokens": number, "max_ngram_size": size}
        for number, size in product((2, 5, 10, 15), (2, 3, 5))
    )

    def __init__(self, directory: Path, threads: int, precision: str) -> None:
        super().__init__(directory, threads, precision)
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.lookup = LlamaPromptLookupDecoding
        self.use(self.settings[1])

    def use(self, setting: dict[str, float]) -> None:
        self.drafter = self.lookup(**setting)

    def open(self, batch: int, capacity: int) -> None:
        super().open(batch, capacity)
        self.text = np.zeros(capacity, np.intc)  # the prompt, and what follows it

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        first = super().prefill(prompts)
        self.text[: self.length], self.text[self.length] = prompts[0], first[0]
        return first

    def decode(self, steps: int) -> np.ndarray:
        memory = self.library.llama_get_memory(self.context)
        begin, self.passes = self.length, 0
        goal = begin + steps
        while self.length < goal:
            # A pass emits one token more than it accepts.
            room = goal - self.length - 1
            drafted = self.drafter(self.text[: self.length + 1])[:room]
            tokens = np.concatenate([self.text[self.length, None], drafted])
            positions = self.length + np.arange(len(tokens))
            likeliest = self._feed(tokens, positions, np.zeros_like(positions), np.ones_like(positions))
            different = np.nonzero(drafted != likeliest[:-1])[0]
            emitted = int(different[0]) + 1 if different.size else len(tokens)
            self.text[self.length + 1 : self.length + 1 + emitted] = likeliest[:emitted]
            self.length += emitted
            self.library.llama_memory_seq_rm(memory, 0, self.length, -1)
            self.passes += 1
        return self.text[None, begin + 1 : goal + 1].copy()

    warm = decode


DRAFTING_ENGINES: dict[str, tuple[Callable[..., Any], str]] = {
    **{
        f"ours-{name}": (partial(DraftingOurs, drafter=name), "float32")
        for name in (OFF, SUFFIX, AUTO, DRAFT)
    },
    "openvino-lookup": (partial(DraftingOpenVINO, drafter=LOOKUP), "float32"),
    "openvino-draft": (partial(DraftingOpenVINO, drafter=DRAFT), "float32"),
    "llamacpp-lookup": (DraftingLlamaCpp, "float32"),
}
EVERY_ENGINE: dict[str, tuple[Callable[..., Any], str]] = {**ENGINES, **DRAFTING_ENGINES}


def engine_class(name: str) -> type:
    """The class of an engine of the name."""
    maker = EVERY_ENGINE[name][0]
    return maker.func if isinstance(maker, partial) else maker  # type: ignore[return-value]
