"""Offline generation: batches of requests through the decode loop, without the serving engine."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import loop, models, sampling
from entropic_jax.control.scheduling import RowLoad, default_load, relative_load, with_load
from entropic_jax.mesh import sharding
from entropic_jax.methods import cache_compression, presets
from entropic_jax.methods.method import Method
from entropic_jax.pallas.paged_attention.quantised import bytes_per_number
from entropic_jax.parameter_tables.sampling_params import DEVICE_PARAMETERS, recommended
from entropic_jax.parameter_tables.speculation_names import OFF, check_drafter
from entropic_jax.parameter_tables.table import short
from entropic_jax.phases.prefill import PrefillOutput
from entropic_jax.speculation import HeadedDecoder, PassCosts, Speculator, make_speculator
from entropic_jax.speculation.stored_costs import TimedModel, known_costs
from entropic_jax.state import FAILED, FINISH_REASONS, RUNNING, State, Trace, cache

from .. import memory
from ..executable_cache.compilation import notice
from ..options.kv_cache import KvCacheDtype, pages_of
from ..request import Request, RequestError, chat_template
from ..request.token_ids import check_parameters, check_token_ids
from ..request.transcript import TRACE_FIELDS, Completion, Token, Transcript
from .programs import Launch, Programs, generate, prefill

LAUNCH = 64  # most steps of a launch
SPECULATIVE_LAUNCH = 8  # the same where a step is a pass that may emit several tokens
FIRST_LAUNCH, STREAM_LAUNCH = 1, 8  # steps: the first token soon, then a few at a time
MOST_ROWS = 8  # sequences that a step advances
MOST_HELD = 32  # sequences held together where a schedule chooses among them
# Positions. Contexts are rounded up to powers of two, so that few shapes are compiled.
SMALLEST_CONTEXT = 1024


class Engine:
    """A loaded model that continues prompts, in batches, under a preset of control.

    Args:
        model: with a tokenizer.
        preset: the preset of control, with the name of its drafter; None for `off`.
        belief_temperature: T_cal, by which logits are divided before H₁ is measured.
        kv_cache_dtype: the dtype of the KV cache.
    """

    def __init__(
        self,
        model: models.Model,
        preset: presets.Preset | None = None,
        belief_temperature: float = 1.0,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        if model.tokenizer is None:
            raise ValueError("model must have a tokenizer; got one from a directory without tokenizer.json")
        self.model, self.tokenizer = model, model.tokenizer
        chat_template.set_template(self.tokenizer)
        self.preset = presets.preset("off") if preset is None else preset
        check_drafter(self.preset.speculate)
        self.belief_temperature = belief_temperature
        if isinstance(self.preset.page_policy, Method):
            self.preset.page_policy.check_model(model.decoder.shape)
        self.context = model.config.longest_context
        self._programs = Programs()
        self.pages = pages_of(kv_cache_dtype, model.params)
        shape = model.decoder.shape
        itemsize = bytes_per_number(self.pages, shape.head_dim)
        self.position_bytes = memory.page_bytes(shape, 1, itemsize)  # of the KV cache
        notice.watch()  # compression and what `start` allocates are not in the executable cache
        self.memory_sharers = 1  # engines that share the memory of the device

    @property
    def together(self) -> int:
        """Most requests of a batch that are held at once."""
        return MOST_ROWS if self.preset.width is None else MOST_HELD

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The sampling fields that generation_config.json sets; greedy if it says not to sample."""
        return recommended(self.model.generation)

    @property
    def vocabulary(self) -> int:
        """The number of token ids of the model."""
        return self.model.config.vocab_size

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt, as token ids, that the model's chat template makes of the messages."""
        text = chat_template.render(self.tokenizer, messages)
        return self.tokenizer.encode(text, special=False, rendered=True)

    def stream(self, request: Request) -> Iterator[Token]:
        """The tokens of one request as they become certain."""
        prompt = self.prompt_tokens(request)
        self._check_memory(request, prompt)
        for _, transcript, tokens in self._decode([request], [prompt], STREAM_LAUNCH):
            yield from tokens
            if transcript.error:
                raise RequestError(transcript.error)

    def batch(
        self, requests: Sequence[Request], cancelled: threading.Event | None = None
    ) -> Iterator[Completion]:
        """The completions of the requests, in their order.

        Args:
            requests: the requests to complete.
            cancelled: once it is set, the work ends after the launch that runs, with CancelledError.
        """
        for first in range(0, len(requests), self.together):
            group = requests[first : first + self.together]
            prompts: dict[int, list[int]] = {}
            transcripts: dict[int, Transcript] = {}
            for index, request in enumerate(group):
                try:
                    prompts[index] = self.prompt_tokens(request)
                    self._check_memory(request, prompts[index])
                except RequestError as error:
                    prompt = prompts.pop(index, [])
                    transcripts[index] = Transcript(request, self.tokenizer.stream(), len(prompt))
                    transcripts[index].finish("error", str(error))
            for part in self._parts(group, prompts):
                members, texts = [group[i] for i in part], [prompts[i] for i in part]
                for row, transcript, _ in self._decode(members, texts, LAUNCH):
                    transcripts[part[row]] = transcript
                    if cancelled is not None and cancelled.is_set():
                        raise CancelledError
            for index in range(len(group)):
                yield transcripts[index].completion()

    def _parts(self, requests: Sequence[Request], prompts: Mapping[int, list[int]]) -> Iterator[list[int]]:
        """Indices of the requests with a prompt, in parts whose KV caches fit into the memory."""
        parts = [sorted(prompts)] if prompts else []
        while parts:
            part = parts.pop(0)
            needed = max(positions(requests[i], prompts[i]) for i in part)
            if len(part) == 1 or self._fits(power_of_two(len(part)), min(needed, self.context)):
                yield part
            else:
                parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]

    def _fits(self, rows: int, context: int) -> bool:
        available = self._available_memory()
        return available is None or rows * context * self.position_bytes <= available

    def _available_memory(self) -> int | None:
        """This engine's part of the bytes that can be allocated; None if the device does not report them."""
        available = memory.available_memory()
        return None if available is None else available // self.memory_sharers

    def _check_memory(self, request: Request, prompt: Sequence[int]) -> None:
        """Raise RequestError for a request that has not enough memory for itself alone."""
        if not self._fits(1, min(positions(request, prompt), self.context)):
            available = self._available_memory() or 0
            most = max(0, int(available / self.position_bytes) - len(prompt))
            raise RequestError(
                f"max_tokens must be at most {most} after {len(prompt)} tokens of prompt, with "
                f"{memory.gibibytes(available)} of memory available; got {request.max_tokens}",
                "max_tokens",
            )

    def prompt_tokens(self, request: Request) -> list[int]:
        """The request's prompt as token ids; RequestError if the model cannot take it."""
        for name in ("allowed_token_ids", "bad_words"):
            if value := getattr(request, name):
                raise RequestError(f"{name} must be empty offline; got {short(value)}", name)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(request, name)) is not None:
                raise RequestError(f"{name} must be null offline; got {value}", name)
        check_parameters(vars(request), self.vocabulary)
        prompt = request.prompt
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not 0 < len(ids) < self.context:
            raise RequestError(
                f"prompt must have between 1 and {self.context - 1} tokens; got {len(ids)}",
                "prompt",
            )
        check_token_ids("prompt", ids, self.vocabulary)
        return ids

    def _decode(
        self, requests: Sequence[Request], prompts: list[list[int]], launch: int
    ) -> Iterator[tuple[int, Transcript, list[Token]]]:
        """Run the rows to their end; yields (row, transcript, tokens settled) after each launch."""
        eos = self.model.stop_tokens
        transcripts = {
            row: Transcript(request, self.tokenizer.stream(), len(prompts[row]), eos)
            for row, request in enumerate(requests)
            if prompts[row]
        }
        if not transcripts:
            return
        speculator = self._speculator(power_of_two(len(requests)))
        state = self._start(requests, prompts, speculator)
        steps = FIRST_LAUNCH if launch == STREAM_LAUNCH else launch
        open_rows = set(transcripts)
        while open_rows:
            state, trace = self._launch(state, steps, speculator)
            host: Trace = jax.device_get(trace)
            status, ended = np.asarray(state.status), False
            for row in sorted(open_rows):
                settled = self._record(transcripts[row], host, row)
                if transcripts[row].finish_reason is None and status[row] != RUNNING:
                    error = (
                        "the model computed logits that are not numbers" if status[row] == FAILED else None
                    )
                    settled += transcripts[row].finish(FINISH_REASONS[int(status[row])], error)
                if transcripts[row].finish_reason is not None:
                    open_rows.discard(row)
                    ended = True
                yield row, transcripts[row], settled
            closed = [row for row in transcripts if row not in open_rows and status[row] == RUNNING]
            if closed:  # ended by a stop string, which only the host sees
                state = state._replace(status=state.status.at[jnp.array(closed)].set(FAILED))
            if open_rows and not (ended or host.emitted.any()):
                raise RuntimeError("no sequence could advance: the cache has no free page")
            steps = launch

    def _launch(self, state: State, steps: int, speculator: Speculator | None) -> tuple[State, Trace]:
        """Run a launch of the decode loop.

        Args:
            state: consumed.
            steps: the most steps.
            speculator: as for `loop.generate`.
        """
        if self._compresses:
            decoder, params, controller = self.model.decoder, self.model.params, self.preset.controller
            return cache_compression.generate(
                decoder, params, controller, state, steps, **self._options(speculator), speculator=speculator
            )
        return self._programs.run(self._decode_launch(state, steps, speculator))

    @property
    def _compresses(self) -> bool:
        return self.preset.page_policy is not None and self.preset.page_policy.compression is not None

    def _options(self, speculator: Speculator | None) -> dict[str, Any]:
        """The static arguments of `loop.generate`."""
        return dict(capacity=LAUNCH if speculator is None else SPECULATIVE_LAUNCH, width=self.preset.width)

    def _decode_launch(self, state: State, steps: int, speculator: Speculator | None) -> Launch:
        """See `_launch`."""
        options = self._options(speculator)
        steps_left = np.int32(min(steps, options["capacity"]))
        arguments = self.model.params, self.preset.controller, state, steps_left, speculator
        return Launch("decode", partial(generate, self.model.decoder, options), arguments, 2)

    @staticmethod
    def _record(transcript: Transcript, trace: Trace, row: int) -> list[Token]:
        settled: list[Token] = []
        for step in np.flatnonzero(trace.emitted[:, row]):
            if transcript.finish_reason is not None:
                break
            metrics = {name: float(getattr(trace, name)[step, row]) for name in TRACE_FIELDS}
            settled += transcript.add(int(trace.token[step, row]), metrics)
        return settled

    def _speculator(self, rows: int) -> Speculator | None:
        """The speculator for a batch of so many rows."""
        width = rows if self.preset.width is None else min(rows, self.preset.width)
        if self.preset.speculate == OFF:
            return None
        headed = isinstance(self.model.decoder, HeadedDecoder)
        return make_speculator(self.preset.speculate, width, costs=self._pass_costs, headed=headed)

    @cached_property
    def _pass_costs(self) -> PassCosts:
        page_policy, model = self.preset.page_policy, self.model
        page_size = page_policy.page_size if page_policy else cache.default_page_size()
        return known_costs(TimedModel(model.decoder, model.params, page_size, self.pages))

    def _start(
        self, requests: Sequence[Request], prompts: list[list[int]], speculator: Speculator | None
    ) -> State:
        rows = power_of_two(len(requests))
        padding = rows - len(requests)
        needed = max(positions(r, p) for p, r in zip(prompts, requests, strict=True))
        context = min(power_of_two(max(needed, SMALLEST_CONTEXT)), self.context)
        if not self._fits(rows, context):
            context = min(needed, self.context)
        sample = drawing([*requests, *[Request(prompt="")] * padding])
        room = [self.context + 1 - len(prompt) for prompt in prompts]  # a page may end behind the context
        most_tokens = [min(r.max_tokens, most) for r, most in zip(requests, room, strict=True)]
        decoder, page_policy = self.model.decoder, self.preset.page_policy
        page_size = page_policy.page_size if page_policy else None
        state = loop.start(
            decoder,
            self.model.params,
            self.preset.controller,
            sharding.create(
                lambda: cache.allocate(decoder.shape, rows, context, page_size=page_size, dtype=self.pages),
                self.model.mesh,
            ),
            prompts + [[]] * padding,
            key=jax.random.key(0),
            max_tokens=[*most_tokens, *[0] * padding],
            sample=sample,
            seeds=[r.seed for r in requests] + [0] * padding,
            stop=[() if r.ignore_eos else self.model.stop_tokens for r in requests] + [()] * padding,
            page_policy=self.preset.page_policy,
            belief_temperature=self.belief_temperature,
            speculator=speculator,
            launch=partial(self._prefill, speculator),
        )
        lengths = np.array([len(prompt) for prompt in prompts] + [0] * padding, np.int32)
        load = stated_load(lengths, np.array([*most_tokens, *[0] * padding], np.int32))
        return state._replace(control=with_load(state.control, load))

    def _prefill(
        self,
        speculator: Speculator | None,
        decoder: loop.Decoder,
        params: Any,
        state: State,
        chunk: loop.PrefillChunk,
    ) -> tuple[State, PrefillOutput]:
        """`loop.launch_prefill` from the executable cache; the decode program is loaded in parallel.

        Args:
            speculator: as for `loop.generate`.
            decoder: the model's pure functions.
            params: its parameters.
            state: consumed.
            chunk: the tokens, and the rows that they belong to.
        """
        if not self._compresses:
            self._programs.begin(self._decode_launch(state, 0, speculator))
        function = partial(prefill, decoder)
        return self._programs.run(Launch("prefill", function, (params, state, chunk), 1))


