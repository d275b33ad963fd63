"""The text side of the model that is served: its names, its tokenizer, its template, its defaults."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from entropic_jax import models, sampling_params

from ..request import RequestError

# For models that bring none. Headings are what base models know from prose, and comments to those of code.
DEFAULT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
### {{ message.role | capitalize }}
{{ message.content }}

{% endfor %}{% if add_generation_prompt %}
### Assistant
{% endif %}"""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """What the routes need to know of a model. `defaults` are sampling fields of `Request`."""

    names: tuple[str, ...]
    path: str
    tokenizer: models.Tokenizer
    context: int  # most tokens of a prompt and its continuation together
    vocabulary: int
    stop_tokens: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, prompt: str | Sequence[int], special: bool = True, name: str = "prompt") -> list[int]:
        """Token ids of a text, or those given; RequestError, by `name`, where the model does not know one."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special)
        if (wrong := max(prompt, default=0)) >= self.vocabulary:
            raise RequestError(f"{name} holds the token {wrong}; accepted are 0 to {self.vocabulary - 1}")
        return list(prompt)

    def check_length(self, text: str) -> None:
        """RequestError where a text cannot fit, however it is cut: to cut it would take time and memory."""
        longest = self._longest
        if longest is not None and len(text) > longest * self.context:
            raise RequestError(
                f"prompt has {len(text)} characters; accepted are at most {longest * self.context}: no token "
                f"has more than {longest}, and the model's maximum context length is {self.context} tokens"
            )

    @functools.cached_property
    def _longest(self) -> int | None:
        """Characters of the longest token; None where cutting may shorten a text first."""
        backend = self.tokenizer.backend
        if backend.normalizer is not None:
            return None
        return max(map(len, backend.get_vocab(with_added_tokens=True)))

    def beginning(self) -> list[int]:
        """What an empty prompt is read as: the token that begins all texts, where the model has one."""
        begin = self.tokenizer.bos_token
        return [] if begin is None else [self.tokenizer.token_id(begin)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_last: bool = False,
        variables: Mapping[str, Any] | None = None,
        **stated: Any,
    ) -> str:
        """The text that the template makes of messages; RequestError if it does not accept them."""
        named = dict(variables or {})
        if clash := sorted({"messages", "chat_template"} & named.keys()):
            raise RequestError(f"chat_template_kwargs holds {clash[0]}; accepted are other variables")
        try:
            text = self.tokenizer.chat(messages, **{**stated, **named})
        except models.ModelError as error:
            raise RequestError(str(error)) from None
        if continue_last:
            content = str(messages[-1].get("content", "")).rstrip()
            place = text.rfind(content)
            if place < 0:
                raise RequestError(
                    "continue_final_message is true; accepted where the chat template keeps the content of "
                    "the last message as it is"
                )
            text = text[: place + len(content)] if content else text.rstrip()
        return text

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        tokens = self.tokenizer.encode("a", special=False)
        return tokens, self.tokenizer.decode(tokens, skip_special=False)

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        return {}

    def token_text(self, token: int) -> str:
        """The text of one token by itself, its leading space included, U+FFFD for a part of a character."""
        text = self._texts.get(token)
        if text is None:
            before, known = self._anchor  # some decoders drop a space at the beginning of a text
            whole = self.tokenizer.decode([*before, token], skip_special=False)
            text = self._texts[token] = whole[len(known) :]
        return text


def describe(
    model: models.Model,
    path: str,
    names: Sequence[str],
    context: int,
    template: str | None = None,
    recommended: bool = True,
) -> ServedModel:
    """The text side of a loaded model.

    `template` defaults to the model's, else DEFAULT_TEMPLATE. The sampling defaults are those of
    generation_config.json if `recommended`.
    """
    if model.tokenizer is None:
        raise RequestError(f"--model is {path}: it has no tokenizer.json; accepted is a directory with it")
    tokenizer = model.tokenizer
    tokenizer.chat_template = template or tokenizer.chat_template or DEFAULT_TEMPLATE
    return ServedModel(
        names=tuple(names),
        path=path,
        tokenizer=tokenizer,
        context=context,
        vocabulary=model.config.vocab_size,
        stop_tokens=model.stop_tokens,
        defaults=sampling_params.recommended(model.generation) if recommended else {},
    )
