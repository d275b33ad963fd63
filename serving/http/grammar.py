"""What a text must be: JSON schemas, expressions, choices and grammars, compiled against the tokenizer."""

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

REMEMBERED = 64  # compiled grammars
# Between the parts of JSON, unless a schema says otherwise (`x-guidance`): enough for a line and its indent.
# Without a bound, a model that likes line breaks writes nothing else until its tokens are spent.
WHITESPACE = r"\n? {0,16}"
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=50_000, max_grammar_size=100_000
)


class TextGrammar:
    """Follows one text (`job.Grammar`)."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self.matcher, self.vocabulary = matcher, vocabulary

    def mask(self) -> np.ndarray:
        """Bits int32 `[ceil(vocabulary / 32)]` of the tokens that may come next."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        wanted = -(-self.vocabulary // 32)
        return np.pad(bits, (0, max(0, wanted - len(bits))))[:wanted]

    def accept(self, token: int) -> bool:
        """Take a token; False once nothing may follow it."""
        return bool(self.matcher.consume_token(token)) and not self.matcher.is_stopped()


class Grammars:
    """Compiles grammars for a model and remembers the latest. May be called from any thread."""

    def __init__(self, model: ServedModel, most_characters: int) -> None:
        self.model, self.most_characters = model, most_characters
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    @functools.cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        backend = self.model.tokenizer.backend.to_str()
        return llguidance.LLTokenizer(
            backend, n_vocab=self.model.vocabulary, eos_token=list(self.model.stop_tokens) or None
        )

    def compile(self, name: str, grammar: str) -> TextGrammar:
        """A fresh follower of a grammar; RequestError, with the reason, if `name` holds none."""
        if len(grammar) > self.most_characters:
            raise RequestError(
                f"{name} has {len(grammar)} characters as a grammar; "
                f"accepted are at most {self.most_characters}"
            )
        with self._lock:
            known = grammar in self._compiled
        if not known and (why := grammar_check.reason(grammar)) is not None:
            raise RequestError(f"{name} is not accepted: {why.splitlines()[0]}")
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
                if matcher.is_error():
                    reason = matcher.get_error().strip().splitlines()[0]
                    raise RequestError(f"{name} is not accepted: {reason[:300]}")
                self._compiled[grammar] = matcher
                while len(self._compiled) > REMEMBERED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return TextGrammar(matcher.deep_copy(), self.model.vocabulary)


def from_schema(name: str, schema: dict[str, Any] | bool | str) -> str:
    """The grammar of JSON after a schema."""
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema if isinstance(schema, str) else json.dumps(schema),
            defaults={"whitespace_pattern": WHITESPACE},
        )
    except ValueError as error:
        raise RequestError(f"{name} is not a JSON schema: {error}") from None


def any_object() -> str:
    """The grammar of a JSON object."""
    return from_schema("response_format", {"type": "object"})


def from_regex(regex: str) -> str:
    """The grammar of a regular expression, which the whole text must match."""
    return llguidance.LLMatcher.grammar_from_regex(regex)


def from_choices(choices: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    return llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def from_text(grammar: str) -> str:
    """The grammar that a text in Lark's or GBNF's form describes."""
    gbnf = "::=" in grammar
    try:
        lark = llguidance.gbnf_to_lark.gbnf_to_lark(grammar) if gbnf else grammar
    except Exception as error:  # a converter of text by hand, which raises whatever it meets
        raise RequestError(f"structured_outputs.grammar is not accepted: {error}") from None
    return llguidance.LLMatcher.grammar_from_lark(lark)
