"""Grammars of structured outputs that `LLM` is asked for, compiled when the first request states one."""

from collections.abc import Collection
from typing import Any, NamedTuple

from entropic_jax.models import Model, Tokenizer
from entropic_jax.parameter_tables.structured_outputs import StructuredOutputsParams

from ..engine.interface import Grammar
from ..request import RequestError


class TokenizedModel(NamedTuple):
    """The text side of a model, see `text_grammar.TextModel`."""

    tokenizer: Tokenizer
    vocabulary: int  # the number of token ids
    stop_tokens: Collection[int]


class RequestedGrammars:
    """Compiles the grammars of one model.

    Args:
        model: with a tokenizer.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._grammars: Any = None  # made once llguidance is needed

    def of(self, stated: StructuredOutputsParams | None) -> Grammar | None:
        """A grammar at its beginning; None without a constraint.

        Args:
            stated: the constraint.

        Raises:
            RequestError: No text can satisfy the constraint, or llguidance is not installed.
        """
        if stated is None:
            return None
        try:
            from ..engine.grammar_forms import constraint_of
            from ..engine.text_grammar import Grammars
        except ImportError:
            message = "structured_outputs must be None without llguidance (pip install 'entropic_jax[serve]')"
            raise RequestError(message, "structured_outputs") from None
        if self._grammars is None:
            tokenizer, vocabulary = self._model.tokenizer, self._model.config.vocab_size
            assert tokenizer is not None  # the engine needs one, too
            described = TokenizedModel(tokenizer, vocabulary, self._model.stop_tokens)
            self._grammars = Grammars(described)
        constraint = constraint_of(stated, "structured_outputs.{}".format)
        return self._grammars.compile(*constraint)
