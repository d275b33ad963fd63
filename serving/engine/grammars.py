"""Grammars of jobs: what they allow next, and what follows. One that fails ends its job, and no other."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..transcript import Token
from .interface import Grammar
from .sequence import Sequence


def masks(running: Iterable[Sequence], end: Callable[..., Any]) -> dict[int, np.ndarray]:
    """What the grammars allow next, by row; `end` ends a job whose grammar fails."""
    found = {}
    for s in running:
        if s.engine_request.grammar is not None and s.num_scheduled >= s.num_replay_tokens:
            try:
                found[s.row] = np.asarray(s.engine_request.grammar.mask()).reshape(-1).view(np.int32)
            except Exception as error:  # a grammar is a program that came with a request
                end(s, "error", f"the grammar failed: {error}")
    return found


def follow(sequence: Sequence, grammar: Grammar, token: int) -> list[Token]:
    """Tell a grammar the token; what was held back is handed out if nothing may follow it."""
    try:
        goes_on = grammar.accept(token)
    except Exception as error:
        return sequence.transcript.finish("error", f"the grammar failed: {error}")
    return [] if goes_on else sequence.transcript.finish("stop")
