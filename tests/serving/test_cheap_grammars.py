"""Grammars that are known to be cheap need no trial; all others are tried in a process with limits."""

import json
import sys

import pytest

from entropic_jax.serving.engine import grammar_check
from entropic_jax.serving.engine.cheap_grammars import HIGHEST_COUNT, LONGEST, is_cheap
from entropic_jax.serving.engine.grammar_check import CHEAP_BYTES, Trial, trial, without_tokens
from entropic_jax.serving.engine.grammar_forms import Constraint, from_choices, from_regex, from_schema
from entropic_jax.serving.engine.text_grammar import CACHED_BYTES, CACHED_GRAMMARS, Grammars
from entropic_jax.serving.http.tools import formats
from entropic_jax.serving.request import RequestError

ORDINARY = {
    "title": "An order",
    "description": 'allOf ~ & %json "patternProperties"',
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "count": {"type": "integer", "minimum": 0, "maximum": 10},
        "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5, "default": 1},
        "state": {"enum": ["open", "closed", None]},
        "kind": {"const": "order", "type": "string"},
        "note": {"anyOf": [{"type": "string", "maxLength": 500}, {"type": "null"}], "default": None},
        "customer": {"$ref": "#/$defs/person", "description": "who pays"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 20},
        "place": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": False},
        "labels": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
    },
    "required": ["id", "items"],
    "additionalProperties": False,
    "$defs": {
        "person": {"type": "object", "properties": {"multipleOf": {"type": "string"}}},
        "item": {"type": "object", "properties": {"parts": {"items": {"$ref": "#/$defs/item"}}}},
    },
}
DOUBLING = "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(20)) + 'a20: "x"'
AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z]/ | \n"
TOOLS = [{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}, {"name": "g"}]
TRIED_SCHEMAS = [
    {"type": "integer", "multipleOf": 600011},
    {"type": "array", "items": {"properties": {"a": {"type": "integer", "multipleOf": 7}}}},
    {"type": "string", "pattern": "a+"},
    {"allOf": [{"type": "string"}]},
    {"patternProperties": {"a+": {}}},
    {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": {"type": "string", "format": "uri"}}},
    {"anyOf": [{"type": "string", "format": "uri"}], "format": "email"},
    {"type": "string", "minLength": HIGHEST_COUNT + 1},
    {"type": "integer", "minimum": 10**30},
    {"type": "string", "format": "regex"},
    {"x-guidance": {"whitespace_pattern": "((a|b)*c)*"}},
    {"properties": {"a": {"unheard-of": 1}}},
    {"properties": {f"p{i}": {"type": "string"} for i in range(LONGEST // 10)}},
    {"properties": 3},
]
TRIED = {
    "intersection": "start: A\nA: /a+/ & /b+/",
    "repeats": 'start: ((("a"){9}){9}){9}',
    "complement": "start: A\nA: ~/a+/",
    "schema": 'start: %json {"type": "integer"}',
    "expression": 'start: %regex {"substring_chars": "abc"}',
    "counts": 'start: ("a"{0,1000}){0,1000}',
    "recursion": AMBIGUOUS,
    "doubling": DOUBLING,
    "terminals of terminals": 'start: A\nA: B B\nB: "x"',
    "a long expression": from_regex("a" * 500),
    "no grammar": '{"grammars": 3}',
    "deep": '{"grammars": [{"json_schema": ' + '{"items": ' * 300 + "3" + "}" * 302 + "]}",
}


@pytest.mark.parametrize(
    "grammar",
    [
        from_schema("json", ORDINARY),
        from_schema("json", {"type": "object"}),
        from_choices(["yes", 'no & "never" ~', "a/b"]),
        from_regex(r"[a-z]+/\d{1,9}"),
        'start: "SELECT " COLUMNS " FROM " name  // a comment\nCOLUMNS: /[a-z]+(, [a-z]+)*/\nname: /[a-z]+/',
    ],
    ids=["ordinary", "any object", "choice", "expression", "rules"],
)
def test_ordinary_grammars_need_no_trial(grammar):
    assert is_cheap(grammar)
    assert trial(grammar) == Trial(None, None, CHEAP_BYTES)


@pytest.mark.parametrize("form", formats.FORMATS.values(), ids=formats.FORMATS)
@pytest.mark.parametrize("required", [False, True])
def test_tools_with_ordinary_schemas_need_no_trial(form, required):
    special = {"<tool_call>": 7, "</think>": 8}
    for reasoning in (None, True):
        options = dict(required=required, parallel=True, reasoning=reasoning)
        assert is_cheap(formats.grammar(form, TOOLS, special, **options))
        hard = [*TOOLS, {"name": "h", "parameters": {"properties": {"a": {"multipleOf": 600011}}}}]
        assert not is_cheap(formats.grammar(form, hard, special, **options))


@pytest.mark.parametrize("schema", TRIED_SCHEMAS, ids=lambda schema: str(schema)[:60])
def test_other_schemas_are_tried(schema):
    assert not is_cheap(json.dumps({"grammars": [{"json_schema": schema}]}))


@pytest.mark.parametrize("grammar", TRIED.values(), ids=TRIED)
def test_other_grammars_are_tried(grammar):
    assert not is_cheap(grammar)


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (
            from_schema("json", {"type": "integer", "multipleOf": 4000037}),
            "it takes more than 1 s or 512 MiB",
        ),
        (AMBIGUOUS, "the masks of 400 bytes take more than 2 s to compute"),
        ('start: <[7000]> %json {"type": "integer", "multipleOf": 4000037}', "it takes more than 1 s or"),
    ],
    ids=["multiple", "ambiguous", "with a special token"],
)
def test_a_grammar_that_takes_too_much_is_refused(grammar, reason):
    tried = trial(grammar)
    assert tried.reason is not None and tried.reason.startswith(reason) and tried.part is None


def test_a_trial_says_which_schema_is_refused_and_what_compiling_takes():
    tools = [*TOOLS, {"name": "h", "parameters": {"properties": {"a": {"type": "string", "pattern": "("}}}}]
    options = dict(required=True, parallel=True, reasoning=None)
    tried = trial(formats.grammar(formats.FORMATS["hermes"], tools, {"<tool_call>": 7}, **options))
    assert tried.part == 2 and "unclosed group" in (tried.reason or "")
    tried = trial(from_schema("json", {"type": "string", "pattern": "^[a-z]+$"}))
    assert tried.reason is tried.part is None and CHEAP_BYTES <= tried.size < 64 * CHEAP_BYTES


def test_bytes_stand_for_special_tokens():
    text = 'start: <[7-9]> "<a>" <|end|> A  // <b>\nA: /(?P<c>d)/'
    assert without_tokens(text) == 'start: <[1]> "<a>" <[1]> A  // <b>\nA: /(?P<c>d)/'
    described = {"grammars": [{"lark_grammar": "start: <x>"}, {"json_schema": {"title": "<x>"}}]}
    assert json.loads(without_tokens(json.dumps(described))) == {
        "grammars": [{"lark_grammar": "start: <[1]>"}, {"json_schema": {"title": "<x>"}}]
    }


@pytest.fixture
def grammars(served, monkeypatch):
    """Grammars whose trials are counted; the number in a pattern is the share of the cache that it takes."""
    result, tried = Grammars(served), []

    def share(grammar: str) -> Trial:
        tried.append(grammar)
        pattern = json.loads(grammar)["grammars"][0]["json_schema"]["pattern"]
        return Trial(size=int(CACHED_BYTES * float(pattern)))

    monkeypatch.setattr(grammar_check, "trial", share)
    result.tried = tried
    return result


def of_share(share: float) -> str:
    return json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": str(share)}}]})


def test_the_cache_is_bounded_in_bytes_and_in_number(grammars):
    for share in (0.4, 0.41, 0.42):
        grammars.compile("json", of_share(share))
    assert list(grammars._compiled) == [of_share(0.41), of_share(0.42)]
    grammars.compile("json", of_share(3.0))  # alone
    assert list(grammars._compiled) == [of_share(3.0)]
    for number in range(CACHED_GRAMMARS + 5):
        grammars.compile("json", of_share(number * 1e-6))
    assert len(grammars._compiled) == CACHED_GRAMMARS


def test_a_grammar_that_is_held_is_not_compiled_again(grammars):
    held = grammars.prepare(Constraint("json", of_share(0.5)))
    grammars.compile("json", of_share(2.0))
    assert of_share(0.5) not in grammars._compiled and not grammars.is_hard(of_share(0.5))
    grammars.compile("json", of_share(0.5))
    assert grammars.tried.count(of_share(0.5)) == 1
    del held
    grammars.compile("json", of_share(2.5))
    assert grammars.is_hard(of_share(0.5))


def test_a_grammar_is_refused_by_the_name_of_its_field(grammars, monkeypatch):
    monkeypatch.setattr(grammar_check, "trial", lambda grammar: Trial("it is too much"))
    with pytest.raises(
        RequestError, match=r"^x\.json must be a grammar that can be compiled: it is too much"
    ):
        grammars.compile("x.json", of_share(0.1))
