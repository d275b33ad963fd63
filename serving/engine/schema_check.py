"""Schema check: whether a JSON schema admits a finite value, as it may demand values within values endlessly.

A value must satisfy a set of schemas at a time: a schema, all that it refers to and is all of, and one of
each of its choices. A finite value satisfies a set if one does each set that its parts must satisfy: required
properties, and the least number of items. What follows from nothing, step by step, is the least fixed point
of these statements. All else counts as satisfiable, so that only a schema is refused that certainly admits
no finite value. Keywords mean together what they do in llguidance, which refuses those that it does not
implement, like `not` and `contains`.
"""

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

TYPES = ("null", "boolean", "number", "string", "array", "object")
NOTHING = {"type": []}  # what False says
REFERRING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
# Steps after which the schemas of a set are looked at singly, which may miss that they exclude each other.
MOST_WORK = 200_000

Key = tuple[str, int]


def part_without_end(grammar: str) -> int | None:
    """The place of the first schema, among those in a grammar, that admits no finite value.

    Args:
        grammar: in the serialized form of llguidance.
    """
    if not grammar.lstrip().startswith("{"):  # in Lark's form
        return None
    parts = json.loads(grammar).get("grammars", ())
    schemas = [part["json_schema"] for part in parts if part.get("json_schema") is not None]
    return next((place for place, schema in enumerate(schemas) if not admits_finite_value(schema)), None)


def admits_finite_value(schema: Any) -> bool:
    """False for a schema that certainly admits no finite value.

    >>> admits_finite_value({"type": "array", "items": {"$ref": "#"}})
    True
    >>> admits_finite_value({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
    False
    """
    statements = _Statements(schema)
    first = statements.of_schemas([schema])
    statements.describe()
    return first in statements.derived()


