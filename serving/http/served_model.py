"""Text side of the served model: its names, tokenizer, chat template and sampling defaults."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from entropic_jax import models

from ..options.generation_config import sampling_defaults
from ..request import RequestError, chat_template, infilling
from ..request.token_ids import check_token_ids


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model as the routes see it. `defaults` are sampling parameters by name."""

    names: tuple[str, ...]
    path: str
    tokenizer: models.Tokenizer
    context: int  # most tokens of a prompt and its continuation together
    vocabulary: int
    stop_tokens: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def encode(
        self,
        prompt: str | Sequence[int],
        special: bool = True,
        name: str = "prompt",
        rendered: bool = False,
    ) -> list[int]:
        """The token ids of a prompt.

        Args:
            prompt: a text, or token ids, which are returned as they are.
            special: add the special tokens that the model expects around a text, such as BOS.
            name: the field of the request that states the prompt, for errors.
            rendered: whether the text is from `chat`.

        Raises:
            RequestError: An id is outside the vocabulary, or tokenizer.json cannot split the text.
        """
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt, special, rendered)
            except models.ModelError as error:
                raise RequestError(f"{name}: {error}", name) from None
        check_token_ids(name, prompt, self.vocabulary)
        return list(prompt)

    def check_length(self, text: str) -> None:
        """Raise RequestError for a text that cannot fit, before tokenizing it costs time and memory."""
        longest = self._longest
        if longest is not None and len(text) > longest * self.context:
            raise RequestError(
                f"prompt must have at most {longest * self.context} characters; no token has more than "
                f"{longest} and the model's maximum context length is {self.context} tokens; got {len(text)}",
                "prompt",
            )

    @functools.cached_property
    def _longest(self) -> int | None:
        """Characters of the longest token; None where a normalizer may shorten the text first."""
        backend = self.tokenizer.backend
        if backend.normalizer is not None:
            return None
        return max(map(len, backend.get_vocab(with_added_tokens=True)))

    def beginning(self) -> list[int]:
        """The prompt that stands for an empty one: the BOS token, if the model has one."""
        begin = self.tokenizer.bos_token
        return [] if begin is None else [self.tokenizer.token_id(begin)]

    @functools.cached_property
    def infilling(self) -> infilling.Infilling | None:
        """How the model fills in the middle of a text; None if it has no tokens for that."""
        return infilling.infilling_of(self.tokenizer)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_last: bool = False,
        variables: Mapping[str, Any] | None = None,
        **stated: Any,
    ) -> str:
        """The prompt that the chat template makes of messages.

        Args:
            messages: objects with `role` and `content`.
            continue_last: end the prompt with the last message, for the model to continue it.
            variables: the client's variables for the template.
            **stated: the server's variables, which the client's override.

        Raises:
            RequestError: The template refuses the messages, or a variable is reserved.
        """
        return chat_template.render(self.tokenizer, messages, variables, continue_last, **stated)

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        tokens = self.tokenizer.encode("a", special=False)
        return tokens, self.tokenizer.decode(tokens, skip_special=False)

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        return {}

    def token_text(self, token: int) -> str:
        """The text of one token with its leading space; U+FFFD stands for a part of a character."""
        text = self._texts.get(token)
        if text is None:
            before, known = self._anchor  # some decoders drop a space at the beginning of a text
            text_after = self.tokenizer.decode([*before, token], skip_special=False)
            text = self._texts[token] = text_after[len(known) :]
        return text


def describe(
    model: models.Model,
    path: str,
    names: Sequence[str],
    context: int,
    template: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> ServedModel:
    """The text side of a loaded model.

    Args:
        model: the model.
        path: its directory, as reported to clients.
        names: names under which requests may ask for it.
        context: most tokens of a prompt and its continuation together.
        template: chat template in place of the model's; without either, the plain one.
        defaults: sampling parameters by name; None is those of the model's generation_config.json.

    Raises:
        RequestError: The model has no tokenizer.
    """
    if model.tokenizer is None:
        raise RequestError(f"--model must be a directory with tokenizer.json; got {path}", "model")
    tokenizer = model.tokenizer
    chat_template.set_template(tokenizer, template)
    return ServedModel(
        names=tuple(names),
        path=path,
        tokenizer=tokenizer,
        context=context,
        vocabulary=model.config.vocab_size,
        stop_tokens=model.stop_tokens,
        defaults=sampling_defaults(model.generation) if defaults is None else defaults,
    )
