"""A back end of `entropic chat`: an engine in this process."""

import argparse
import itertools
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..engine.interface import Engine, EngineRequest
from ..engine.options import EngineOptions
from ..engine.start import start as start_engine
from ..http.served_model import ServedModel, describe
from ..options import generation_config, speculation_options
from ..options.compilation_cache import remember_compilations
from ..options.control_options import Control, build, check_temperature
from ..options.xla_threads import limit_xla_threads
from ..request import Request, RequestError
from ..request.chat_template import DEFAULT_TEMPLATE
from ..request.token_ids import check_parameters
from . import model_options
from .chat_backend import Message, Piece, check_preset

NEXT_TURN = "\n### User"  # where a model that continues the plain template begins to speak for its user
CLOSING = 2.0  # seconds that an engine gets to end


def start(options: argparse.Namespace, control: Control, overrides: dict[str, Any]) -> "LocalChat":
    """A model in this process, behind an engine of one row.

    Args:
        options: the options of the command line.
        control: preset and gains.
        overrides: sampling parameters that the command line states.

    Raises:
        ParameterError: The model or an option cannot be used.
    """
    control = control._replace(
        preset=control.preset or speculation_options.default_preset(method=control.method)
    )
    gains = dict(control.gains)
    build(control._replace(preset="off", gains=()), None, None)  # says which option of a method is wrong
    if options.api_key is not None:
        raise RequestError("--api-key needs --url; got it alone")
    limit_xla_threads(options.model, options.dtype, control.method)
    remember_compilations()
    if sys.stderr.isatty():
        print(f"loading {options.model.name} …", end="\r", file=sys.stderr, flush=True)
    chosen = {name: getattr(options, name) for name in ("dtype", "quantization", "max_model_len")}
    try:
        llm_engine = start_engine(
            options.model,
            EngineOptions(
                **{name: value for name, value in chosen.items() if value is not None},
                max_num_seqs=1,
                parse_special=options.parse_special,
                preset=control.preset,
                method=control.method,
                budgets=control.budgets,
                prefill_options=control.prefill_options,
                clarification=gains.get("clarification", ""),
                branches=gains.get("branches"),
                **({"law": gains["law"]} if "law" in gains else {}),
            ),
            control=control,
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise model_options.loading_error(options, error) from error
    defaults = generation_config.sampling_defaults(llm_engine.model.generation)
    name = options.model.resolve().name
    model = describe(llm_engine.model, str(options.model), (name,), llm_engine.context, defaults=defaults)
    try:
        check_parameters(overrides, model.vocabulary)
    except RequestError:
        llm_engine.close(timeout=CLOSING)
        raise
    overrides.setdefault("seed", secrets.randbelow(2**31))
    return LocalChat(llm_engine, model, control, overrides)


class LocalChat:
    """An engine in this process."""

    def __init__(
        self, engine: Engine, model: ServedModel, control: Control, overrides: Mapping[str, Any]
    ) -> None:
        """A back end over a running engine.

        Args:
            engine: generates the answers.
            model: its text side.
            control: preset and gains.
            overrides: sampling parameters that take precedence over the model's defaults.
        """
        self.engine, self.model, self.control = engine, model, control
        self.overrides = dict(overrides)
        self._numbers = itertools.count()

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.model.names[0]

    @property
    def preset(self) -> str:
        """The preset of control."""
        return self.control.preset

    def presets(self) -> Sequence[str]:
        """The presets that this engine accepts."""
        return tuple(self.engine.snapshot().get("presets", ("off",)))

    def use_preset(self, preset: str) -> None:
        """Control the answers to come by a preset, with its default gains."""
        check_preset(preset, self.presets())
        self.control = self.control._replace(preset=preset, gains=())

    def reply(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """The answer to a conversation as it is generated."""
        number = next(self._numbers)
        text = self.model.chat(messages, add_generation_prompt=True)
        prompt = self.model.encode(text, special=False, rendered=True)
        context = self.model.context
        if len(prompt) >= context:
            raise RequestError(
                f"the conversation must have at most {context - 1} tokens (/reset begins another); "
                f"got {len(prompt)}"
            )
        fields: dict[str, Any] = {"max_tokens": context, "seed": 0, **self.model.defaults, **self.overrides}
        if self.model.tokenizer.chat_template == DEFAULT_TEMPLATE:
            fields.setdefault("stop", [NEXT_TURN])
        fields["seed"] += number
        request, room = Request(prompt=prompt, **fields), context - len(prompt)
        request = request.replace(
            max_tokens=min(request.max_tokens, room), min_tokens=min(request.min_tokens, room)
        )
        check_temperature(self.control, request.temperature)
        output_stream = self.engine.submit(
            EngineRequest(id=f"chat-{number}", request=request, control=self.control)
        )
        try:
            for delta in output_stream:
                for token in delta.tokens:
                    yield Piece(token.text, token.metrics.get("entropy"))
                if delta.finish_reason == "error":
                    raise RequestError(delta.error or "the model computed no usable logits")
                if delta.finish_reason is not None:
                    yield Piece("", finish_reason=delta.finish_reason)
                    return
        finally:
            output_stream.cancel()

    def close(self) -> bool:
        """End the engine, and return whether its threads have ended; some may be compiling."""
        return self.engine.close(timeout=CLOSING)
