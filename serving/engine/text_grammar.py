"""Grammars of texts, compiled for the tokenizer of a model, and the state of one text in a grammar."""

import bisect
import copy
import functools
import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import llguidance
import numpy as np

from entropic_jax.models import Tokenizer

from ..request import RequestError
from . import grammar_check, schema_check
from .grammar_forms import Constraint, refused
from .interface import LONGEST_FREE_RUN, FreeRun, Grammar

CACHED_GRAMMARS = 64
CACHED_BYTES = 256 << 20  # of their estimated sizes
MOST_CHARACTERS = 1_000_000  # of a grammar in its serialized form, unless a server states its own
NOT_PLAIN = re.compile(r'["\\\x00-\x1f\x7f]')  # ends or escapes text in a string, or may not be in one
MARK = re.compile(rb"[ \n\t!-/:-@\[-`{-~]+")  # text of ASCII without letters and digits
PLAIN_CHARACTERS = 8  # of a token of plain text, at most
SHORTEST_FREE_RUN = 8  # tokens of plain text; a shorter one is not worth its check
NO_TOKEN = "no token may come next, although the text is not complete"


class PlainText(NamedTuple):
    """The tokens of which the contents of strings mostly consist."""

    bits: np.ndarray  # int32 [ceil(vocabulary / 32)], the set
    filler: int  # the one among them that has the most letters and nothing else; -1 if there is none
    letters: int  # of the filler


