"""Whether JSON schemas admit a finite value: a schema may demand that each value contains another, endlessly.

A schema admits one if the schemas do that its values must contain: of required properties, of the least
number of items, of a reference, of all or of one of several. What follows from nothing, step by step, is the
least fixed point of these statements. All else counts as satisfiable, so that only a schema is refused that
certainly admits no finite value.
"""

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

ANYTHING = ("null", "boolean", "number", "string", "array", "object")


def without_end(grammar: str) -> bool:
    """Whether a schema in a grammar, in the serialized form of llguidance, admits no finite value."""
    if not grammar.lstrip().startswith("{"):  # in Lark's form
        return False
    parts = json.loads(grammar).get("grammars", ())
    return not all(admits_finite_value(part.get("json_schema")) for part in parts)


def admits_finite_value(schema: Any) -> bool:
    """False for a schema that certainly admits no finite value.

    >>> admits_finite_value({"type": "array", "items": {"$ref": "#"}})
    True
    >>> admits_finite_value({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
    False
    """
    statements = _Statements(schema)
    first = statements.of_schema(schema)
    statements.describe()
    return first in statements.derived()


class _Statements:
    """Statements "this schema admits a finite value", each of which follows from a number of others."""

    def __init__(self, root: Any) -> None:
        """Without a statement. References are to parts of `root`."""
        self.root = root
        self.missing: list[int] = []  # statements that each one still needs
        self.needed_by: list[list[int]] = []
        self.numbers: dict[int, int] = {}  # statement about each schema, by the identity of the schema
        self.pending: list[tuple[int, dict[str, Any]]] = []

    def of_schema(self, schema: Any) -> int:
        """The statement about a schema, which `describe` completes."""
        if not isinstance(schema, dict):
            return self.any_of(()) if schema is False else self.all_of(())
        if id(schema) not in self.numbers:
            self.numbers[id(schema)] = number = self.all_of(())
            self.missing[number] = 1  # until it is described
            self.pending.append((number, schema))
        return self.numbers[id(schema)]

    def all_of(self, parts: Iterable[int]) -> int:
        """The statement that all parts hold."""
        return self._add(needed := list(parts), len(needed))

    def any_of(self, parts: Iterable[int]) -> int:
        """The statement that one of the parts holds."""
        return self._add(list(parts), 1)

    def _add(self, parts: list[int], count: int) -> int:
        number = len(self.missing)
        self.missing.append(count)
        self.needed_by.append([])
        for part in parts:
            self.needed_by[part].append(number)
        return number

    def describe(self) -> None:
        """State what each schema needs, and the schemas that these refer to."""
        while self.pending:
            number, schema = self.pending.pop()
            self.needed_by[self.all_of(self._parts(schema))].append(number)

    def derived(self) -> set[int]:
        """The statements that hold."""
        holding = [number for number, count in enumerate(self.missing) if count == 0]
        for number in holding:  # which grows
            for other in self.needed_by[number]:
                self.missing[other] -= 1
                if self.missing[other] == 0:
                    holding.append(other)
        return set(holding)

    def _parts(self, schema: dict[str, Any]) -> list[int]:
        """Statements that hold if the schema admits a finite value."""
        if "$id" in schema and schema is not self.root:  # references within are relative to it
            return []
        if "$ref" in schema:  # what stands next to it counts in some drafts only
            return [self.of_schema(self._target(schema["$ref"]))]
        parts = [self.of_schema(part) for part in _list(schema, "allOf")]
        for name in ("anyOf", "oneOf"):
            if choices := _list(schema, name):
                parts.append(self.any_of(map(self.of_schema, choices)))
        if "const" not in schema and "enum" not in schema:
            types = schema.get("type", ANYTHING)
            types = [types] if isinstance(types, str) else types if isinstance(types, list) else ANYTHING
            parts.append(self.any_of([self._of_type(schema, name) for name in types]))
        return parts

    def _of_type(self, schema: dict[str, Any], name: Any) -> int:
        """The statement that the schema admits a finite value of a type."""
        if name == "array":
            return self.all_of(self._items(schema))
        return self.all_of(self._properties(schema) if name == "object" else ())

    def _items(self, schema: dict[str, Any]) -> list[int]:
        least, first, rest = (
            schema.get("minItems", 0),
            _list(schema, "prefixItems"),
            schema.get("items", True),
        )
        if isinstance(rest, list):  # in older drafts
            first, rest = rest, schema.get("additionalItems", True)
        if not isinstance(least, int | float):
            return []
        parts = [self.of_schema(item) for index, item in enumerate(first) if index < least]
        return [*parts, self.of_schema(rest)] if least > len(first) else parts

    def _properties(self, schema: dict[str, Any]) -> list[int]:
        named, patterns = _mapping(schema, "properties"), _mapping(schema, "patternProperties")
        others = True if patterns else schema.get("additionalProperties", True)
        required = [name for name in _list(schema, "required") if isinstance(name, str)]
        parts = [self.of_schema(named.get(name, others)) for name in required]
        least = schema.get("minProperties", 0)
        if isinstance(least, int | float) and least > 0:
            parts.append(self.any_of(map(self.of_schema, [*named.values(), others])))
        return parts

    def _target(self, reference: Any) -> Any:
        """The schema that a reference within the document names; True for any other reference."""
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            return True
        target = self.root
        for part in unquote(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key in (places := [str(i) for i in range(len(target))]):
                target = target[places.index(key)]
            else:
                return True
            if isinstance(target, dict) and "$id" in target:
                return True
        return target


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _mapping(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}
