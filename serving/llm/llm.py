"""Offline inference in three lines: `LLM` runs the serving engine in this process, without a server.

    from entropic_jax import LLM, SamplingParams

    llm = LLM(preset="full")  # the embedded model; or a path to a Hugging Face directory
    outputs = llm.generate(["def add(a, b):", "import os"], SamplingParams(temperature=0.7, max_tokens=32))
    print(outputs[0].outputs[0].text, outputs[0].outputs[0].trace["entropy"])

Names and shapes are those of vLLM's class of the same name, where vLLM has an equivalent.
"""

import dataclasses
import queue
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entropic_jax.models import Tokenizer
from entropic_jax.parameter_tables.sampling_params import PARAMETERS, SamplingParams, normal_seed, recommended
from entropic_jax.parameter_tables.table import short

from ..engine.interface import EngineRequest, OutputStream
from ..engine.metrics_hooks import MetricsHooks
from ..engine.process_group import start_processes
from ..engine.start import follow_process_0, start
from ..engine.warmup import CompilationCount
from ..options import processes
from ..options.compilation_cache import remember_compilations
from ..options.control_options import check_temperature
from ..options.model import EMBEDDED
from ..request import Request, RequestError
from ..request.chat_template import set_template
from .lora_request import LoRARequest, RequestedAdapters
from .options import IN_FLIGHT, PROCESS_NAMES, read_options
from .outputs import CompletionOutput, Logprob, RequestOutput, Result, result_of
from .progress import GenerationBar
from .prompts import (
    Message,
    Prompt,
    TokenizedPrompt,
    at,
    conversations_of,
    prompts_of,
    tokenize,
    tokenize_conversation,
)
from .requested_grammars import RequestedGrammars

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]

SEED = PARAMETERS["seed"].accepts
CHECK = 0.5  # seconds between looks at whether the engine has failed


class FinishedRequests(MetricsHooks):
    """Queues the id of every request that the engine has finished."""

    def __init__(self) -> None:
        self.ids: queue.SimpleQueue[str] = queue.SimpleQueue()

    def finished(self, sequence: Any, delta: Any) -> None:
        """Called by the engine's thread when a request ends."""
        self.ids.put(sequence.engine_request.id)