class TextModel(Protocol):
    """The text side of a model, as a grammar has to know it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""

    @property
    def stop_tokens(self) -> Collection[int]:
        """The tokens that end a text."""


class Compiled:
    """A compiled grammar, which nothing has advanced.

    Args:
        matcher: an `llguidance.LLMatcher`.
        size: bytes of memory that it takes, about.
    """

    def __init__(self, matcher: Any, size: int) -> None:
        self.matcher, self.size = matcher, size


class TextGrammar(Grammar):
    """The state of one text in a grammar."""

    def __init__(
        self,
        matcher: Any,
        vocabulary: int,
        name: str,
        tokenizer: llguidance.LLTokenizer | None = None,
        pausing: np.ndarray | None = None,
        marks: Mapping[int, bytes] | None = None,
        plain: PlainText | None = None,
    ) -> None:
        """The state before the first token.

        Args:
            matcher: an `llguidance.LLMatcher` that nothing else advances.
            vocabulary: number of token ids, which sets the size of the mask.
            name: the field of the request that states the grammar, for errors.
            tokenizer: writes text that is forced in tokens; None forces none.
            pausing: bits of the tokens with which free text may come to its end (`free_text`); None if the
                grammar has no free text.
            marks: see `Grammar`; None for none.
            plain: tokens in which free runs are guessed; None guesses none.
        """
        self.matcher, self.vocabulary, self.name = matcher, vocabulary, name
        self._failure: RequestError | None = None
        self._tokenizer, self._pausing, self._marks = tokenizer, pausing, marks or {}
        self._plain, self._mask = plain, np.zeros(0, np.int32)  # the last mask

    @property
    def failure(self) -> RequestError | None:
        """See `Grammar`."""
        return self._failure

    def mask(self) -> np.ndarray:
        """Bits int32 `[ceil(vocabulary / 32)]` of the tokens that may come next.

        Raises:
            RequestError: No token may come next although the text is not complete, or the grammar has become
                too complex.
        """
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        self._check()
        words = -(-self.vocabulary // 32)
        self._mask = np.pad(bits, (0, max(0, words - len(bits))))[:words]
        return self._mask

    def accept(self, token: int) -> bool:
        """Advance by a token; False once nothing may follow. Raises as `mask`."""
        consumed = self.matcher.consume_token(token)
        self._check()
        if not consumed:
            raise self._failed(f"token {token} may not come next")
        return not self.matcher.is_stopped()

    def copy(self) -> "TextGrammar":
        """See `Grammar`."""
        matcher = self.matcher.deep_copy()
        result = copy.copy(self)
        result.matcher = matcher
        return result

    def forced(self) -> list[int]:
        """See `Grammar`."""
        text = self.matcher.compute_ff_bytes()
        return self._tokenizer.tokenize_bytes(text) if text and self._tokenizer is not None else []

    def marks(self) -> Mapping[int, bytes]:
        """See `Grammar`."""
        return self._marks

    def free_run(self) -> FreeRun | None:
        """See `Grammar`: free text, or plain text in a string, which a filler stands for."""
        if self._pausing is not None and (self._mask | self._pausing == -1).all():
            return FreeRun(self._pausing)
        plain = self._plain
        if plain is None or plain.filler < 0 or not (self._mask | ~plain.bits == -1).all():
            return None
        tokens = self._run_length(plain)
        return FreeRun(~plain.bits, tokens) if tokens else None

    def _run_length(self, plain: PlainText) -> int:
        """Tokens of plain text after which the mask is still the same, as far as it is tried; 0 for few."""

        def holds(tokens: int) -> bool:
            ahead = self.matcher.deep_copy()
            fillers = -(-tokens * PLAIN_CHARACTERS // plain.letters)
            if not ahead.consume_tokens([plain.filler] * fillers) or ahead.is_error() or ahead.is_stopped():
                return False
            bits = np.frombuffer(ahead.compute_bitmask(), np.int32)[: len(self._mask)]
            return np.array_equal(bits, self._mask[: len(bits)])

        if not holds(SHORTEST_FREE_RUN):
            return 0
        lengths = range(SHORTEST_FREE_RUN, LONGEST_FREE_RUN + 1)
        if holds(LONGEST_FREE_RUN):
            return LONGEST_FREE_RUN
        # The last that holds: where a string is bounded, none does after the first that does not.
        return lengths[bisect.bisect_left(lengths, True, key=lambda tokens: not holds(tokens)) - 1]

    def _check(self) -> None:
        """Raise RequestError if the matcher has failed, which it says in no other way."""
        if self.matcher.is_error():
            raise self._failed(error_of(self.matcher))

    def refuse(self, reason: str) -> RequestError:
        """See `Grammar`."""
        self._failure = refused(self.name, f"must be a grammar {reason}")
        return self._failure

    def _failed(self, reason: str) -> RequestError:
        return self.refuse(f"that a text can satisfy: {reason}")


class Grammars:
    """Compiles grammars for a model and caches the most recent. Safe to call from any thread.

    Args:
        model: the model whose tokens the texts have.
        max_characters: characters of a grammar, at most.
    """

    def __init__(self, model: TextModel, max_characters: int = MOST_CHARACTERS) -> None:
        self.model, self.max_characters = model, max_characters
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        # Those whose compiling waits for a use, too, which would else be compiled anew by other threads.
        self._alive: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()

    def is_hard(self, grammar: str) -> bool:
        """Whether compiling it may take long: it is not cached, and needs a trial."""
        with self._lock:
            return grammar not in self._alive and grammar_check.needs_trial(grammar)

    @functools.cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            known_tokens(self.model.tokenizer.backend.to_str(), self.model.vocabulary),
            n_vocab=self.model.vocabulary,
            eos_token=list(self.model.stop_tokens) or None,
        )

    @functools.cached_property
    def _marks(self) -> dict[int, bytes]:
        return marks_of(self._tokenizer, self.model.vocabulary)

    @functools.cached_property
    def _plain(self) -> PlainText:
        return plain_text(self._tokenizer, self.model.vocabulary)

    @functools.lru_cache  # noqa: B019  (one instance lives as long as the server)
    def _free_text(self, markers: tuple[str, ...]) -> np.ndarray:
        return free_text(self._tokenizer, self.model.vocabulary, markers)

    def prepare(self, constraint: Constraint) -> Compiled:
        """A compiled grammar, which `compile` finds as long as it is held.

        Args:
            constraint: states the grammar.

        Raises:
            RequestError: The grammar is invalid, too long or too complex.
        """
        grammar = constraint.grammar
        with self._lock:
            compiled = self._alive.get(grammar)
        if compiled is None:
            compiled = self._compile(constraint)
        with self._lock:
            self._compiled[grammar] = self._alive[grammar] = compiled
            self._compiled.move_to_end(grammar)
            size = sum(kept.size for kept in self._compiled.values())
            while len(self._compiled) > CACHED_GRAMMARS or (size > CACHED_BYTES and len(self._compiled) > 1):
                size -= self._compiled.popitem(last=False)[1].size
        return compiled

    def compile(
        self, name: str, grammar: str, markers: tuple[str, ...] = (), fields: tuple[str, ...] = ()
    ) -> TextGrammar:
        """A grammar at its beginning.

        Args:
            name: the field of the request that states the grammar, for errors.
            grammar: in the serialized form of llguidance.
            markers: as in `Constraint`, with which free text may end.
            fields: as in `Constraint`, for errors of single schemas.

        Raises:
            RequestError: The grammar is invalid, too long or too complex.
        """
        compiled = self.prepare(Constraint(name, grammar, markers, fields))
        return TextGrammar(
            compiled.matcher.deep_copy(),
            self.model.vocabulary,
            name,
            self._tokenizer,
            self._free_text(markers) if markers else None,
            self._marks,
            self._plain,
        )

    def _compile(self, constraint: Constraint) -> Compiled:
        """A grammar that some token can begin, and whose schemas admit a finite value."""
        name, grammar = constraint.name, constraint.grammar
        if len(grammar) > self.max_characters:
            raise refused(
                name, f"must have at most {self.max_characters} characters as a grammar; got {len(grammar)}"
            )
        tried = grammar_check.trial(grammar)
        if tried.reason is not None:
            raise _cannot_compile(constraint, tried.reason.splitlines()[0], tried.part)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammar_check.LIMITS)
        if matcher.is_error():
            raise _cannot_compile(constraint, error_of(matcher), grammar_check.refused_part(grammar))
        TextGrammar(matcher.deep_copy(), self.model.vocabulary, name).mask()
        endless = schema_check.part_without_end(grammar)
        if endless is not None:
            raise refused(
                _field(constraint, endless),
                "must be a grammar that a text can satisfy: its schema admits no finite value",
            )
        return Compiled(matcher, tried.size)


def _cannot_compile(constraint: Constraint, reason: str, part: int | None) -> RequestError:
    """The error for a grammar that cannot be compiled.

    Args:
        constraint: states the grammar.
        reason: why it is refused.
        part: the place of the schema that is refused, among those of the grammar; None if it is no schema.
    """
    kind = "grammar" if part is None or not constraint.fields else "JSON schema"
    return refused(_field(constraint, part), f"must be a {kind} that can be compiled: {reason}")


def _field(constraint: Constraint, part: int | None) -> str:
    """The field that states a schema of a grammar; that of the constraint if it states all of it."""
    return constraint.name if part is None or not constraint.fields else constraint.fields[part]


def free_text(tokenizer: llguidance.LLTokenizer, vocabulary: int, markers: Sequence[str]) -> np.ndarray:
    """The tokens with which free text may come to its end; in bits int32 `[ceil(vocabulary / 32)]`.

    They are those that can complete a marker, end in the middle of a character, or are not text. Where all
    others are allowed, they stay so until one of these has come.

    Args:
        tokenizer: the tokenizer of the grammar.
        vocabulary: number of token ids.
        markers: texts; special tokens among them are never text.
    """
    endings = [(marker.encode()[i:], i == 0) for marker in markers for i in range(len(marker.encode()))]
    bits = np.ones(-(-vocabulary // 32) * 32, np.uint8)
    for token in range(min(vocabulary, tokenizer.vocab_size)):
        text = tokenizer.decode_bytes([token])
        if tokenizer.is_special_token(token) or not text or not _is_text(text):
            continue
        # Parts of the marker before this token end where the token begins.
        bits[token] = any(end in text if is_all else text.startswith(end) for end, is_all in endings)
    return np.packbits(bits, bitorder="little").view(np.int32)


def marks_of(tokenizer: llguidance.LLTokenizer, vocabulary: int) -> dict[int, bytes]:
    """The texts of the tokens that are marks, see `Grammar`.

    Args:
        tokenizer: the tokenizer of the grammar.
        vocabulary: number of token ids.
    """
    marks = {}
    for token in range(min(vocabulary, tokenizer.vocab_size)):
        text = tokenizer.decode_bytes([token])
        if MARK.fullmatch(text) and not tokenizer.is_special_token(token):
            marks[token] = text
    return marks


def plain_text(tokenizer: llguidance.LLTokenizer, vocabulary: int) -> PlainText:
    """The tokens of a few characters that neither end a string of JSON nor escape anything in it.

    Args:
        tokenizer: the tokenizer of the grammar.
        vocabulary: number of token ids.
    """
    bits, filler, letters = np.zeros(-(-vocabulary // 32) * 32, np.uint8), -1, 0
    for token in range(min(vocabulary, tokenizer.vocab_size)):
        data = tokenizer.decode_bytes([token])
        if tokenizer.is_special_token(token) or not data or not _is_text(data):
            continue
        text = data.decode()
        if len(text) > PLAIN_CHARACTERS or NOT_PLAIN.search(text):
            continue
        bits[token] = 1
        if text.isascii() and text.isalpha() and len(text) > letters:
            filler, letters = token, len(text)
    return PlainText(np.packbits(bits, bitorder="little").view(np.int32), filler, letters)


def known_tokens(tokenizer_json: str, vocabulary: int) -> str:
    """A tokenizer.json without added tokens that the model has no ids for, which its files may name."""
    described = json.loads(tokenizer_json)
    known = [token for token in described["added_tokens"] if token["id"] < vocabulary]
    if len(known) == len(described["added_tokens"]):
        return tokenizer_json
    return json.dumps({**described, "added_tokens": known})


def _is_text(text: bytes) -> bool:
    """Whether bytes are characters from beginning to end."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def error_of(matcher: Any) -> str:
    """The error of a matcher that has failed, in one line."""
    lines = matcher.get_error().strip().splitlines() or ["unknown error"]
    return NO_TOKEN if lines[0].startswith("NoExtensionBias") else lines[0][:300]
