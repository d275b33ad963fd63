"""What the host expects of a text that is held to a grammar, and how many passes JSON takes by it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.serving.engine.grammar_forms import from_schema
from entropic_jax.serving.engine.grammars import plan
from entropic_jax.serving.engine.interface import Grammar
from entropic_jax.serving.engine.text_grammar import Grammars
from entropic_jax.serving.engine.token_rules import TokenRules
from entropic_jax.serving.http.served_model import ServedModel, describe
from entropic_jax.serving.options.model import EMBEDDED

QUOTE, COLON, COMMA, OPEN, WORD, NUMBER = range(6)
MARKS = {QUOTE: b'"', COLON: b'":', COMMA: b'",', OPEN: b' "'}
SMALL = 32  # tokens of the vocabulary


class Steps(Grammar):
    """Allows and forces what it is told for each position."""

    def __init__(self, *steps: tuple[set[int], list[int]], marks: dict[int, bytes] = MARKS) -> None:
        self.steps, self.known = list(steps), marks

    failure = None

    def mask(self) -> np.ndarray:
        flags = np.zeros(SMALL, np.uint8)
        flags[list(self.steps[0][0])] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        assert token in self.steps.pop(0)[0]
        return bool(self.steps)

    def copy(self) -> "Steps":
        return Steps(*self.steps, marks=self.known)

    def forced(self) -> list[int]:
        return self.steps[0][1]

    def marks(self) -> dict[int, bytes]:
        return self.known


def sequence(prompt: list[int], generated: list[int] | None = None) -> SimpleNamespace:
    tokens = [] if generated is None else generated
    return SimpleNamespace(
        prompt=tuple(prompt),
        generated=tokens,
        num_scheduled=len(tokens),
        num_replay_tokens=len(tokens),
        plan=None,
        retracted=False,
    )


ENDS = ({WORD}, [WORD, QUOTE]), ({QUOTE, COLON}, [QUOTE]), ({NUMBER}, []), ({NUMBER}, [])


def test_the_end_of_a_forced_text_is_the_mark_that_the_text_has_written_before():
    assert plan(sequence([COLON, NUMBER, COMMA, NUMBER]), Steps(*ENDS), 2).tokens == [WORD, COLON]
    # The latest that is longer and allowed: a comma is not, and a quote says nothing new.
    assert plan(sequence([COLON, NUMBER, COMMA, QUOTE]), Steps(*ENDS), 2).tokens == [WORD, COLON]
    assert plan(sequence([COMMA, QUOTE, NUMBER]), Steps(*ENDS), 2).tokens == [WORD, QUOTE]
    assert plan(sequence([COLON, NUMBER]), Steps(*ENDS, marks={}), 2).tokens == [WORD, QUOTE]


def test_marks_follow_as_they_did_before_and_nothing_else_does():
    steps = ({OPEN, NUMBER, WORD}, []), ({QUOTE}, []), ({WORD}, [])
    assert plan(sequence([COLON, OPEN, WORD, 9, COLON]), Steps(*steps), 4).tokens == [OPEN]
    # The latest that may come now; a word that followed is no guess, and neither is what followed a word.
    assert plan(sequence([COLON, OPEN, 9, COLON, COMMA, 8, COLON]), Steps(*steps), 4).tokens == [OPEN]
    assert plan(sequence([COLON, WORD, 9, COLON]), Steps(*steps), 4).tokens == []
    assert plan(sequence([WORD, OPEN, 9, WORD]), Steps(*steps), 4).tokens == []


def test_marks_are_no_more_than_the_tokens_asked_for():
    """A launch has room for these and no more."""
    steps = ({OPEN, QUOTE, COMMA, WORD}, [])
    text = [COLON, OPEN, QUOTE, COMMA, 9, COLON]
    for most in range(5):
        tokens = plan(sequence(text), Steps(*[steps] * 6), most).tokens
        assert tokens == [OPEN, QUOTE, COMMA][:most]


def test_a_match_that_may_not_come_gives_way_to_what_is_forced():
    text = [6, 7, 8, 9, QUOTE, 6, 7, 8, 9]
    assert plan(sequence(text), Steps(({WORD}, [WORD]), ({NUMBER}, [])), 1).tokens == [WORD]
    assert plan(sequence(text), Steps(({QUOTE, WORD}, [WORD]), ({NUMBER}, [])), 1).tokens == [QUOTE]


def test_rules_about_tokens_have_the_marks_of_the_grammar_that_they_hold():
    grammar = Steps(*ENDS)
    assert TokenRules(SMALL, (), (), grammar).marks() == MARKS
    assert TokenRules(SMALL, (), ()).marks() == {}


SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "postal_code": {"type": "string"}},
            "required": ["street", "postal_code"],
        },
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"description": {"type": "string"}, "quantity": {"type": "integer"}},
                "required": ["description", "quantity"],
            },
        },
        "currency": {"enum": ["EUR", "USD"]},
    },
    "required": ["customer_name", "address", "items", "currency"],
}
VALUE = {
    "customer_name": "Marta Lind",
    "address": {"street": "Speicherstadt 4", "postal_code": "20457"},
    "items": [{"description": "wood screws", "quantity": 5}, {"description": "work lamp", "quantity": 1}],
    "currency": "EUR",
}


def num_passes(grammar: Grammar, prompt: list[int], tokens: list[int], most: int) -> int:
    """The passes of a text, each of which emits the tokens that the host expects rightly, and one more."""
    state, passes = sequence(prompt), 0
    while len(state.generated) < len(tokens):
        left = tokens[len(state.generated) :]
        expected = plan(state, grammar, most).tokens[: len(left) - 1]
        right = next(
            (i for i, pair in enumerate(zip(expected, left, strict=False)) if pair[0] != pair[1]),
            len(expected),
        )
        for token in left[: right + 1]:
            grammar.accept(token)
        state.generated += left[: right + 1]
        state.num_scheduled = state.num_replay_tokens = len(state.generated)
        passes += 1
    return passes


def described() -> ServedModel:
    """A model with the tokenizer of the one that ships."""
    tokenizer = models.Tokenizer.from_directory(EMBEDDED)
    config = models.Config(
        architecture="LlamaForCausalLM",
        vocab_size=4096,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        eos_token_id=(1,),
    )
    return describe(models.Model(config, {}, tokenizer, {}), "model", ("m",), 2048)


@pytest.mark.parametrize(
    "style", [{}, {"separators": (",", ":")}, {"indent": 2}], ids=["spaces", "compact", "lines"]
)
def test_marks_save_passes_of_json(style):
    model = described()
    grammars = Grammars(model, 65536)
    grammar = from_schema("schema", SCHEMA)
    tokens = model.encode(json.dumps(VALUE, **style), special=False)
    prompt = model.encode("An order, as JSON:\n", special=False)
    passes = num_passes(grammars.compile("schema", grammar), prompt, tokens, 15)
    unmarked = grammars.compile("schema", grammar)
    unmarked._marks = {}
    assert passes <= 0.85 * num_passes(unmarked, prompt, tokens, 15)
    assert num_passes(grammars.compile("schema", grammar), prompt, tokens, 0) == len(tokens)
