"""Free runs: how far a mask holds in strings of JSON, and that a wrong guess changes no text."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.sampling.constraints import pauses
from entropic_jax.serving.engine import grammar_planner
from entropic_jax.serving.engine.grammar_forms import from_schema
from entropic_jax.serving.engine.grammars import Plan, accept, plan
from entropic_jax.serving.engine.interface import LONGEST_FREE_RUN, FreeRun, Grammar
from entropic_jax.serving.engine.launch_costs import LaunchCosts
from entropic_jax.serving.engine.planned_constraints import planned_fields
from entropic_jax.serving.engine.sequence import Sequence
from entropic_jax.serving.engine.text_grammar import PLAIN_CHARACTERS, Grammars, TextGrammar
from entropic_jax.serving.http.served_model import ServedModel
from entropic_jax.state.constraints import ANYTHING, NOTHING, no_constraints
from tests.serving.test_engine import (  # noqa: F401  (fixtures)
    VOCABULARY,
    WARM,
    engine_of,
    engine_request,
    exact,
    model,
    prompt,
    run,
)
from tests.serving.test_grammar_guesses import described, sequence
from tests.serving.test_planned_constraints import SMALL, tokens_of


@pytest.fixture(autouse=True)
def plans_are_quick(monkeypatch) -> None:
    """Guess also on a machine that has other work."""
    monkeypatch.setattr(grammar_planner, "QUICK", 1e9)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return described()


def after(served, schema: dict, text: str) -> TextGrammar:
    """The grammar of a schema after a text, with the mask of its next token."""
    grammar = Grammars(served, 65536).compile("schema", from_schema("schema", schema))
    for token in served.encode(text, special=False):
        assert grammar.accept(token)
    grammar.mask()
    return grammar


def contains(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token // 32] >> (token % 32) & 1)


def of(**fields) -> dict:
    return {"type": "object", "properties": {"name": fields}, "required": ["name"]}


def test_text_in_a_string_is_a_run(served):
    grammar = after(served, of(type="string"), '{"name": "Marta')
    run = grammar.free_run()
    assert run.tokens == LONGEST_FREE_RUN
    encode = lambda text: served.encode(text, special=False)
    mask = grammar.mask()
    for token in encode(" Lind is here, isn't she? Afraid: (no) [1] {2}; end")[:LONGEST_FREE_RUN]:
        text = served.tokenizer.backend.decode([token])
        assert contains(run.pausing, token) == (len(text) > PLAIN_CHARACTERS)
        grammar.accept(token)
        assert (grammar.mask() == mask).all()
    for text in ('"', "\\", "\n", "Ä"):  # the last in parts
        assert any(contains(run.pausing, token) for token in encode(text))


@pytest.mark.parametrize("longest", [300, 450])
def test_a_bounded_string_is_a_run_while_its_bound_is_far(served, longest):
    """After as many tokens of the greatest length the mask is the same."""
    grammar = after(served, of(type="string", maxLength=longest), '{"name": "')
    run, mask = grammar.free_run(), grammar.mask()
    assert 0 < run.tokens * PLAIN_CHARACTERS < longest
    for token in served.encode("abcdefgh" * run.tokens, special=False):
        grammar.accept(token)
    assert (grammar.mask() == mask).all()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(type="string", maxLength=20), '{"name": "'),
        (dict(enum=["Marta", "Martin"]), '{"name": "Mar'),
        (dict(type="integer"), '{"name": 1'),
        (dict(type="string", pattern="^[a-z]+$"), '{"name": "a'),
        (dict(type="string"), '{"na'),
        (dict(type="string"), '{"name"'),
    ],
)
def test_elsewhere_there_is_none(served, fields, text):
    assert after(served, of(**fields), text).free_run() is None


def test_a_guess_is_stated_up_to_its_end():
    blank = no_constraints(3, SMALL, positions=6, num_sets=9)
    mask, pausing = tokens_of(1, 2), tokens_of(40)
    plans = {
        0: Plan([mask], [], FreeRun(pausing, 2)),
        1: Plan([tokens_of(5), mask], [5], FreeRun(pausing, 2)),
        2: Plan([mask], [], FreeRun(pausing, 50)),  # no more than there are positions
    }
    fields = planned_fields(plans, blank)
    assert fields["expected"].tolist() == [
        [ANYTHING, ANYTHING, *[NOTHING] * 4],
        [5, ANYTHING, ANYTHING, *[NOTHING] * 3],
        [*[ANYTHING] * 5, NOTHING],
    ]
    constraints = blank._replace(**fields, start=jnp.zeros(3, jnp.int32))
    for position, expected in ((0, [False, True, False]), (3, [True, True, False]), (9, [True, True, True])):
        assert pauses(constraints, jnp.full(3, 1), jnp.full(3, position)).tolist() == expected
    assert pauses(constraints, jnp.full(3, 40), jnp.zeros(3, jnp.int32)).all()


class Changing(Grammar):
    """Even tokens until `until` of them, then odd ones. Guesses more, or nothing."""

    failure = None

    def __init__(self, until: int, guess: int) -> None:
        self.until, self.guess, self.count = until, guess, 0

    def mask(self) -> np.ndarray:
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
        bits[int(self.count >= self.until) : VOCABULARY : 2] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        assert token % 2 == (self.count >= self.until)
        self.count += 1
        return True

    def copy(self) -> "Changing":
        return copy.copy(self)

    def free_run(self) -> FreeRun | None:
        return FreeRun(np.zeros(-(-VOCABULARY // 32), np.int32), self.guess) if self.guess else None


def test_tokens_under_a_wrong_mask_are_not_accepted():
    grammar = Changing(3, 8)
    guessed = Plan([grammar.mask()], [], grammar.free_run())
    assert accept(guessed, 0, grammar, [2, 4, 6, 8, 10]).tokens == [2, 4, 6]
    assert grammar.count == 3
    grammar = Changing(3, 8)
    assert accept(guessed, 0, grammar, [2, 4, 6]).tokens == [2, 4, 6]
    # Masks that were planned are not compared, and those of a plan are certain up to its first guess.
    assert accept(None, 3, grammar, [1]).tokens == [1]


HELD = (dict(WARM), dict(temperature=0.0), dict(**WARM, logprobs=2), dict(**WARM, repetition_penalty=1.3))


def held(guess: int) -> list:
    requests = [
        engine_request(
            f"{i}", prompt(11 + i, i), seed=i, max_tokens=26, grammar=Changing(3 + 4 * i, guess), **fields
        )
        for i, fields in enumerate(HELD)
    ]
    return [*requests, engine_request("free", prompt(30), seed=4, max_tokens=40, **WARM)]


def texts(engine, guess: int) -> list:
    return [(tokens, last.finish_reason, last.usage) for tokens, last in run(engine, *held(guess))]


@pytest.mark.slow
def test_wrong_guesses_change_no_text(exact):  # noqa: F811
    expected = texts(exact, 0)
    for guess in (3, LONGEST_FREE_RUN):
        assert texts(exact, guess) == expected


@pytest.mark.exhaustive
def test_wrong_guesses_change_no_text_of_drafts(model):  # noqa: F811
    for engine in engine_of(model, batch_invariant=False, preset="meso", num_speculative_tokens=3):
        expected = texts(engine, 0)
        for guess in (3, LONGEST_FREE_RUN):
            assert texts(engine, guess) == expected


def test_runs_take_fewer_launches(exact, monkeypatch):  # noqa: F811
    monkeypatch.setattr(LaunchCosts, "rates", lambda self, forecast, width, most, flag: np.arange(most))
    monkeypatch.setattr(LaunchCosts, "step_seconds", lambda *_: 1e-4)
    launches = []
    for guess in (0, 20):
        before = exact.programs.launches
        run(exact, engine_request("x", prompt(9), max_tokens=40, grammar=Changing(99, guess), **WARM))
        launches.append(exact.programs.launches - before)
    assert launches[1] < 0.5 * launches[0]


def test_tokens_before_a_mask_that_fails_are_kept():
    grammar = Changing(99, 8)
    guessed = Plan([grammar.mask()], [], grammar.free_run())
    grammar.mask = lambda: None if grammar.count < 2 else 1 / 0  # type: ignore[method-assign]
    accepted = accept(guessed._replace(tokens=[2]), 0, grammar, [2, 4, 6, 8])
    assert accepted.tokens == [2, 4] and isinstance(accepted.error, ZeroDivisionError)


def test_nothing_is_guessed_while_plans_take_long_or_after_a_wrong_guess():
    guess = lambda text, **options: plan(text, Changing(9, 8), 3, **options).run
    run = guess(sequence([5, 6]))
    assert run is not None and run.tokens == 8
    assert guess(sequence([5, 6]), guesses=False) is None
    retracted = sequence([5, 6])
    retracted.retracted = True
    assert guess(retracted) is None


def test_a_slow_plan_counts_for_some_time():
    text = Sequence.__new__(Sequence)
    text.plan_seconds = float("inf")
    text.note_planning(0.001)
    assert text.plan_seconds == 0.001
    text.note_planning(1.0)
    for _ in range(4):
        text.note_planning(0.001)
    assert 0.3 < text.plan_seconds < 0.5
