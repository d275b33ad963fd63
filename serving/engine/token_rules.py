"""Token rules: the tokens that a request allows and the words that it bans, as a `Grammar`."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..request import RequestError
from .interface import EngineRequest, FreeRun, Grammar


class TokenRules(Grammar):
    """Allows some tokens, bans those that complete a bad word, and keeps to the request's own grammar."""

    def __init__(
        self,
        vocabulary: int,
        allowed: Sequence[int],
        bad_words: Sequence[tuple[int, ...]],
        grammar: Grammar | None = None,
    ) -> None:
        """The rules at the beginning of a text.

        Args:
            vocabulary: tokens of the model.
            allowed: token ids; () allows all.
            bad_words: tokens of each.
            grammar: the grammar of the request.
        """
        self.vocabulary, self.bad_words, self.grammar = vocabulary, bad_words, grammar
        self._allowed = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
        self._allowed[list(allowed) if allowed else slice(vocabulary)] = 1
        self._allowed[[word[0] for word in bad_words if len(word) == 1]] = 0
        self._beginnings = np.zeros_like(self._allowed)  # tokens after which a bad word may come to its end
        self._beginnings[[token for word in bad_words for token in word[:-1]]] = 1
        self._longest = max(map(len, bad_words), default=1)
        self._is_usual = False  # the last mask is that of a text which no bad word has begun in
        self._tail: tuple[int, ...] = ()  # the latest tokens, of which a bad word may be the continuation
        self._failure: RequestError | None = None

    @property
    def failure(self) -> RequestError | None:
        """Why no token may come next, by these rules or the request's grammar."""
        return self._failure or (None if self.grammar is None else self.grammar.failure)

    def refuse(self, reason: str) -> Exception:
        """See `Grammar`."""
        return super().refuse(reason) if self.grammar is None else self.grammar.refuse(reason)

    def mask(self) -> np.ndarray:
        """Bits int32 `[ceil(vocabulary / 32)]` of the tokens that may come next. Raises RequestError."""
        allowed = self._allowed.copy()
        for word in self.bad_words:
            if len(word) > 1 and self._tail[len(self._tail) - len(word) + 1 :] == word[:-1]:
                allowed[word[-1]] = 0
        bits = _packed(allowed)
        self._is_usual = bool((allowed == self._allowed).all())
        if self.grammar is not None:
            bits = bits & np.asarray(self.grammar.mask()).reshape(-1).view(np.int32)
        if not bits.any():
            name = "bad_words" if self.bad_words else "allowed_token_ids"
            self._failure = RequestError(f"{name} must leave a token that may come next", name)
            raise self._failure
        return bits

    def accept(self, token: int) -> bool:
        """Advance by a token; False once nothing may follow."""
        self._tail = (*self._tail, token)[-self._longest :]
        return self.grammar is None or self.grammar.accept(token)

    def copy(self) -> "TokenRules | None":
        """See `Grammar`."""
        grammar = None if self.grammar is None else self.grammar.copy()
        if grammar is None and self.grammar is not None:
            return None
        result = copy.copy(self)
        result.grammar = grammar
        return result

    def forced(self) -> Sequence[int]:
        """See `Grammar`."""
        return () if self.grammar is None else self.grammar.forced()

    def marks(self) -> Mapping[int, bytes]:
        """See `Grammar`."""
        return {} if self.grammar is None else self.grammar.marks()

    def free_run(self) -> FreeRun | None:
        """See `Grammar`: until a token of a bad word but its last, or the end of that of the grammar."""
        if not self._is_usual:
            return None
        beginnings = _packed(self._beginnings)
        run = FreeRun(beginnings) if self.grammar is None else self.grammar.free_run()
        return None if run is None else run._replace(pausing=beginnings | run.pausing)


def _packed(flags: np.ndarray) -> np.ndarray:
    """Flags of tokens as bits int32."""
    return np.packbits(flags, bitorder="little").view(np.int32)


def token_rules(engine_request: EngineRequest, tokenizer: Any, vocabulary: int) -> TokenRules | None:
    """The rules of a request; None where it has none.

    A bad word is banned as the tokenizer writes it, at the beginning of a text and after a space.

    Args:
        engine_request: with the parameters `allowed_token_ids` and `bad_words`.
        tokenizer: the model's tokenizer.
        vocabulary: tokens of the model.
    """
    request = engine_request.request
    if not (request.allowed_token_ids or request.bad_words):
        return None
    forms = [form for word in request.bad_words for form in (word.lstrip(), f" {word.lstrip()}")]
    words = {tuple(tokenizer.encode(form, special=False)) for form in forms}
    return TokenRules(
        vocabulary, request.allowed_token_ids or (), sorted(words - {()}), engine_request.grammar
    )
