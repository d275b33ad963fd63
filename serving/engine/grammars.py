"""Grammar constraints of sequences. A grammar that fails ends its own request and no other."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..request import RequestError
from ..transcript import Token
from .interface import Grammar
from .sequence import Sequence


def token_masks(running: Iterable[Sequence], end: Callable[..., Any]) -> dict[int, np.ndarray]:
    """The tokens that grammars allow next.

    Args:
        running: Sequences that decode. Those without a grammar, or with tokens to replay, have no mask.
        end: `end(sequence, reason, error)` ends the request whose grammar fails.

    Returns:
        By row, bits int32 `[ceil(vocabulary / 32)]`.
    """
    masks = {}
    for sequence in running:
        grammar = sequence.grammar
        if grammar is not None and sequence.num_scheduled >= sequence.num_replay_tokens:
            try:
                masks[sequence.row] = np.asarray(grammar.mask()).reshape(-1).view(np.int32)
            except Exception as error:  # a grammar is a program that came with a request
                end(sequence, "error", message_of(error))
    return masks


def accept(sequence: Sequence, grammar: Grammar, token: int) -> list[Token]:
    """Advance a grammar by a token.

    Returns the tokens held back so far if nothing may follow it.

    Args:
        sequence: The sequence that the token belongs to.
        grammar: Of the sequence; it is advanced.
        token: Sampled last.
    """
    try:
        can_continue = grammar.accept(token)
    except Exception as error:
        return sequence.transcript.finish("error", message_of(error))
    return [] if can_continue else sequence.transcript.finish("stop")


def message_of(error: Exception) -> str:
    """The error of a request whose grammar has raised this."""
    return str(error) if isinstance(error, RequestError) else f"the grammar failed: {error}"
