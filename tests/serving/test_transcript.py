import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_jax.serving.request import Request
from entropic_jax.serving.request.transcript import Alternative, Transcript


class Letters:
    """Token n is letter n; a `~` waits for the next token, as an incomplete character does."""

    def __init__(self):
        self.waiting = ""

    def push(self, token):
        text, self.waiting = self.waiting + chr(token), ""
        if text.endswith("~"):
            text, self.waiting = text[:-1], "~"
        return text

    def flush(self):
        return self.waiting


def run(text, eos=(), **fields):
    transcript = Transcript(Request(prompt="p", **fields), Letters(), 3, [ord(c) for c in eos])
    tokens = []
    for i, letter in enumerate(text):
        tokens.append(transcript.add(ord(letter), {"entropy": float(i)}))
        if transcript.finish_reason:
            break
    return transcript, tokens


def test_without_stop_strings_every_token_is_settled_at_once():
    transcript, tokens = run("abc", max_tokens=3)
    assert [[t.text for t in settled] for settled in tokens] == [["a"], ["b"], ["c"]]
    assert [t.finish_reason for settled in tokens for t in settled] == [None, None, "length"]
    completion = transcript.completion()
    assert completion.text == "abc"
    assert completion.usage == (3, 3)
    assert completion.usage.total_tokens == 6
    assert completion.trace == {"entropy": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    ("include", "text"), [(False, "ab"), (True, "ab.")], ids=["without the stop", "with the stop"]
)
def test_a_token_of_the_request_ends_the_text(include, text):
    transcript, _ = run("ab.c", stop_token_ids=[ord(".")], include_stop_str_in_output=include)
    assert (transcript.completion().text, transcript.finish_reason) == (text, "stop")
    assert transcript.stop_reason == ord(".")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "abc")])
def test_the_stop_string_that_ended_the_text_is_named(include, text):
    transcript, _ = run("abcd", stop=("x", "bc"), include_stop_str_in_output=include)
    assert (transcript.completion().text, transcript.stop_reason) == (text, "bc")


@pytest.mark.parametrize("stop", [{"eos": "."}, {"stop": (".",)}, {"stop_token_ids": [ord(".")]}])
def test_nothing_ends_a_text_before_its_least_length(stop):
    transcript, _ = run("..ab.c", min_tokens=2, **stop)
    assert transcript.completion().token_ids == [ord(c) for c in "..ab."]
    assert transcript.finish_reason == "stop"
    assert run("....", min_tokens=4, max_tokens=4, **stop)[0].finish_reason == "length"


def test_logprobs_stay_with_their_token():
    transcript = Transcript(Request(prompt="p", stop="xy"), Letters(), 3)
    top = (Alternative(ord("x"), -0.5),)
    assert transcript.add(ord("x"), {}, -0.5, top) == []
    assert [(t.logprob, t.top) for t in transcript.add(ord("a"), {}, -2.0)] == [(-0.5, top), (-2.0, ())]


def test_end_of_text_counts_but_has_no_text():
    completion = run("ab.c", eos=".")[0].completion()
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert completion.token_ids == [ord(c) for c in "ab."]


def test_end_of_text_can_be_ignored():
    completion = run("ab.c", eos=".", ignore_eos=True, max_tokens=4)[0].completion()
    assert (completion.text, completion.finish_reason) == ("ab.c", "length")


def test_text_that_may_become_a_stop_string_is_held_back():
    _, tokens = run("xENx", stop=("END",))
    assert [[t.text for t in settled] for settled in tokens] == [["x"], [], [], ["E", "N", "x"]]


def test_text_ends_before_the_stop_string_and_every_token_is_handed_out():
    transcript, tokens = run("aENDb", stop=("END",))
    assert [[t.text for t in settled] for settled in tokens] == [["a"], [], [], ["", "", ""]]
    assert tokens[-1][-1].finish_reason == "stop"
    completion = transcript.completion()
    assert (completion.text, completion.finish_reason) == ("a", "stop")
    assert len(completion.token_ids) == len(completion.trace["entropy"]) == 4


