"""Grammar constraints of sequences, planned some tokens ahead.

A grammar that fails ends its own request and no other.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..request import RequestError
from ..request.transcript import Token
from .interface import Grammar
from .sequence import Sequence
from .suffix_lookup import continuation

# A match of LONG_MATCH tokens is a better guess than what the grammar forces, as a forced text can be written
# in other tokens. One of SHORT_MATCH tokens is worth a guess where the grammar forces nothing.
LONG_MATCH, SHORT_MATCH = 4, 2
SEARCHED = 2048  # tokens at the end of a text in which matches are sought

ALL_TOKENS = np.full(1, -1, np.int32)  # one word for all of a mask


class Plan(NamedTuple):
    """The masks of a sequence's next positions, as long as its tokens are those expected."""

    masks: list[np.ndarray]  # bits int32 [ceil(vocabulary / 32)] of the tokens allowed; one more than tokens
    tokens: list[int]  # expected
    pausing: np.ndarray | None = None  # the last mask holds until a token of this set; None: for one token
    begin: int = 0  # tokens generated before it
    ahead: Grammar | None = None  # the state after the expected tokens, if it is known


def plan(sequence: Sequence, grammar: Grammar, most: int) -> Plan:
    """Plans the next tokens of a constrained sequence: their masks and a guess of each token.

    Tokens to be replayed are expected as they are. Then come those that the grammar forces, or that
    followed the longest match of the text's end earlier in it, as far as the grammar allows them.

    Args:
        sequence: with a row.
        grammar: the grammar of the sequence; it stays where it is.
        most: tokens expected, at most.
    """
    replay = sequence.generated[sequence.num_scheduled : sequence.num_replay_tokens][: most + 1]
    if replay:
        return Plan([ALL_TOKENS] * len(replay), replay[:-1])
    result = _rest(sequence.plan, sequence.generated)
    if result is None:
        result = Plan([_bits(grammar.mask())], [], grammar.pausing(), len(sequence.generated))
    if most and not result.tokens and result.pausing is None:
        ahead = grammar.copy() if result.ahead is None else result.ahead
        if ahead is not None:
            result = _extended(result, sequence, ahead, most)
    sequence.plan = result
    return result


def _rest(plan: Plan | None, generated: list[int]) -> Plan | None:
    """The rest of a plan, if the tokens generated since are those that it expects."""
    if plan is None:
        return None
    emitted = generated[plan.begin :]
    if emitted != plan.tokens[: len(emitted)]:
        return None
    count = len(emitted)
    return plan._replace(masks=plan.masks[count:], tokens=plan.tokens[count:], begin=len(generated))


def _extended(result: Plan, sequence: Sequence, ahead: Grammar, most: int) -> Plan:
    """A plan without tokens, with those that are likely to come.

    Args:
        result: the result for the next position.
        sequence: whose text it continues.
        ahead: state of the grammar at this position; it is advanced by the tokens.
        most: tokens, at most.
    """
    masks, tokens = list(result.masks), []
    text = [*sequence.prompt, *sequence.generated][-SEARCHED:]
    while len(tokens) < most:
        count = len(tokens)
        for token in _proposal(text, ahead, most - count):
            if not _contains(masks[-1], token):
                break
            mask = _mask_after(token, ahead)
            if mask is None:
                return result._replace(masks=masks, tokens=tokens)
            masks.append(mask)
            tokens.append(token)
            text.append(token)
        pausing = ahead.pausing()
        if len(tokens) == count or pausing is not None:
            return result._replace(masks=masks, tokens=tokens, pausing=pausing, ahead=ahead)
    return result._replace(masks=masks, tokens=tokens, ahead=ahead)


def _proposal(text: list[int], ahead: Grammar, most: int) -> Iterable[int]:
    """Up to `most` tokens that are likely to follow a text."""
    length, following = continuation(text, most)
    if length >= LONG_MATCH:
        return following
    return list(ahead.forced())[:most] or (following if length >= SHORT_MATCH else ())


def _mask_after(token: int, ahead: Grammar) -> np.ndarray | None:
    """The mask after a token; None if the text ends with it, or the grammar fails, as it will in the text."""
    try:
        return _bits(ahead.mask()) if ahead.accept(token) else None
    except Exception:
        return None


def _bits(mask: Any) -> np.ndarray:
    return np.asarray(mask).reshape(-1).view(np.int32)


def _contains(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def accept(sequence: Sequence, grammar: Grammar, tokens: Iterable[int]) -> list[Token]:
    """Advance a grammar by tokens.

    Returns the tokens held back so far if nothing may follow them.

    Args:
        sequence: the sequence that the tokens belong to.
        grammar: the grammar of the sequence; it is advanced.
        tokens: sampled last.
    """
    try:
        can_continue = all(grammar.accept(token) for token in tokens)
    except Exception as error:
        return sequence.transcript.finish("error", message_of(error))
    return [] if can_continue else sequence.transcript.finish("stop")


def message_of(error: Exception) -> str:
    """The error of a request whose grammar has raised this."""
    return str(error) if isinstance(error, RequestError) else f"the grammar failed: {error}"