def stated_load(prompt_tokens: np.ndarray, max_tokens: np.ndarray) -> RowLoad:
    """The load of rows whose lengths are not known before they end: as if each wrote all that it may.

    Args:
        prompt_tokens: int `[rows]`, tokens of the prompts.
        max_tokens: int `[rows]`, tokens that each row generates at most.

    >>> load = stated_load(np.array([40, 4]), np.array([20, 5]))
    >>> load.cost.tolist(), load.memory.tolist(), load.expected_end.tolist()
    ([1.0, 0.25], [1.0, 0.15000000596046448], [60, 9])
    """
    ends = prompt_tokens + max_tokens
    cost, memory = relative_load(max_tokens, ends, np)
    return default_load(len(ends))._replace(
        cost=jnp.asarray(cost, jnp.float32),
        memory=jnp.asarray(memory, jnp.float32),
        expected_end=jnp.asarray(ends, jnp.int32),
    )


def drawing(requests: Sequence[Request]) -> sampling.Sampling:
    """How each request is to be sampled, one row each."""
    fields = {name: [getattr(r, name) for r in requests] for name in DEVICE_PARAMETERS}
    biases = [r.logit_bias for r in requests]
    slots = power_of_two(max(8, *(len(b) for b in biases), 8))
    return sampling.parameters(len(requests), **fields, logit_bias=biases, bias_slots=slots)


def positions(request: Request, prompt: Sequence[int]) -> int:
    """Positions of a prompt and its continuation, at most."""
    return len(prompt) + request.max_tokens


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()
