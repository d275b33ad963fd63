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
NO_TOKEN = "no token may come next, although the text is not complete"
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class TextGrammar:
    """The state of one text in a grammar (an `engine.interface.Grammar`)."""

    def __init__(self, matcher: Any, vocabulary: int, name: str) -> None:
        """The state before the first token.

        Args:
            matcher: An `llguidance.LLMatcher` that nothing else advances.
            vocabulary: Number of token ids, which sets the size of the mask.
            name: The field of the request that states the grammar, for errors.
        """
        self.matcher, self.vocabulary, self.name = matcher, vocabulary, name
        self.failure: RequestError | None = None

    def mask(self) -> np.ndarray:
        """Bits int32 `[ceil(vocabulary / 32)]` of the tokens that may come next.

        Raises:
            RequestError: No token may come next although the text is not complete, or the grammar has become
                too complex.
        """
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        self._check()
        words = -(-self.vocabulary // 32)
        return np.pad(bits, (0, max(0, words - len(bits))))[:words]

    def accept(self, token: int) -> bool:
        """Advance by a token; False once nothing may follow. Raises as `mask`."""
        consumed = self.matcher.consume_token(token)
        self._check()
        if not consumed:
            raise self._failed(f"token {token} may not come next")
        return not self.matcher.is_stopped()

    def _check(self) -> None:
        """Raise RequestError if the matcher has failed, which it says in no other way."""
        if self.matcher.is_error():
            raise self._failed(error_of(self.matcher))

    def _failed(self, reason: str) -> RequestError:
        self.failure = refused(self.name, f"must be a grammar that a text can satisfy: {reason}")
        return self.failure


class Grammars:
    """Compiles grammars for a model and caches the most recent. Safe to call from any thread."""

    def __init__(self, model: ServedModel, max_characters: int) -> None:
        self.model, self.max_characters = model, max_characters
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def is_hard(self, grammar: str) -> bool:
        """Whether compiling it may take long: it is not cached, and needs a trial."""
        with self._lock:
            return grammar not in self._compiled and grammar_check.needs_trial(grammar)

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
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(name, grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return TextGrammar(matcher.deep_copy(), self.model.vocabulary, name)

    def _compile(self, name: str, grammar: str) -> Any:
        """The matcher of a grammar that some token can begin."""
        if len(grammar) > self.max_characters:
            raise refused(
                name, f"must have at most {self.max_characters} characters as a grammar; got {len(grammar)}"
            )
        if (reason := grammar_check.reason(grammar)) is not None:
            raise refused(name, f"must be a grammar that can be compiled: {reason.splitlines()[0]}")
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refused(name, f"must be a grammar that can be compiled: {error_of(matcher)}")
        TextGrammar(matcher.deep_copy(), self.model.vocabulary, name).mask()
        return matcher


def error_of(matcher: Any) -> str:
    """What is wrong with a matcher that has failed, in one line."""
    lines = matcher.get_error().strip().splitlines() or ["unknown error"]
    return NO_TOKEN if lines[0].startswith("NoExtensionBias") else lines[0][:300]


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
