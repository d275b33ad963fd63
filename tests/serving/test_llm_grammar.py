"""Structured outputs of `LLM`: texts satisfy them, drafts change none, and errors name the field."""

import json
import re
import sys

import pytest

from entropic_jax import LLM, SamplingParams, StructuredOutputsParams
from entropic_jax.serving.request import RequestError
from tests.shallow_model import shallow_model

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "# a record\n"


@pytest.fixture(scope="module")
def llm():
    with LLM(shallow_model(), max_num_seqs=4, max_model_len=512) as llm:
        yield llm


def text(llm: LLM, stated: StructuredOutputsParams, **options) -> str:
    params = SamplingParams(structured_outputs=stated, max_tokens=200, seed=3, **options)
    (output,) = llm.generate([PROMPT], params)
    assert output.outputs[0].finish_reason == "stop"
    return output.outputs[0].text


def test_texts_satisfy_their_constraint(llm):
    value = json.loads(text(llm, StructuredOutputsParams(json=SCHEMA)))
    assert set(value) == {"name", "age"} and isinstance(value["age"], int)
    assert isinstance(json.loads(text(llm, StructuredOutputsParams(json=json.dumps(SCHEMA)))), dict)
    assert re.fullmatch("[a-c]{2,5}", text(llm, StructuredOutputsParams(regex="[a-c]{2,5}")))
    assert text(llm, StructuredOutputsParams(choice=["yes", "no"])) in ("yes", "no")
    assert text(llm, StructuredOutputsParams(grammar='start: "x" "y"?')) in ("x", "xy")
    assert text(llm, StructuredOutputsParams(grammar='root ::= "x" | "y"')) in ("x", "y")


@pytest.mark.slow
def test_drafts_change_no_text_and_every_sequence_has_its_own_state(llm):
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=200, seed=5, n=3, temperature=1.3
    )
    free = SamplingParams(max_tokens=20, seed=5)
    outputs = llm.generate([PROMPT, PROMPT], [params, free])
    with LLM(shallow_model(), preset="off", max_num_seqs=4, max_model_len=512) as plain:
        expected = plain.generate([PROMPT, PROMPT], [params, free])
    texts = [[sequence.token_ids for sequence in output.outputs] for output in outputs]
    assert texts == [[sequence.token_ids for sequence in output.outputs] for output in expected]
    assert len({tuple(tokens) for tokens in texts[0]}) == 3
    for sequence in outputs[0].outputs:
        json.loads(sequence.text)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"json": {"type": "text"}}, "structured_outputs.json must be a grammar that can be compiled"),
        ({"json": "{"}, "structured_outputs.json must be a JSON schema"),
        ({"regex": "("}, "structured_outputs.regex must be a grammar that can be compiled"),
        ({"grammar": "begin: x"}, "structured_outputs.grammar must be"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json must be a grammar that a text can satisfy"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused_by_name(llm, stated, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.generate(PROMPT, SamplingParams(structured_outputs=StructuredOutputsParams(**stated)))


def test_without_the_library_the_extra_is_named(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "entropic_jax.serving.engine.grammar_forms", None)
    with pytest.raises(RequestError, match=r"structured_outputs must be None without llguidance \(pip"):
        llm.generate(PROMPT, SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({}, ValueError, "structured_outputs must have one of json, .*; got none"),
        ({"json_object": False}, ValueError, "got none"),
        ({"json": {}, "regex": "a"}, ValueError, "got json and regex"),
        ({"json": 3}, ValueError, "json must be a JSON schema, as a mapping or a string; got 3"),
        ({"choice": "yes"}, ValueError, "choice must be a list of at least one string"),
        ({"choice": ["yes", ""]}, ValueError, "choice must be a list"),
        ({"regex": ""}, ValueError, "regex must be a regular expression, as a string that is not empty"),
        ({"json_object": 1}, ValueError, "json_object must be true or false; got 1"),
        ({"structural_tag": "x"}, TypeError, "has no parameter structural_tag; a server calls tools"),
        ({"jsn": {}}, TypeError, "has no parameter jsn; did you mean json?"),
    ],
)
def test_parameters_are_checked(values, error, message):
    with pytest.raises(error, match=message):
        StructuredOutputsParams(**values)


def test_the_field_takes_nothing_else():
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputsParams or None; got"):
        SamplingParams(structured_outputs={"json": SCHEMA})