def test_the_first_of_several_stop_strings_counts():
    assert run("abcdef", stop=("de", "cd"))[0].completion().text == "ab"


def test_waiting_text_is_flushed_at_the_end_and_may_complete_a_stop_string():
    assert run("ab~", max_tokens=3)[0].completion().text == "ab~"
    completion = run("ab~", max_tokens=3, stop=("b~",))[0].completion()
    assert (completion.text, completion.finish_reason) == ("a", "stop")


def test_nothing_is_added_after_the_end():
    transcript, _ = run("ab", max_tokens=2)
    with pytest.raises(ValueError, match="no token can follow finish_reason 'length'; got 99"):
        transcript.add(ord("c"), {})


def test_a_transcript_that_runs_has_no_completion():
    with pytest.raises(
        ValueError, match="must have ended before its completion is taken; finish_reason is None"
    ):
        run("a")[0].completion()


def test_an_end_from_outside_hands_out_what_was_held_back():
    transcript, _ = run("aEN", stop=("END",))
    assert [t.text for t in transcript.finish("length")] == ["E", "N"]
    assert transcript.completion().text == "aEN"


def test_error_is_part_of_the_completion():
    transcript = Transcript(Request(prompt="p"), Letters(), 1)
    assert transcript.finish("error", "too long") == []
    tree = transcript.completion().as_json()
    assert (tree["finish_reason"], tree["error"], tree["text"]) == ("error", "too long", "")


def test_json_holds_no_number_that_is_not_finite():
    transcript = Transcript(Request(prompt="p", max_tokens=1), Letters(), 1)
    transcript.add(ord("a"), {"surprisal": float("inf")})
    tree = transcript.completion().as_json()
    assert json.loads(json.dumps(tree, allow_nan=False))["trace"] == {"surprisal": [None]}
    assert tree["usage"] == {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    assert "error" not in tree


@given(st.text("ab~", max_size=12), st.lists(st.text("ab~", min_size=1, max_size=4), max_size=3))
def test_text_is_what_stands_before_the_first_stop_string(text, stops):
    transcript, tokens = run(text + ".", eos=".", stop=tuple(stops))
    expected = min((text.split(stop, 1)[0] for stop in stops), key=len, default=text)
    completion = transcript.completion()
    handed_out = [token for settled in tokens for token in settled]
    assert completion.text == expected == "".join(token.text for token in handed_out)
    assert [token.id for token in handed_out] == completion.token_ids
    assert [token.finish_reason for token in handed_out[:-1]] == [None] * (len(handed_out) - 1)


class Repeats:
    """Every token is the same text."""

    def __init__(self, text):
        self.text = text

    def push(self, token):
        return self.text if token else ""

    def flush(self):
        return ""


def test_long_stop_strings_that_the_text_almost_has_cost_little():
    stops = (
        "a" * 1023 + "b",
        *(500 * "a" + 500 * "b" + str(i) for i in range(31)),
        *(f"c{i:0>999}" for i in range(32)),
    )
    request = Request(prompt="p", stop=stops, max_tokens=3000)
    transcript, start = Transcript(request, Repeats("aaaa"), 3), time.process_time()
    for token in range(1, 2001):
        transcript.add(token, {})
    assert time.process_time() - start < 2  # it took nine
    assert transcript.finish("length") and transcript.completion().text == "aaaa" * 2000


def test_tokens_without_text_behind_the_beginning_of_a_stop_string_cost_little():
    request = Request(prompt="p", stop="ab", max_tokens=30_000)
    transcript, start = Transcript(request, Repeats("a"), 3), time.process_time()
    transcript.add(1, {})
    for _ in range(25_000):
        assert transcript.add(0, {}) == []
    assert time.process_time() - start < 2
    assert len(transcript.finish("length")) == 25_001
