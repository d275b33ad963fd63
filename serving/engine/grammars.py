"""Grammar constraints of sequences, planned some tokens ahead.

A grammar that fails ends its own request and no other.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..request import RequestError
from ..request.transcript import Token
from .interface import FreeRun, Grammar
from .sequence import Sequence
from .suffix_lookup import continuation

# A match of LONG_MATCH tokens is a better guess than what the grammar forces, as a forced text can be written
# in other tokens. One of SHORT_MATCH tokens is worth a guess where the grammar forces nothing.
LONG_MATCH, SHORT_MATCH = 4, 2
SEARCHED = 2048  # tokens at the end of a text in which matches are sought
MARKS_SEARCHED = 512  # tokens at its end, in which marks are sought

ALL_TOKENS = np.full(1, -1, np.int32)  # one word for all of a mask


class Plan(NamedTuple):
    """The masks of a sequence's next positions, as long as its tokens are those expected."""

    masks: list[np.ndarray]  # bits int32 [ceil(vocabulary / 32)] of the tokens allowed; one more than tokens
    tokens: list[int]  # expected
    run: FreeRun | None = None  # the last mask holds for it; None: for one token
    begin: int = 0  # tokens generated before it
    ahead: Grammar | None = None  # the state after the expected tokens, if it is known

    @property
    def guesses(self) -> bool:
        """Whether the last mask is held by a guess, which has to be checked."""
        return self.run is not None and self.run.tokens is not None


def plan(sequence: Sequence, grammar: Grammar, most: int, guesses: bool = True) -> Plan:
    """Plans the next tokens of a constrained sequence: their masks and a guess of each token.

    Tokens to be replayed are expected as they are. Then come those that the grammar forces, or that
    followed the longest match of the text's end earlier in it, as far as the grammar allows them. Marks, such
    as those between a key and its value, are expected as the text has written them before.

    Args:
        sequence: with a row.
        grammar: the grammar of the sequence; it stays where it is.
        most: tokens expected, at most.
        guesses: whether masks may be guessed to hold, to be compared where tokens are collected: they must be
            quick to compute.
    """
    replay = sequence.generated[sequence.num_scheduled : sequence.num_replay_tokens][: most + 1]
    if replay:
        return Plan([ALL_TOKENS] * len(replay), replay[:-1])
    result = _rest(sequence.plan, sequence.generated)
    if result is None:
        mask = _bits(grammar.mask())
        result = Plan([mask], [], _run(sequence, grammar, guesses), len(sequence.generated))
    if most and not result.tokens and result.run is None:
        ahead = grammar.copy() if result.ahead is None else result.ahead
        if ahead is not None:
            result = _extended(result, sequence, ahead, most, guesses)
    sequence.plan = result
    return result


def _run(sequence: Sequence, grammar: Grammar, guesses: bool) -> FreeRun | None:
    """The free run that begins at the state of a grammar; no guess once one was wrong.

    Args:
        sequence: whose text it would continue.
        grammar: a state of its grammar, whose mask was the last thing asked for.
        guesses: as for `plan`.
    """
    run = grammar.free_run()
    is_guess = run is not None and run.tokens is not None
    return None if is_guess and (sequence.retracted or not guesses) else run


def _rest(plan: Plan | None, generated: list[int]) -> Plan | None:
    """The rest of a plan, if the tokens generated since are those that it expects."""
    if plan is None:
        return None
    emitted = generated[plan.begin :]
    if emitted != plan.tokens[: len(emitted)]:
        return None
    count = len(emitted)
    return plan._replace(masks=plan.masks[count:], tokens=plan.tokens[count:], begin=len(generated))


def _extended(result: Plan, sequence: Sequence, ahead: Grammar, most: int, guesses: bool) -> Plan:
    """A plan without tokens, with those that are likely to come.

    Args:
        result: the result for the next position.
        sequence: whose text it continues.
        ahead: state of the grammar at this position; it is advanced by the tokens.
        most: tokens, at most.
        guesses: as for `plan`.
    """
    masks, tokens = list(result.masks), []
    text = [*sequence.prompt, *sequence.generated][-SEARCHED:]
    while len(tokens) < most:
        count = len(tokens)
        proposed, is_forced = _proposal(text, ahead, most - count, masks[-1])
        for number, token in enumerate(proposed, 1):
            if is_forced and number == len(proposed):
                token = _with_what_follows(token, text, ahead.marks(), masks[-1])
            if not _contains(masks[-1], token):
                break
            mask = _mask_after(token, ahead)
            if mask is None:
                return result._replace(masks=masks, tokens=tokens)
            masks.append(mask)
            tokens.append(token)
            text.append(token)
        run = _run(sequence, ahead, guesses) if len(tokens) > count else None
        if len(tokens) == count or run is not None:
            return result._replace(masks=masks, tokens=tokens, run=run, ahead=ahead)
    return result._replace(masks=masks, tokens=tokens, ahead=ahead)


