"""Structured output: JSON schemas, regular expressions, choices and grammars, compiled for a tokenizer."""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from ..request import RequestError
from . import grammar_check
from .served_model import ServedModel

CACHED_GRAMMARS = 64
# Allowed between the parts of JSON unless a schema says otherwise (`x-guidance`): a line break and indent.
# Without a bound, some models write line breaks until max_tokens.
WHITESPACE = r"\n? {0,16}"
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=50_000, max_grammar_size=100_000
)


class TextGrammar:
    """The state of one text in a grammar (an `engine.interface.Grammar`)."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self.matcher, self.vocabulary = matcher, vocabulary

    def mask(self) -> np.ndarray:
        """Bits int32 `[ceil(vocabulary / 32)]` of the tokens that may come next."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        words = -(-self.vocabulary // 32)
        return np.pad(bits, (0, max(0, words - len(bits))))[:words]

    def accept(self, token: int) -> bool:
        """Advance by a token; False once nothing may follow."""
        return bool(self.matcher.consume_token(token)) and not self.matcher.is_stopped()


class Grammars:
    """Compiles grammars for a model and caches the most recent. Safe to call from any thread."""

    def __init__(self, model: ServedModel, max_characters: int) -> None:
        self.model, self.max_characters = model, max_characters
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    @functools.cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        backend = self.model.tokenizer.backend.to_str()
        return llguidance.LLTokenizer(
            backend, n_vocab=self.model.vocabulary, eos_token=list(self.model.stop_tokens) or None
        )

    def compile(self, name: str, grammar: str) -> TextGrammar:
        """A grammar at its beginning.

        Args:
            name: The field of the request that states the grammar, for errors.
            grammar: In the serialized form of llguidance.

        Raises:
            RequestError: The grammar is invalid, too long or too complex.
        """
        if len(grammar) > self.max_characters:
            raise refused(
                name, f"must have at most {self.max_characters} characters as a grammar; got {len(grammar)}"
            )
        with self._lock:
            cached = grammar in self._compiled
        if not cached and (reason := grammar_check.reason(grammar)) is not None:
            raise refused(name, f"must be a grammar that can be compiled: {reason.splitlines()[0]}")
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
                if matcher.is_error():
                    reason = matcher.get_error().strip().splitlines()[0]
                    raise refused(name, f"must be a grammar that can be compiled: {reason[:300]}")
                self._compiled[grammar] = matcher
                while len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return TextGrammar(matcher.deep_copy(), self.model.vocabulary)


def refused(name: str, message: str) -> RequestError:
    """The error for a field that holds no usable grammar; its `param` is the field of the body it is in."""
    return RequestError(f"{name} {message}", name.partition(".")[0])


def from_schema(name: str, schema: dict[str, Any] | bool | str) -> str:
    """The grammar of JSON that satisfies a schema."""
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema if isinstance(schema, str) else json.dumps(schema),
            defaults={"whitespace_pattern": WHITESPACE},
        )
    except ValueError as error:
        raise refused(name, f"must be a JSON schema: {error}") from None


def any_object() -> str:
    """The grammar of a JSON object."""
    return from_schema("response_format", {"type": "object"})


def from_regex(regex: str) -> str:
    """The grammar of texts that match a regular expression from beginning to end."""
    return llguidance.LLMatcher.grammar_from_regex(regex)


def from_choices(choices: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    return llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def from_text(grammar: str) -> str:
    """The grammar that is written in Lark's or GBNF's form."""
    gbnf = "::=" in grammar
    try:
        lark = llguidance.gbnf_to_lark.gbnf_to_lark(grammar) if gbnf else grammar
    except Exception as error:  # the converter raises errors of many types
        raise refused("structured_outputs.grammar", f"must be in Lark's or GBNF's form: {error}") from None
    return llguidance.LLMatcher.grammar_from_lark(lark)
