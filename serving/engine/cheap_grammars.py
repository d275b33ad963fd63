"""Cheap grammars: forms of which it is known that they compile in milliseconds and take little memory.

All others are tried in a process with limits (`grammar_check`). Cheap are short schemas that consist of
common keywords and demand no intersection of expressions, and short grammars in Lark's form without
recursion.
"""

import graphlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .grammar_forms import WHITESPACE

LONGEST = 4000  # characters of a grammar
LONGEST_EXPRESSION = 400  # characters of a regular expression
LONGEST_NUMBER = 20  # characters of a bound
HIGHEST_COUNT = 100_000
MOST_RULES = 4000  # of a grammar in which every use of a rule is written out
MOST_REPEATS = 2  # that have a number, of at most 9: one may be in the other

ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment".split()
)
DEFINITIONS = frozenset({"$defs", "definitions"})
ALONE = frozenset({"$ref", "anyOf"})  # beside other constraints, they demand intersections
PLAIN = frozenset({"type", "enum", "const", "required"})
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
COUNTS = frozenset("minLength maxLength minItems maxItems minProperties maxProperties".split())
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
GUIDANCE = {"whitespace_pattern": WHITESPACE}

LARK = re.compile(
    r"""\s+ | //[^\n]* | "(?:[^"\\\n]|\\.)*"i? | /(?P<expression>(?:[^/\\\n]|\\.)+)/[a-z]* | <\[\d+\]> | @\w+
    | (?P<name>[A-Za-z_]\w*) (?P<defined>(?:\[lazy\])?[ ]*:)? | [|()*+?] | (?P<repeat>\{\d(?:,\d)?\})""",
    re.VERBOSE,
)


def is_cheap(grammar: str) -> bool:
    """Whether a grammar, in the serialized form of llguidance, is known to be cheap to compile."""
    if len(grammar) > LONGEST:
        return False
    if not grammar.lstrip().startswith("{"):
        return _is_cheap_lark(grammar)
    try:
        parts = json.loads(grammar)["grammars"]
        return all(
            _is_cheap_schema(part["json_schema"])
            if part.get("json_schema") is not None
            else _is_cheap_lark(part["lark_grammar"])
            for part in parts
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _is_cheap_schema(schema: Any) -> bool:
    schemas = [schema]
    for schema in schemas:  # which grows
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            return False
        constraining = schema.keys() - ANNOTATIONS - DEFINITIONS - {"x-guidance", "type"}
        if constraining & ALONE and len(constraining) > 1:
            return False
        if not all(_is_cheap_keyword(key, value) for key, value in schema.items()):
            return False
        schemas.extend(_parts(schema))
    return True


def _is_cheap_keyword(key: str, value: Any) -> bool:
    """Whether a keyword is cheap with its value, apart from the schemas in it."""
    if key in BOUNDS:
        return isinstance(value, int | float) and len(str(value)) <= LONGEST_NUMBER
    if key in COUNTS:
        return isinstance(value, int) and 0 <= value <= HIGHEST_COUNT
    if key in ("properties", *DEFINITIONS):
        return isinstance(value, dict)
    if key in ("anyOf", "prefixItems"):
        return isinstance(value, list)
    if key == "format":
        return isinstance(value, str) and value in FORMATS
    if key == "x-guidance":
        return bool(value == GUIDANCE)
    return key in ANNOTATIONS or key in PLAIN or key in ("$ref", "items", "additionalProperties")


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas in a schema whose keywords are cheap."""
    for key, value in schema.items():
        if key in ("properties", *DEFINITIONS):
            yield from value.values()
        elif key in ("anyOf", "prefixItems"):
            yield from value
        elif key in ("items", "additionalProperties"):
            yield value


def _is_cheap_lark(text: str) -> bool:
    """Whether a grammar in Lark's form has only literals, short expressions and rules without recursion."""
    uses: dict[str, list[str]] = {}
    rule, place, repeats = "", 0, 0
    while place < len(text):
        match = LARK.match(text, place)
        if match is None or len(match["expression"] or "") > LONGEST_EXPRESSION:
            return False
        place = match.end()
        repeats += match["repeat"] is not None
        if match["defined"]:
            rule = match["name"]
            uses.setdefault(rule, [])
        elif match["name"]:
            if not rule or rule.isupper():  # terminals are written out, each in the others
                return False
            uses[rule].append(match["name"])
    try:
        order = list(graphlib.TopologicalSorter(uses).static_order())
    except graphlib.CycleError:
        return False
    rules: dict[str, int] = {}
    for name in order:  # those in use come first
        rules[name] = 1 + sum(rules[used] for used in uses.get(name, ()))
    return max(rules.values(), default=0) <= MOST_RULES and repeats <= MOST_REPEATS
