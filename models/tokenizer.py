"""Text to tokens and back: a thin layer over `tokenizers`, streaming included, and chat templates."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from . import chat_templates
from .chat_templates import DEFAULT, TOOL_USE
from .config import ModelError
from .tokenizer_files import SPECIAL_TOKENS, SURROUNDING, is_there, read_backend

REPLACEMENT = "\ufffd"  # what bytes that are no character decode to
CONTEXT = 8  # tokens; how a token decodes depends on fewer before it
LONG_TEXT = 4096  # characters from which a text is encoded beside other threads
LONGEST_CHARACTER = 4  # bytes of UTF-8, so at most as many tokens
MARK = "\ufdd0"  # no character: stands between the characters of a special token that is plain text


class Tokenizer:
    """The tokenizer of a model directory.

    Args:
        backend: what tokenizer.json describes.
        settings: tokenizer_config.json. Its `add_bos_token` and `add_eos_token`, where they are true or
            false, overrule what the backend adds around a text. With `split_special_tokens`, a text holds no
            special tokens.
        chat_template: in Jinja; None where the model has none. `set_templates` gives it several.
        parse_special: whether special tokens in the text of a user are what they mean to the model; if not,
            they are plain text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        parse_special: bool = True,
    ) -> None:
        self.parse_special = parse_special
        self.backend, self.settings = backend, dict(settings or {})
        self.chat_template = chat_template
        self.named_templates: dict[str, str] = {}  # others than the default
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = bool(self.settings.get("split_special_tokens"))
        self._surround_texts()

    def _surround_texts(self) -> None:
        """Makes what is added around a text follow the settings; what they leave open stays."""
        stated = [self.settings.get(name) for name in SURROUNDING]
        if stated == [None, None]:
            return
        bare, full = (self.backend.encode("a", add_special_tokens=flag).tokens for flag in (False, True))
        first = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        added = [full[:first], full[first + len(bare) :]]
        for i, (flag, token) in enumerate(zip(stated, (self.bos_token, self.eos_token), strict=True)):
            if flag is not None:
                added[i] = [token] if flag and token is not None else []
        before, after = added
        self.backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, self.token_id(token)) for token in dict.fromkeys(before + after)],
        )

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer | None":
        """Read tokenizer.json and the files next to it; None where there is none. Raises ModelError.

        What stands around a text is what tokenizer.json adds, as in transformers 5, whatever
        `add_bos_token` and `add_eos_token` say.
        """
        if not is_there(directory / "tokenizer.json"):
            return None
        backend, settings = read_backend(directory)
        try:
            tokenizer = cls(backend, settings)
        except ModelError as error:
            raise ModelError(f"{directory / 'tokenizer_config.json'}: {error}") from None
        tokenizer.set_templates(chat_templates.read_templates(directory, settings))
        return tokenizer

    def set_templates(self, templates: Mapping[str, str]) -> None:
        """Give it these chat templates, by name, in place of all that it has."""
        self.chat_template = templates.get(DEFAULT)
        self.named_templates = {name: text for name, text in templates.items() if name != DEFAULT}

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, the chat templates inside the latter."""
        self.backend.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings}
        templates = {} if self.chat_template is None else {DEFAULT: self.chat_template}
        if self.named_templates:
            pairs = {**templates, **self.named_templates}.items()
            settings["chat_template"] = [{"name": name, "template": text} for name, text in pairs]
        elif templates:
            settings["chat_template"] = self.chat_template
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, "utf-8")

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, the added ones included. The model may have more rows than that."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text, as text."""
        return self._named("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, as text."""
        return self._named("eos_token")

    def _named(self, name: str) -> str | None:
        value = self.settings.get(name)
        return value.get("content") if isinstance(value, Mapping) else value

    def token_id(self, token: str) -> int:
        """Number of a token given as text. ModelError where it is not in the vocabulary."""
        number = self.backend.token_to_id(token)
        if number is None:
            raise ModelError(f"token must be one of the {self.vocabulary} in tokenizer.json; got {token!r}")
        return number

    def encode(self, text: str, special: bool = True, rendered: bool = False) -> list[int]:
        """Token numbers of a text.

        Args:
            text: the text of a user, or from `chat`.
            special: whether what the model expects around a text (BOS) is added.
            rendered: whether the text is from `chat`, whose special tokens outside of the messages are parsed
                in any case.

        Raises:
            ModelError: an expression of tokenizer.json gives up on the text.
        """
        backend = self.backend
        if not self.parse_special and (MARK in text or not rendered):
            backend = self._backend_of_chats if rendered else self._backend_of_plain_text
        try:
            if len(text) < LONG_TEXT:
                return backend.encode(text, add_special_tokens=special).ids
            # `encode` lets no other thread of Python run, for seconds where a text is long.
            return backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the bindings panic, which is no `Exception`
            reason = " ".join(str(error).split())
            raise ModelError(f"text must be one that tokenizer.json can split; got {reason!r}") from None

    @functools.cached_property
    def _backend_of_plain_text(self) -> tokenizers.Tokenizer:
        """A copy of the backend to which no text holds special tokens."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def _backend_of_chats(self) -> tokenizers.Tokenizer:
        """A copy of the backend that drops marks after it has looked for special tokens."""
        described = json.loads(self.backend.to_str())
        for token in described["added_tokens"]:
            token["normalized"] &= not token["special"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(described))
        drop = normalizers.Replace(MARK, "")
        original = backend.normalizer
        backend.normalizer = drop if original is None else normalizers.Sequence([drop, original])
        return backend

    @functools.cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        added = self.backend.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def escape(self, value: Any) -> Any:
        """A message, or a part of one, in which special tokens are marked as plain text.

        With `parse_special` it is the message itself.
        """
        if self.parse_special:
            return value
        if isinstance(value, str):
            return self._special_tokens.sub(lambda match: MARK.join(match[0]), value.replace(MARK, ""))
        if isinstance(value, Mapping):
            return {key: self.escape(inner) for key, inner in value.items()}
        return [self.escape(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """The text of tokens."""
        return self.backend.decode(list(tokens), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> "Detokenizer":
        """A decoder that takes one token at a time."""
        return Detokenizer(self, skip_special)

    def template_for(self, tools: Any) -> str | None:
        """The chat template of conversations with such tools, or without any if they are None."""
        named = None if tools is None else self.named_templates.get(TOOL_USE)
        return self.chat_template if named is None else named

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation after the model's template.

        Encode it with `special=False` and `rendered=True`.

        The template comes with the model and is not trusted: see `chat_templates`.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: whether the text ends where the answer begins.
            tools: the tools that the model may call, in OpenAI's form.
            **variables: whatever else the template reads.

        Raises:
            ModelError: there is no template, it rejects the messages, or it takes too long.
        """
        template = self.template_for(tools)
        if template is None:
            raise ModelError("the model directory has no chat_template.jinja, which a conversation requires")
        named = {name: token for name in SPECIAL_TOKENS if (token := self._named(name)) is not None}
        stated = {
            "messages": [dict(self.escape(m)) for m in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        others = {"tools": tools, "documents": None, **variables}
        return chat_templates.render(template, {**named, **stated, **others})


class Detokenizer:
    """Text of a growing sequence, released as soon as it is final, at constant cost per token.

    Tokens wait while they end inside a UTF-8 character. They are decoded after the tokens released last,
    since some decoders treat the beginning of a text differently (sentencepiece drops a space there). All
    that `push` and `flush` return, joined, is what `Tokenizer.decode` makes of the whole sequence. (For bytes
    that form no character it may not be, where a decoder judges a run of bytes by the later ones too.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._decode = lambda tokens: tokenizer.decode(tokens, skip_special)
        added = tokenizer.backend.get_added_tokens_decoder()
        self._skipped = {number for number, token in added.items() if skip_special and token.special}
        self._context: list[int] = []  # released last
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token makes final, possibly empty."""
        if token in self._skipped:
            return ""
        self._waiting.append(token)
        if self._text().endswith(REPLACEMENT):
            return self._release(self._clean_cut())
        return self._release(len(self._waiting))

    def flush(self) -> str:
        """The text still waiting when the sequence ends, with U+FFFD for an unfinished character."""
        return self._release(len(self._waiting))

    def _text(self) -> str:
        """The text that the waiting tokens add."""
        return self._decode(self._context + self._waiting)[len(self._decode(self._context)) :]

    def _clean_cut(self) -> int:
        """How many waiting tokens are final although the last ones end inside a character.

        Only bytes that form no character make more than four tokens wait. They are cut where both sides,
        decoded apart, give the same text as together.
        """
        count = len(self._waiting)
        if count <= LONGEST_CHARACTER:
            return 0
        text = self._decode(self._waiting)
        for split in range(count - 1, count - 1 - LONGEST_CHARACTER, -1):
            if self._decode(self._waiting[:split]) + self._decode(self._waiting[split:]) == text:
                return split
        return count - LONGEST_CHARACTER  # no cut is clean: what waits stays short

    def _release(self, count: int) -> str:
        if not count:
            return ""
        self._waiting, rest = self._waiting[:count], self._waiting[count:]
        text = self._text()
        # Without text of their own, tokens may still be what makes the next one's space count: keep a few.
        kept = [] if text else self._context
        self._context = (kept + self._waiting)[-CONTEXT:]
        self._waiting = rest
        return text