class _Statements:
    """Statements "a finite value satisfies these schemas", each of which follows from a number of others.

    A set of schemas is one of keys: ("all", n) for schema number n, ("own", n) for what it says itself,
    without references, `allOf` and choices, and ("choice", n) for one of several. ("end", n) says that
    references and `allOf` lead to an end.
    """

    def __init__(self, root: Any) -> None:
        """Without a statement. References are to parts of `root`."""
        self.root = root
        self.missing: list[int] = []  # statements that each one still needs
        self.needed_by: list[list[int]] = []
        self.numbers: dict[frozenset[Key], int] = {}  # statement about each set
        self.pending: list[tuple[int, frozenset[Key]]] = []
        self.parts: list[Any] = []  # schemas, and lists of choices
        self.part_numbers: dict[int, int] = {}  # by identity
        self.work = 0

    def of_schemas(self, schemas: Iterable[Any]) -> int:
        """The statement about the values that satisfy all schemas, which `describe` completes."""
        return self._of_keys(frozenset(("all", number) for number in self._numbers(schemas)))

    def all_of(self, parts: Iterable[int]) -> int:
        """The statement that all parts hold."""
        return self._add(needed := list(parts), len(needed))

    def any_of(self, parts: Iterable[int]) -> int:
        """The statement that one of the parts holds."""
        return self._add(list(parts), 1)

    def _add(self, parts: list[int], count: int) -> int:
        self.work += 1 + len(parts)
        number = len(self.missing)
        self.missing.append(count)
        self.needed_by.append([])
        for part in parts:
            self.needed_by[part].append(number)
        return number

    def describe(self) -> None:
        """State what each set needs, and the sets that these lead to."""
        while self.pending:
            number, keys = self.pending.pop()
            self.needed_by[self._derivation(keys)].append(number)

    def derived(self) -> set[int]:
        """The statements that hold."""
        holding = [number for number, count in enumerate(self.missing) if count == 0]
        for number in holding:  # which grows
            for other in self.needed_by[number]:
                self.missing[other] -= 1
                if self.missing[other] == 0:
                    holding.append(other)
        return set(holding)

    def _number(self, part: Any) -> int:
        """The number of a schema, or of a list of choices, in the document."""
        if id(part) not in self.part_numbers:
            self.part_numbers[id(part)] = len(self.parts)
            self.parts.append(part)
        return self.part_numbers[id(part)]

    def _numbers(self, schemas: Iterable[Any]) -> list[int]:
        """The numbers of schemas, without those that all values satisfy."""
        objects = (NOTHING if schema is False else schema for schema in schemas)
        return [self._number(schema) for schema in objects if isinstance(schema, dict) and schema]

    def _of_keys(self, keys: frozenset[Key]) -> int:
        self.work += len(keys)
        if len(keys) > 1 and self.work > MOST_WORK:  # each of them must be satisfied, too
            return self.all_of([self._of_keys(frozenset({key})) for key in keys])
        if keys not in self.numbers:
            self.numbers[keys] = number = self.all_of(())
            self.missing[number] = 1  # until it is described
            self.pending.append((number, keys))
        return self.numbers[keys]

    def _derivation(self, keys: frozenset[Key]) -> int:
        """The statement from which that about a set follows."""
        by_kind: dict[str, list[int]] = {"all": [], "end": [], "choice": [], "own": []}
        for kind, number in sorted(keys):
            by_kind[kind].append(number)
        single = lambda kind, number: self._of_keys(frozenset({(kind, number)}))
        if by_kind["end"]:
            return self.all_of([single("end", other) for n in by_kind["end"] for other in self._following(n)])
        if by_kind["all"]:
            expanded = self._expanded(by_kind["all"]) | {key for key in keys if key[0] != "all"}
            return self.all_of([self._of_keys(expanded), *[single("end", n) for n in by_kind["all"]]])
        if by_kind["choice"]:
            number, *_ = by_kind["choice"]
            others = keys - {("choice", number)}
            branch = lambda part: others | {("all", n) for n in self._numbers([part])}
            return self.any_of([self._of_keys(branch(part)) for part in self.parts[number]])
        schemas = [self.parts[number] for number in by_kind["own"]]
        types = set(TYPES).intersection(*map(_types, schemas))
        return self.any_of([self.all_of(self._of_type(schemas, name)) for name in sorted(types)])

    def _expanded(self, numbers: list[int]) -> frozenset[Key]:
        """Schemas together with those that they refer to or combine."""
        keys: set[Key] = set()
        reached, known = list(numbers), set(numbers)
        for number in reached:  # which grows
            schema = self.parts[number]
            if not self._is_readable(schema):
                continue
            if not REFERRING.issuperset(schema):
                keys.add(("own", number))
            lists = [choices for name in ("anyOf", "oneOf") if (choices := _list(schema, name))]
            keys.update(("choice", self._number(choices)) for choices in lists)
            following = [other for other in self._following(number) if other not in known]
            if self.work > MOST_WORK:
                keys.update(("all", other) for other in following)
            else:
                reached += following
                known.update(following)
        return frozenset(keys)

    def _following(self, number: int) -> list[int]:
        """The schemas that a schema refers to and is all of."""
        schema = self.parts[number]
        if not self._is_readable(schema):
            return []
        target = [self._target(schema["$ref"])] if "$ref" in schema else []
        following = self._numbers([*target, *_list(schema, "allOf")])
        self.work += 1 + len(following)
        return following

    def _is_readable(self, schema: dict[str, Any]) -> bool:
        """Whether references in a schema are to the document; with an `$id` they are relative to it."""
        return "$id" not in schema or schema is self.root

    def _of_type(self, schemas: list[dict[str, Any]], name: str) -> list[int]:
        """Statements that hold if a finite value of a type satisfies all schemas."""
        if any("const" in schema or "enum" in schema for schema in schemas):
            return []
        if name == "array":
            return self._items(schemas)
        return self._properties(schemas) if name == "object" else []

    def _items(self, schemas: list[dict[str, Any]]) -> list[int]:
        least = max((_count(schema, "minItems", 0) for schema in schemas), default=0)
        if any(_count(schema, "maxItems", least) < least for schema in schemas):
            return [self.any_of(())]
        forms = [_item_schemas(schema) for schema in schemas]
        longest = max((len(first) for first, _ in forms), default=0)
        places = [place for place in range(longest + 1) if place < least]  # the last is for all that follow
        item = lambda form, place: form[0][place] if place < len(form[0]) else form[1]
        self.work += len(places) * len(forms)
        return [self.of_schemas(item(form, place) for form in forms) for place in places]

    def _properties(self, schemas: list[dict[str, Any]]) -> list[int]:
        forms = [(_mapping(schema, "properties"), _other_properties(schema)) for schema in schemas]
        of_name = lambda name: self.of_schemas(named.get(name, others) for named, others in forms)
        required = {name for schema in schemas for name in _list(schema, "required") if isinstance(name, str)}
        self.work += len(required) * len(forms)
        parts = [of_name(name) for name in sorted(required)]
        if any(_count(schema, "minProperties", 0) > 0 for schema in schemas):
            names = {name for named, _ in forms for name in named}
            self.work += len(names) * len(forms)
            unnamed = self.of_schemas(others for _, others in forms)
            parts.append(self.any_of([*map(of_name, sorted(names)), unnamed]))
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
            elif isinstance(target, list) and (place := _place(key)) is not None and place < len(target):
                target = target[place]
            else:
                return True
            if isinstance(target, dict) and "$id" in target:
                return True
        return target


def _place(key: str) -> int | None:
    """The place in a list that a part of a reference names; None if it names none.

    >>> _place("17"), _place("017"), _place("x")
    (17, None, None)
    """
    is_number = key.isascii() and key.isdecimal() and len(key) < 10 and key == str(int(key))
    return int(key) if is_number else None


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows; integers are numbers."""
    types = schema.get("type", TYPES)
    types = [types] if isinstance(types, str) else types if isinstance(types, list | tuple) else TYPES
    allowed = {"number" if name == "integer" else name for name in types if isinstance(name, str)}
    if "const" in schema:
        allowed &= {_type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        allowed &= set(map(_type_of, schema["enum"]))
    return allowed


def _type_of(value: Any) -> str:
    """The name of the type of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _item_schemas(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of the first items, and that of all others."""
    rest = schema.get("items", True)
    if isinstance(rest, list):  # in older drafts
        return rest, schema.get("additionalItems", True)
    return _list(schema, "prefixItems"), rest


def _other_properties(schema: dict[str, Any]) -> Any:
    """The schema of properties without a name, unless patterns may be about them."""
    return True if _mapping(schema, "patternProperties") else schema.get("additionalProperties", True)


def _count(schema: dict[str, Any], name: str, default: float) -> float:
    value = schema.get(name)
    return value if isinstance(value, int | float) else default


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _mapping(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}