def _proposal(text: list[int], ahead: Grammar, most: int, mask: np.ndarray) -> tuple[list[int], bool]:
    """Up to `most` tokens that are likely to follow a text, and whether the grammar forces their text.

    Args:
        text: the tokens so far.
        ahead: the state of the grammar after them.
        most: tokens, at most.
        mask: bits of the tokens allowed next.
    """
    length, following = continuation(text, most)
    if length and not _contains(mask, following[0]):
        length = 0
    if length >= LONG_MATCH:
        return following, False
    if forced := list(ahead.forced())[:most]:
        return forced, True
    return following if length >= SHORT_MATCH else _marks_after(text, ahead.marks(), mask)[:most], False


def _with_what_follows(token: int, text: list[int], marks: Mapping[int, bytes], mask: np.ndarray) -> int:
    """The latest mark of a text that begins with a forced one and may stand in its place, or that itself.

    A grammar that allows white space forces the quote that ends a key, and not the colon after it. Texts
    write both in one token.

    Args:
        token: the last token of the forced text.
        text: the tokens before it.
        marks: the marks of the tokenizer.
        mask: bits of the tokens allowed.
    """
    if token not in marks:
        return token
    begin = marks[token]
    for other in reversed(text[-MARKS_SEARCHED:]):
        mark = marks.get(other, b"")
        if len(mark) > len(begin) and mark.startswith(begin) and _contains(mask, other):
            return other
    return token


def _marks_after(text: list[int], marks: Mapping[int, bytes], mask: np.ndarray) -> list[int]:
    """The marks that followed the last mark of a text before; [] if it ends with another token.

    Args:
        text: the tokens so far.
        marks: the marks of the tokenizer.
        mask: bits of the tokens allowed next.
    """
    if text[-1] not in marks:
        return []
    recent = text[-MARKS_SEARCHED:]
    for place in range(len(recent) - 2, -1, -1):
        if recent[place] == recent[-1] and _contains(mask, recent[place + 1]):
            return list(itertools.takewhile(marks.__contains__, recent[place + 1 : -1]))
    return []


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


class Accepted(NamedTuple):
    """How far a grammar has taken the tokens that were drawn last."""

    tokens: list[int]  # those drawn under the masks that they had to be drawn under
    is_end: bool = False  # nothing may follow them
    error: Exception | None = None  # with which the grammar has failed


def accept(plan: Plan | None, begin: int, grammar: Grammar, tokens: list[int]) -> Accepted:
    """Advance a grammar by tokens, up to the first whose mask was guessed wrongly.

    Args:
        plan: the plan by which they were drawn; None compares no masks.
        begin: tokens generated before them.
        grammar: the grammar of the sequence; it is advanced.
        tokens: sampled last.
    """
    certain = len(tokens) if plan is None or not plan.guesses else plan.begin + len(plan.tokens) + 1 - begin
    number = 0
    try:
        for number, token in enumerate(tokens):
            if plan is not None and number >= certain and not _holds(plan.masks[-1], grammar):
                return Accepted(tokens[:number])
            if not grammar.accept(token):
                return Accepted(tokens, is_end=True)
    except Exception as error:
        return Accepted(tokens[: max(number, certain)], error=error)
    return Accepted(tokens)


def _holds(mask: np.ndarray, grammar: Grammar) -> bool:
    """Whether a mask is that of the next token."""
    return bool(np.array_equal(mask, _bits(grammar.mask())))


def finish(sequence: Sequence, accepted: Accepted) -> list[Token]:
    """Finish a text if its grammar allows no further token; returns the tokens held back so far, if it is so.

    Args:
        sequence: the sequence that the tokens belong to.
        accepted: how far its grammar has taken them.
    """
    if accepted.error is not None:
        return sequence.transcript.finish("error", message_of(accepted.error))
    return sequence.transcript.finish("stop") if accepted.is_end else []


def message_of(error: Exception) -> str:
    """The error of a request whose grammar has raised this."""
    return str(error) if isinstance(error, RequestError) else f"the grammar failed: {error}"