class LLM:
    """A language model with its engine: continuous batching, control by entropy, no server.

    The engine compiles a program when it is first needed and keeps it on disk for later processes (see
    `ENTROPIC_PROGRAM_CACHE`). Use the object as a context manager, or call `shutdown`, to free the
    device's memory before the process ends. Calls from several threads run one after the other.

    >>> llm = LLM(max_num_sequences=4)
    Traceback (most recent call last):
    TypeError: LLM has no argument max_num_sequences; did you mean max_num_seqs?
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        preset: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Load a model and start its engine.

        Args:
            model: path of a Hugging Face model directory; None is the embedded model, which continues Python.
            preset: the scales of control that are on: "off", "micro" (temperature), "meso" (tokens drafted
                and verified), "macro" (scheduling), "full" (all three), "meso-lossy" (pages left unread),
                "full-lossy" (with micro and macro); or a sampler: "entropix", "entropix-as-released",
                "dslider". The texts of "meso" and "full" are those of "off" and "micro". None is "meso", or
                "off" with options that exclude drafts.
            seed: sequence number i of this object draws with `seed + i` where its sampling parameters have no
                seed; None or -1 draws anew each time.
            **options: any field of `EngineOptions` (`dtype`, `quantization`, `max_model_len`,
                `max_num_seqs`, `kv_cache_dtype`, `kv_cache_bytes`, `enable_prefix_caching`, `method`,
                `budgets` of the method, a mapping with `prefill_budget` and `cache_budget`,
                `prefill_options`, …; vLLM's name `kv_cache_memory_bytes` stands for `kv_cache_bytes`), or any
                gain of the controllers (`law`, `target_entropy`,
                `lowest_temperature`, …). With `coordinator_address`, `num_processes` and `process_id`, or
                `distributed`, the model is divided over several processes that run the same script: the
                constructor returns in process 0, and in the others runs the launches of process 0 until
                that ends, then exits.

        Raises:
            TypeError: for an argument that is not known.
            ValueError: for one whose value is not accepted, or a model that cannot be loaded.
            OSError: if files of the model cannot be read.
            SystemExit: in other processes than process 0, when it has ended.
        """
        if not isinstance(model, str | Path | None):
            raise TypeError(f"model must be a path, as a string or Path; got {short(model)}")
        if model == "":
            raise RequestError("model must be the path of a directory, or None; got ''", "model")
        self._seed = normal_seed(SEED.check("seed", seed))
        stated = {name: options.pop(name) for name in PROCESS_NAMES if name in options}
        group = start_processes(processes.checked(stated))
        self._control, engine_options = read_options(preset, options)
        remember_compilations()
        path = EMBEDDED if model is None else model
        if group is not None and not group.leads:
            raise SystemExit(follow_process_0(path, engine_options, self._control, group))
        self._lock = threading.Lock()
        self._num_prompts = self._num_sequences = 0  # submitted so far
        self._finished_requests = FinishedRequests()
        self._compiled = CompilationCount()
        self._engine = start(
            path,
            engine_options,
            self._finished_requests,
            self._compiled,
            control=self._control,
            group=group,
        )
        set_template(self._engine.tokenizer)
        self._adapters = RequestedAdapters(self._engine, engine_options)
        self._grammars = RequestedGrammars(self._engine.model)
        self._close = weakref.finalize(self, self._engine.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one prompt or a sequence of them. A prompt is a string, a list of token ids, or a mapping
                with the key `prompt` or `prompt_token_ids`.
            sampling_params: for all prompts, or one per prompt; None is `get_default_sampling_params()`.
            use_tqdm: show a progress bar when standard error is a terminal.
            lora_request: LoRA adapter for all prompts, or one or None per prompt; needs `enable_lora`.

        Returns:
            One output per prompt, in the order of the prompts. A sequence that fails alone, as one whose
            logits are not finite, ends with `finish_reason` "error"; the others go on.

        Raises:
            ValueError: for a prompt or parameters that the model cannot take; nothing is generated then.
            TypeError: if `sampling_params` are of another type.
            RuntimeError: after `shutdown`, or if the engine has failed.
        """
        items = prompts_of(prompts)
        encode = self._engine.prompt_tokens
        tokenized = [at(f"prompts[{i}]", lambda x: tokenize(x, encode), item) for i, item in enumerate(items)]
        return self._run(tokenized, sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue conversations through the model's chat template, or a plain one if it has none.

        Args:
            messages: one conversation or a sequence of them; a message has `role` and `content`.
            sampling_params: as in `generate`, one per conversation.
            use_tqdm: as in `generate`.
            add_generation_prompt: open the assistant's turn at the end of the prompt.
            continue_final_message: end the prompt with the last message, for the model to continue it.
            tools: descriptions of tools, for templates that take them.
            chat_template_kwargs: further variables of the template.
            lora_request: as in `generate`.

        Returns:
            One output per conversation, in order.

        Raises:
            ValueError: if the chat template rejects the messages; else as in `generate`.
        """

        def render(conversation: Any) -> TokenizedPrompt:
            prompt = tokenize_conversation(
                conversation,
                self._engine.tokenizer,
                chat_template_kwargs,
                continue_final_message,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
            )
            self._engine.prompt_tokens(prompt.token_ids)  # refused here if it is too long
            return prompt

        conversations = conversations_of(messages)
        tokenized = [at(place, render, item) for place, item in conversations.items()]
        return self._run(tokenized, sampling_params, use_tqdm, lora_request)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config.json, with the defaults of `SamplingParams` elsewhere."""
        return SamplingParams(**recommended(self._engine.model.generation))

    def ready(self) -> bool:
        """Whether the warm-up of the engine is over; until then it compiles programs beside the requests."""
        return self._engine.ready()

    def snapshot(self) -> Mapping[str, Any]:
        """The state of the engine and what it has counted so far, as `/entropic/state` of a server."""
        return self._engine.snapshot()

    def shutdown(self) -> None:
        """Stop the engine; sequences in flight end. Further calls do nothing."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: Any,
    ) -> list[RequestOutput]:
        """Generate for prompts whose form is checked."""
        params = self._params(sampling_params, len(prompts))
        with self._lock:
            if not self._close.alive:
                raise RuntimeError("the LLM is shut down; make a new one to generate")
            adapters = self._adapters.names(lora_request, len(prompts))
            groups = [self._requests(*group) for group in zip(prompts, params, adapters, strict=True)]
            results = iter(self._complete([request for group in groups for request in group], use_tqdm))
        outputs = []
        for prompt, group in zip(prompts, groups, strict=True):
            sequences = [next(results) for _ in group]
            outputs.append(
                RequestOutput(
                    request_id=group[0].id.partition("-")[0],
                    prompt=prompt.text,
                    prompt_token_ids=list(prompt.token_ids),
                    outputs=[dataclasses.replace(s.completion, index=k) for k, s in enumerate(sequences)],
                    num_cached_tokens=sequences[0].cached_tokens,
                    prompt_logprobs=sequences[0].prompt_logprobs,
                )
            )
        return outputs

    def _params(self, sampling_params: Any, count: int) -> Sequence[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        accepted = "sampling_params must be SamplingParams or a list of them"
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str | bytes):
            raise TypeError(f"{accepted}; got {type(sampling_params).__name__}")
        for params in sampling_params:
            if not isinstance(params, SamplingParams):
                raise TypeError(f"{accepted}; got a list with {type(params).__name__}")
        if len(sampling_params) != count:
            raise ValueError(
                f"sampling_params must be one, or {count}, one per prompt; got {len(sampling_params)}"
            )
        return sampling_params

    def _requests(
        self, prompt: TokenizedPrompt, params: SamplingParams, adapter: str | None
    ) -> list[EngineRequest]:
        """The `n` sequences of a prompt, which differ in their seeds."""
        check_temperature(self._control, params.temperature)
        requests = []
        for k in range(params.n):
            if params.seed is not None:
                seed = params.seed + k
            elif self._seed is not None:
                seed = (self._seed + self._num_sequences) % 2**31
            else:
                seed = secrets.randbelow(2**31)
            self._num_sequences += 1
            seeded = dataclasses.replace(params, seed=seed)
            requests.append(
                EngineRequest(
                    id=f"{self._num_prompts}-{k}",
                    request=Request.of(prompt.token_ids, seeded),
                    control=self._control,
                    prompt_logprobs=params.prompt_logprobs if k == 0 else None,
                    grammar=self._grammars.of(params.structured_outputs),
                    adapter=adapter,
                )
            )
        self._num_prompts += 1
        return requests

    def _decode(self, ids: list[int]) -> str:
        return self._engine.tokenizer.decode(ids, skip_special=False)

    def _complete(self, requests: Sequence[EngineRequest], use_tqdm: bool) -> list[Result]:
        """The result of every request, in their order."""
        order = {request.id: index for index, request in enumerate(requests)}
        results: list[Any] = [None] * len(requests)
        streams: dict[str, OutputStream] = {}
        try:
            with GenerationBar(len(requests), use_tqdm, self._compiled) as bar:
                for request in requests:
                    streams[request.id] = self._engine.submit(request)
                    while len(streams) >= IN_FLIGHT:
                        self._collect(streams, results, order, bar)
                while streams:
                    self._collect(streams, results, order, bar)
        finally:  # interrupted, or refused
            for stream in streams.values():
                stream.cancel()
        return results

    def _collect(
        self, streams: dict[str, OutputStream], results: list[Any], order: Any, bar: GenerationBar
    ) -> None:
        """Wait for a request to end and take its result out of `streams`."""
        bar.update()
        try:
            name = self._finished_requests.ids.get(timeout=CHECK)
        except queue.Empty:
            if (failure := self._engine.failure()) is not None:
                streams.clear()
                raise RuntimeError(f"the engine has failed: {failure}") from failure
            return
        stream = streams.pop(name, None)
        if stream is not None:  # otherwise of a call that was interrupted
            results[order[name]] = result = result_of(stream, self._decode)
            bar.advance(len(result.completion.token_ids))
