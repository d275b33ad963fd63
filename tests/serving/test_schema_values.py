"""Schemas have a finite value exactly if one is found by trying all, and if llguidance generates one."""

import itertools
import json
import random
from typing import Any

import pytest

from entropic_jax.serving.engine.schema_check import admits_finite_value

NAMES = ("a", "b")
ALL_NAMES = (*NAMES, "c")  # with that of any other property


def random_schema(draw: random.Random, depth: int) -> Any:
    """A schema over `#/$defs/0` to `#/$defs/2`."""
    inner = lambda: random_schema(draw, depth - 1)
    reference = {"$ref": f"#/$defs/{draw.randrange(3)}"}
    if not depth:
        return draw.choice([reference, reference, {"type": "null"}, True, False])
    kind = draw.choice(["object", "array", "anyOf", "allOf", "both", "reference"])
    if kind == "reference":
        return reference
    if kind in ("anyOf", "allOf"):
        return {kind: [inner() for _ in range(draw.randint(1, 2))]}
    if kind == "both":
        return {
            **stated(draw, inner, draw.choice(["object", "array"])),
            draw.choice(["anyOf", "allOf"]): [inner()],
        }
    return stated(draw, inner, kind)


def stated(draw: random.Random, inner: Any, kind: str) -> dict[str, Any]:
    """A schema of objects or arrays; keywords are left out by chance."""
    schema: dict[str, Any] = {"type": draw.choice([kind, [kind, "null"], [kind, "array"]])}
    if kind == "object":
        names = draw.sample(NAMES, draw.randint(0, 2))
        schema |= {"properties": {name: inner() for name in names}}
        schema |= {"required": draw.sample(NAMES, draw.randint(0, 2))}
        schema |= draw.choice([{}, {}, {"additionalProperties": inner()}, {"minProperties": 1}])
    else:
        schema |= {"minItems": draw.randint(0, 2)}
        schema |= draw.choice([{"items": inner()}, {"prefixItems": [inner()], "items": inner()}])
    dropped = draw.choice([None, None, "type", "required", "properties", "items", "minItems"])
    return {name: value for name, value in schema.items() if name != dropped}


class Search:
    """Values of a document, each as the set of schemas in it that the value satisfies.

    What an array or object satisfies depends on these sets of its parts only. Values of ever greater depth
    are made until there is no new set, so that the search is complete.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document, self.schemas = document, []
        self._collect(document)
        self.values: dict[frozenset[int], Any] = {}  # a value with each set

    def _collect(self, schema: Any) -> None:
        if not isinstance(schema, dict):
            return
        self.schemas.append(schema)
        for key, part in schema.items():
            parts = (
                part.values()
                if key in ("properties", "$defs")
                else part
                if isinstance(part, list)
                else [part]
            )
            for inner in parts if key not in ("type", "required") else ():
                self._collect(inner)

    def run(self) -> "Search":
        self._add(None, None)
        while True:
            known = list(self.values.items())
            for length in range(3):
                for parts in itertools.product(known, repeat=length):
                    self._add([value for _, value in parts], [satisfied for satisfied, _ in parts])
                    for names in itertools.combinations(ALL_NAMES, length):
                        value = {name: part[1] for name, part in zip(names, parts, strict=True)}
                        self._add(value, {name: part[0] for name, part in zip(names, parts, strict=True)})
            if len(self.values) == len(known):
                return self

    def _add(self, value: Any, parts: Any) -> None:
        holds = [i for i, schema in enumerate(self.schemas) if self._satisfies(parts, schema, ())]
        self.values.setdefault(frozenset(holds), value)

    def _satisfies(self, parts: Any, schema: Any, path: tuple[int, ...]) -> bool:
        """Whether a value whose parts satisfy these sets satisfies a schema; not by itself."""
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) in path:
            return False
        again = lambda inner: self._satisfies(parts, inner, (*path, id(schema)))
        if "$ref" in schema and not again(self.document["$defs"][schema["$ref"][-1]]):
            return False
        if not all(map(again, schema.get("allOf", []))):
            return False
        if "anyOf" in schema and not any(map(again, schema["anyOf"])):
            return False
        types = schema.get("type", ["null", "array", "object"])
        kind = "null" if parts is None else "array" if isinstance(parts, list) else "object"
        if kind not in ([types] if isinstance(types, str) else types):
            return False
        part = lambda satisfied, inner: self._number(inner) in satisfied if isinstance(inner, dict) else inner
        if kind == "array":
            first = schema.get("prefixItems", [])
            expected = [*first, *[schema.get("items", True)] * 2]
            enough = len(parts) >= schema.get("minItems", 0)
            return enough and all(part(*pair) for pair in zip(parts, expected, strict=False))
        if kind == "object":
            named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            enough = parts.keys() >= set(schema.get("required", [])) and len(parts) >= schema.get(
                "minProperties", 0
            )
            return enough and all(part(parts[name], named.get(name, others)) for name in parts)
        return True

    def _number(self, schema: dict[str, Any]) -> int:
        return next(i for i, other in enumerate(self.schemas) if other is schema)


def documents(seed: int, count: int):
    """Documents with three definitions, of which the first is meant."""
    draw = random.Random(seed)
    for _ in range(count):
        definitions = {str(i): random_schema(draw, draw.choice([1, 1, 2])) for i in range(3)}
        yield {"$ref": "#/$defs/0", "$defs": definitions}


@pytest.mark.parametrize("seed", range(6))
def test_random_schemas_against_a_search(seed):
    outcomes = []
    for document in documents(seed, 80):
        expected = any(0 in satisfied for satisfied in Search(document).run().values)
        assert admits_finite_value(document) == expected, json.dumps(document)
        outcomes.append(expected)
    assert 10 < sum(outcomes) < 70


@pytest.mark.parametrize("seed", range(6, 9))
def test_what_llguidance_generates_is_not_refused(seed):
    llguidance = pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
    tokenizer, matcher, generated = llguidance.LLTokenizer("byte"), llguidance.LLMatcher, 0
    small = [
        None,
        [],
        {},
        *([value] for value in (None, [], {})),
        *({"a": value} for value in (None, [], {})),
    ]
    values = [*small, *([value, None] for value in small), *({"b": value, "a": value} for value in small)]
    texts = [json.dumps(value, separators=(",", ":")).encode() for value in values]
    for document in documents(seed, 150):
        form = matcher.grammar_from_json_schema(json.dumps(document), defaults={"whitespace_flexible": False})
        compiled = matcher(tokenizer, form, log_level=0)
        if compiled.is_error():
            continue
        for text in texts:
            copy = compiled.deep_copy()
            if copy.try_consume_tokens(list(text)) == len(text) and copy.is_accepting():
                generated += 1
                assert admits_finite_value(document), (text, json.dumps(document))
                break
    assert generated > 20
