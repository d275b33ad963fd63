"""Schemas that admit no finite value, and those that may, against values that are made by a search."""

import json
import random

import pytest

from entropic_jax.serving.http.schema_check import admits_finite_value, without_end

SELF = {"$ref": "#"}
LIST = {"type": "array", "minItems": 1}
ENDLESS = [
    False,
    SELF,
    {"type": "object", "properties": {"a": SELF}, "required": ["a"]},
    {"type": "object", "additionalProperties": SELF, "required": ["a"]},
    {"type": "object", "additionalProperties": SELF, "minProperties": 1},
    {"type": "object", "properties": {"a": SELF}, "additionalProperties": False, "required": ["b"]},
    {**LIST, "items": SELF},
    {**LIST, "prefixItems": [SELF], "items": False},
    {**LIST, "items": [SELF]},
    {**LIST, "minItems": 2, "prefixItems": [True], "items": SELF},
    {**LIST, "items": {"anyOf": [SELF, {"allOf": [True, SELF]}]}},
    {**LIST, "items": {"oneOf": [SELF, {"$ref": "#/items"}]}},
    {"type": ["array", "object"], "items": SELF, "minItems": 1, "required": ["a"], "properties": {"a": SELF}},
    {
        "$ref": "#/$defs/a",
        "$defs": {"a": {**LIST, "items": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}},
    },
    {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {**LIST, "items": {"$ref": "#"}}}},
    {"anyOf": [{"$ref": "#/anyOf/1"}, {**LIST, "items": {"$ref": "#/anyOf/0"}}]},
]
FINITE = [
    True,
    {},
    {"type": "array", "items": SELF},
    {"type": "object", "properties": {"a": SELF}},
    {"properties": {"a": SELF}, "required": ["a"]},  # of any type
    {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"anyOf": [SELF, {"type": "null"}]}}, "required": ["a"]},
    {"type": "object", "additionalProperties": SELF, "required": ["a"], "properties": {"a": True}},
    {"type": "object", "patternProperties": {"a": True}, "additionalProperties": SELF, "required": ["a"]},
    {**LIST, "items": SELF, "minItems": 0},
    {**LIST, "prefixItems": [True], "items": SELF},
    {**LIST, "items": {"oneOf": [{"const": 1}, SELF]}},
    {"enum": [[1]], "type": "array", "items": SELF, "minItems": 1},
    {**LIST, "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "array", "items": SELF}}},
    {**LIST, "items": {"$ref": "#anchor"}},
    {**LIST, "items": {"$ref": "other.json#"}},
    {**LIST, "items": {"$id": "http://example.com/other", **SELF}},
    {**LIST, "items": {"$ref": "#/items/" + "1" * 5000}},
    {"type": 5, "anyOf": 3, "required": "a", "properties": [], "minItems": "x", "items": [SELF]},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
def test_without_a_finite_value(schema):
    assert not admits_finite_value(schema)


@pytest.mark.parametrize("schema", FINITE, ids=lambda schema: str(schema)[:80])
def test_what_may_have_a_finite_value(schema):
    assert admits_finite_value(schema)


def test_schemas_in_a_grammar():
    parts = [{"lark_grammar": "start: @a"}, {"name": "a", "json_schema": FINITE[2]}]
    assert not without_end(json.dumps({"grammars": parts})) and not without_end('start: "a"')
    assert without_end(json.dumps({"grammars": [*parts, {"name": "b", "json_schema": ENDLESS[2]}]}))


def test_long_chains_take_no_time():
    chain = {f"a{i}": {**LIST, "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(5000)}
    schema = {
        "type": "object",
        "required": sorted(chain),
        "properties": {k: {"$ref": f"#/$defs/{k}"} for k in chain},
    }
    assert not admits_finite_value({**schema, "$defs": {**chain, "a5000": {"$ref": "#/$defs/a0"}}})
    assert admits_finite_value({**schema, "$defs": {**chain, "a5000": {"type": "null"}}})


def random_schema(draw: random.Random, depth: int) -> dict:
    """A schema over `#/$defs/0` to `#/$defs/3`."""
    kind = draw.randrange(2 if depth else 0, 7)
    inner = lambda: random_schema(draw, depth - 1)
    if not depth or kind == 6:
        return {"$ref": f"#/$defs/{draw.randrange(4)}"}
    if kind == 2:
        required = draw.sample(["a", "b"], draw.randrange(3))
        return {"type": "object", "properties": {"a": inner(), "b": inner()}, "required": required}
    if kind == 3:
        return {"type": "array", "items": inner(), "minItems": draw.randrange(3)}
    if kind == 4:
        return {draw.choice(["anyOf", "allOf"]): [inner(), inner()]}
    return {"type": "null"} if draw.random() < 0.3 else {"$ref": f"#/$defs/{draw.randrange(4)}"}


def has_value(schema: dict, definitions: dict, depth: int) -> bool:
    """Whether the schemas have a value that a derivation of this depth makes."""
    if not depth:
        return False
    inner = lambda part: has_value(part, definitions, depth - 1)
    if "$ref" in schema:
        return inner(definitions[schema["$ref"][-1]])
    if "anyOf" in schema:
        return any(map(inner, schema["anyOf"]))
    if "allOf" in schema:
        return all(map(inner, schema["allOf"]))
    if schema["type"] == "object":
        return all(inner(schema["properties"][name]) for name in schema["required"])
    return schema["type"] == "null" or schema["minItems"] == 0 or inner(schema["items"])


def test_random_schemas_against_a_search():
    draw, outcomes = random.Random(0), set()
    for _ in range(300):
        definitions = {str(i): random_schema(draw, 2) for i in range(4)}
        expected = has_value({"$ref": "#/$defs/0"}, definitions, 12)
        outcomes.add(expected)
        actual = admits_finite_value({"$ref": "#/$defs/0", "$defs": definitions})
        assert actual == expected, definitions
    assert outcomes == {True, False}
