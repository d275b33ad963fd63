"""Plans of sequences with a grammar: as arrays of a launch, what rows emit under them, the host's guesses."""

import copy
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.sampling.constraints import pauses
from entropic_jax.serving.engine.grammars import ALL_TOKENS, Plan
from entropic_jax.serving.engine.interface import EngineRequest, FreeRun, Grammar
from entropic_jax.serving.engine.planned_constraints import planned_fields
from entropic_jax.serving.engine.suffix_lookup import LONGEST, continuation
from entropic_jax.state.constraints import ANYTHING, NOTHING, no_constraints
from tests.serving.test_engine import (  # noqa: F401  (fixtures)
    VOCABULARY,
    WARM,
    Alternating,
    engine_request,
    exact,
    model,
    prompt,
    run,
)

SMALL = 64  # tokens of a vocabulary


def tokens_of(*tokens: int) -> np.ndarray:
    """A set of tokens in bits."""
    flags = np.zeros(SMALL, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def test_plans_are_stated_as_far_as_there_is_room():
    blank = no_constraints(4, SMALL, positions=4, num_sets=5)
    first, second, third = tokens_of(1, 2), tokens_of(40), tokens_of(3)
    plans = {
        0: Plan([first, second, first, third], [1, 40, 2]),  # the third set finds no room
        1: Plan([ALL_TOKENS, second], [5], run=FreeRun(tokens_of(63))),
        3: Plan([tokens_of(7)], []),
    }
    fields = planned_fields(plans, blank)
    sets = fields["sets"].value
    assert fields["masked"].tolist() == [True, True, False, True]
    assert fields["expected"].tolist() == [
        [1, 40, NOTHING, NOTHING],
        [5, ANYTHING, ANYTHING, ANYTHING],
        [NOTHING] * 4,
        [NOTHING] * 4,
    ]
    assert (sets[fields["mask"][0]] == [first, second, first, first]).all()
    assert (sets[fields["mask"][1]] == [tokens_of(*range(64)), second, second, second]).all()
    assert (sets[fields["pausing"][1]] == tokens_of(63)).all()
    assert (sets[fields["mask"][3]] == tokens_of(7)).all()


def test_a_row_pauses_at_a_token_after_which_no_mask_is_known():
    blank = no_constraints(2, SMALL, positions=3, num_sets=9)
    plans = {
        0: Plan([ALL_TOKENS] * 2, [5]),
        1: Plan([ALL_TOKENS] * 2, [6], run=FreeRun(tokens_of(63))),
    }
    constraints = blank._replace(**planned_fields(plans, blank), start=jnp.array([10, 20]))
    for offset, tokens, expected in (
        (0, [5, 6], [False, False]),
        (0, [6, 5], [True, True]),
        (1, [5, 62], [True, False]),
        (7, [5, 63], [True, True]),
    ):
        paused = pauses(constraints, jnp.array(tokens), jnp.array([10, 20]) + offset)
        assert paused.tolist() == expected
    assert not pauses(blank, jnp.array([5, 6]), jnp.array([3, 4])).any()


def test_lookup_continues_the_longest_match_and_the_latest_of_several():
    draw = np.random.default_rng(0)
    for _ in range(40):
        text = draw.integers(0, 3, draw.integers(1, 40)).tolist()
        length, following = continuation(text, 5)
        matches = []
        for end in range(len(text) - 1):
            same = 0
            while same <= end and same < LONGEST and text[end - same] == text[len(text) - 1 - same]:
                same += 1
            matches.append((same, end))
        longest, end = max(matches, default=(0, 0))
        assert length == longest
        if longest:
            rest = text[end + 1 :]
            assert following == [rest[i % len(rest)] for i in range(5)]
        else:
            assert following == []


class Planned(Alternating):
    """The same for more tokens, which the engine may plan ahead by guesses."""

    def __init__(self, *guess: int, length: int = 24) -> None:
        super().__init__()
        self.guess, self.length = guess, length

    def accept(self, token: int) -> bool:
        super().accept(token)
        return self.count < self.length

    def copy(self) -> Grammar | None:
        return copy.copy(self) if self.guess else None

    def forced(self) -> list[int]:
        return [token for token in self.guess if token % 2 == self.count % 2][:1]


class FreeUntil(Planned):
    """Allows all tokens until a multiple of four, then even ones and odd ones in turn."""

    begun = False

    def mask(self) -> np.ndarray:
        return super().mask() if self.begun else np.full(-(-VOCABULARY // 32), -1, np.int32)

    def accept(self, token: int) -> bool:
        if not self.begun:
            self.begun = token % 4 == 0
            return True
        return super().accept(token)

    def free_run(self) -> FreeRun | None:
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
        bits[::4] = 1
        pausing = np.packbits(bits, bitorder="little").view(np.int32)
        return None if self.begun or not self.guess else FreeRun(pausing)


HELD = (WARM, dict(temperature=0.0), dict(**WARM, logit_bias={8: 9.0, 9: 9.0}, logprobs=2))


def held_requests(*guess: int, **fields) -> list[EngineRequest]:
    """Requests with grammars that are planned ahead if there is a guess, and one without a grammar."""
    held = [
        engine_request(
            f"held {i}", prompt(11 + i, i), seed=i, grammar=kind(*guess), **{"max_tokens": 30, **s, **fields}
        )
        for i, (kind, s) in enumerate(itertools.product((Planned, FreeUntil), HELD))
    ]
    return [*held, engine_request("free", prompt(30), seed=4, max_tokens=40, **WARM)]


@pytest.mark.slow
def test_tokens_planned_ahead_are_those_of_one_mask_a_launch(exact):  # noqa: F811
    expected = run(exact, *held_requests())
    for guess in ((8, 9), (2, 5)):  # right for some, and wrong
        planned = run(exact, *held_requests(*guess))
        assert [tokens for tokens, _ in planned] == [tokens for tokens, _ in expected]
        assert [last.finish_reason for _, last in planned] == [last.finish_reason for _, last in expected]
    assert any(len(tokens) < 30 for tokens, _ in expected[:-1])  # which a grammar has ended
