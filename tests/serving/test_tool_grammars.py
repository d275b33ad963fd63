"""Grammars of tool calls: what they accept, where they end, and where a text stays free."""

import llguidance
import numpy as np
import pytest

from entropic_jax.serving.engine.text_grammar import TextGrammar, free_text
from entropic_jax.serving.http.protocol.chat import ChatBody
from entropic_jax.serving.http.tools import formats
from entropic_jax.serving.http.tools.calling import ToolCalling
from entropic_jax.serving.http.tools.formats import HERMES

from .test_tools import BOTH, CLOCK, FORMATS, HELLO, NO_ARGUMENTS, TOOLS, allowed, calls


@pytest.fixture(scope="module")
def tokenizer(served) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(served.tokenizer.backend.to_str())


def accepts(served, tokenizer, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = served.tokenizer.encode(text, special=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_grammars_hold_to_calls(served, tokenizer, form):
    functions = [tool["function"] for tool in TOOLS]

    def takes(text: str, reasoning: bool | None = None, **choice: bool) -> bool:
        options = {"required": True, "parallel": True, **choice}
        grammar = formats.grammar(form, functions, {}, **options, reasoning=reasoning)
        return accepts(served, tokenizer, grammar, text)

    single, double = calls(form, BOTH[0]), calls(form, *BOTH)
    wrong = [calls(form, pair) for pair in (("weather", {"city": 1}), ("weather", {}), ("other", {}))]
    assert (
        takes(single)
        and takes(double)
        and takes(single, parallel=False)
        and not takes(double, parallel=False)
    )
    assert not any(map(takes, ["", "hello", *wrong]))
    auto = {"required": False}
    assert all(takes(text, **auto) for text in (single, double, "", "hello {}", "a < b"))
    assert takes(single, **auto, parallel=False) and not takes(double, **auto, parallel=False)
    assert not any(takes(text, **auto) for text in wrong)
    thought = "<think>so {"
    for required in (True, False):
        assert takes(f"{thought}</think>\n\n{single}", False, required=required)
        assert takes(single, False, required=required)
        assert takes(f"so</think>{single}", True, required=required)
    assert not takes(single, True)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("special", [{}, {"[TOOL_CALLS]": 5, "<|python_tag|>": 6}], ids=["text", "tokens"])
def test_a_message_of_calls_ends(served, tokenizer, form, special):
    """A model that never chooses to end is held to some calls; it may end after each of them."""
    options = {"required": True, "parallel": True, "reasoning": None}
    grammar = formats.grammar(form, [CLOCK["function"]], special, **options)
    pairs = [("clock", NO_ARGUMENTS)] * (formats.MOST_CALLS + 1)
    if not special:
        taken = [
            accepts(served, tokenizer, grammar, calls(form, *pairs[:count]))
            for count in range(len(pairs) + 1)
        ]
        assert taken == [False, *[True] * formats.MOST_CALLS, False]
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    for _ in range(60 * formats.MOST_CALLS):  # of the tokens allowed, never the one that ends the text
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size])
        going_on = allowed[allowed != tokenizer.eos_token]
        if not len(going_on):
            break
        assert matcher.consume_token(int(going_on[-1]))
    assert matcher.is_accepting() and not len(going_on)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("reasoning", [None, True, False])
def test_grammars_name_special_tokens_by_id(tokenizer, form, required, reasoning):
    special = {marker: number % 2 for number, marker in enumerate(formats.MARKERS)}
    options = dict(required=required, parallel=True, reasoning=reasoning)
    grammar = formats.grammar(form, [CLOCK["function"]], special, **options)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("reasoning", [None, True, False])
def test_free_text_stays_free_until_a_token_of_the_set(served, tokenizer, form, reasoning):
    markers = (form.marker or "{", *(() if reasoning is None else (formats.END_OF_THOUGHT,)))
    vocabulary = tokenizer.vocab_size
    pausing = free_text(tokenizer, vocabulary, markers)
    bits = np.unpackbits(pausing.view(np.uint8), bitorder="little")[:vocabulary]
    free, draw = np.flatnonzero(bits == 0), np.random.default_rng(0)
    assert len(free) > vocabulary / 2
    options = dict(required=False, parallel=True, reasoning=reasoning)
    grammar = formats.grammar(form, [CLOCK["function"]], {}, **options)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    text = TextGrammar(matcher, vocabulary, "tools", tokenizer, pausing)
    text.mask()
    if reasoning is False:  # it begins with a thought, or with text that is none
        text.accept(served.tokenizer.encode("x", special=False)[0])
    elif text.free_run() is None:  # a call may come, so the first token decides
        text.accept(int(free[0]))
    mask = text.mask()
    partial = [token for token in free if b"<" in tokenizer.decode_bytes([int(token)])]
    for token in [*draw.choice(free, 60), *draw.choice(partial, 10)]:
        assert (text.free_run().pausing == pausing).all() and text.free_run().tokens is None
        assert text.accept(int(token))
        assert (text.mask() == mask).all()
    if reasoning is None and form.marker:
        for token in served.tokenizer.encode(form.marker + form.before[len(form.marker) :], special=False):
            text.accept(token)
        text.mask()
        assert text.free_run() is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_can_be_called(served, tokenizer, mode):
    body = ChatBody.model_validate(
        {"messages": HELLO, "tools": TOOLS, "tool_choice": allowed(mode, "clock"), "model": None}
    )
    grammar = ToolCalling(served, "hermes").constraint(body).grammar
    assert accepts(served, tokenizer, grammar, calls(HERMES, BOTH[1]))
    assert not accepts(served, tokenizer, grammar, calls(HERMES, BOTH[0]))
    assert accepts(served, tokenizer, grammar, "So.") == (mode == "auto")
