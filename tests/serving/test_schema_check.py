"""Schemas that admit no finite value, and those that may."""

import json
import time

import pytest

from entropic_jax.serving.engine.schema_check import admits_finite_value, part_without_end

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
REQUIRED = {"type": "object", "required": ["a"]}
IS_LIST, NULL = {"type": "array"}, {"type": "null"}
# None of the parts alone is without a finite value.
ENDLESS_TOGETHER = [
    {"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": SELF}}]},
    {**LIST, "items": SELF, "allOf": [{"prefixItems": [NULL]}]},
    {"allOf": [{"properties": {"a": SELF}}, REQUIRED]},
    {"allOf": [{**IS_LIST, "items": SELF}, LIST]},
    {**LIST, "allOf": [{"prefixItems": [SELF]}]},
    {"allOf": [{"type": ["array", "null"], "items": SELF}, {"type": ["array", "number"], "minItems": 1}]},
    {"allOf": [{"anyOf": [NULL, REQUIRED]}, {"type": "object", "properties": {"a": SELF}}]},
    {**LIST, "items": {"anyOf": [{"allOf": [NULL, IS_LIST]}, SELF]}},
    {**LIST, "items": {"anyOf": [{"enum": ["a"], "type": "array"}, SELF]}},
    {**LIST, "items": {"anyOf": [{**LIST, "maxItems": 0}, SELF]}},
    {"type": "object", "additionalProperties": False, "minProperties": 1, "properties": {"a": SELF}},
    {
        "type": "object",
        "minProperties": 1,
        "allOf": [{"properties": {"a": SELF}}, {"additionalProperties": SELF}],
    },
    {**LIST, "items": {"allOf": [SELF, {"type": ["array", "object"]}]}},
    {**REQUIRED, "properties": {"a": {"$ref": "#/$defs/b", **LIST}}, "$defs": {"b": {"items": SELF}}},
    {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {**REQUIRED, "properties": {"a": {"$ref": "#/$defs/b"}}},
            "b": {"allOf": [{"$ref": "#/$defs/c"}, {"minItems": 1}]},
            "c": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}},
        },
    },
]
FINITE_TOGETHER = [
    {"allOf": [{"type": ["array", "null"], "items": SELF}, {"type": ["array", "null"], "minItems": 1}]},
    {"allOf": [{"anyOf": [NULL, REQUIRED]}, {"type": ["null", "object"], "properties": {"a": SELF}}]},
    {**LIST, "allOf": [{"prefixItems": [NULL]}, {"items": {"anyOf": [SELF, NULL]}}]},
    {"type": "object", "properties": {"a": SELF}, "minProperties": 1},
    {
        "type": "object",
        "minProperties": 1,
        "allOf": [{"properties": {"a": SELF}}, {"properties": {"b": SELF}}],
    },
    {
        "allOf": [
            {"$id": "http://example.com/other", "items": False},
            {**LIST, "items": {"$ref": "#/$defs/a"}},
        ]
    },
    {"type": "integer", "allOf": [{"type": "number"}, {"enum": [1, "a"]}]},
    {"allOf": [{"const": [1]}, {**LIST, "items": SELF}]},  # a value that is stated is not looked into
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


@pytest.mark.parametrize("schema", [*ENDLESS, *ENDLESS_TOGETHER], ids=str)
def test_without_a_finite_value(schema):
    assert not admits_finite_value(schema)


@pytest.mark.parametrize("schema", [*FINITE, *FINITE_TOGETHER], ids=lambda schema: str(schema)[:80])
def test_what_may_have_a_finite_value(schema):
    assert admits_finite_value(schema)


def test_schemas_in_a_grammar():
    parts = [{"lark_grammar": "start: @a"}, {"name": "a", "json_schema": FINITE[2]}]
    assert part_without_end(json.dumps({"grammars": parts})) is part_without_end('start: "a"') is None
    parts.append({"name": "b", "json_schema": ENDLESS[2]})
    assert part_without_end(json.dumps({"grammars": parts})) == 1  # of the schemas


def test_long_chains_take_no_time():
    chain = {f"a{i}": {**LIST, "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(5000)}
    schema = {
        "type": "object",
        "required": sorted(chain),
        "properties": {k: {"$ref": f"#/$defs/{k}"} for k in chain},
    }
    assert not admits_finite_value({**schema, "$defs": {**chain, "a5000": {"$ref": "#/$defs/a0"}}})
    assert admits_finite_value({**schema, "$defs": {**chain, "a5000": {"type": "null"}}})


def test_sets_beyond_the_most_work_are_looked_at_singly():
    choices = lambda name: {"anyOf": [{**REQUIRED, "required": [f"{name}{i}"]} for i in range(12)]}
    many = {"allOf": [choices(name) for name in "abcdefgh"], "type": "object"}
    begin = time.perf_counter()
    assert admits_finite_value({**REQUIRED, "properties": {"a": {**many, "properties": {"a0": SELF}}}})
    assert not admits_finite_value({**LIST, "items": {"allOf": [many, {**LIST, "items": False}, SELF]}})
    referring = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(4000)}
    every = {name: {"$ref": f"#/$defs/{name}"} for name in referring}
    schema = {"type": "object", "required": sorted(every), "properties": every}
    for last, finite in ((NULL, True), ({"$ref": "#/$defs/a0"}, False)):
        assert admits_finite_value({**schema, "$defs": {**referring, "a4000": last}}) == finite
    assert time.perf_counter() - begin < 20


def test_references_to_places_in_long_lists_take_no_time():
    choices = [{}] * 8000
    schema = {"anyOf": choices, "type": "object", "required": [f"a{i}" for i in range(4000)]}
    schema["properties"] = {f"a{i}": {"$ref": "#/anyOf/7999"} for i in range(4000)}
    begin = time.process_time()
    assert admits_finite_value(schema)
    assert time.process_time() - begin < 2
    ends = {"prefixItems": [{"$ref": "#/prefixItems/1"}, SELF], **LIST}
    assert not admits_finite_value(ends)
    for key in ("01", "2", "-1", "²", "9" * 5000):  # no place in the list
        assert admits_finite_value({**LIST, "prefixItems": [{"$ref": f"#/prefixItems/{key}"}, SELF]})
