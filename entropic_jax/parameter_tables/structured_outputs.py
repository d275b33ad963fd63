"""Structured outputs: the constraint that a text has to satisfy, as `SamplingParams` holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .table import ParameterError, refuses_unknown, short

ACCEPTED = {
    "json": "a JSON schema, as a mapping or a string",
    "regex": "a regular expression, as a string that is not empty",
    "choice": "a list of at least one string, none of them empty",
    "grammar": "a grammar in Lark's or GBNF's form, as a string that is not empty",
    "json_object": "true or false",
}
INSTEAD = {
    "disable_any_whitespace": "state x-guidance.whitespace_flexible in the schema",
    "structural_tag": "a server calls tools",
    "whitespace_pattern": "state x-guidance.whitespace_pattern in the schema",
}
"""Replacements for parameters of vLLM."""


@refuses_unknown(INSTEAD)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on a text: one of these. Names are vLLM's.

    Args:
        json: schema of the JSON that the text has to be.
        regex: regular expression that the text has to match from beginning to end.
        choice: texts, of which it has to be one.
        grammar: grammar in Lark's or GBNF's form that it has to follow.
        json_object: whether it has to be any object of JSON.

    Raises:
        ParameterError: A value has another form, or there is not exactly one constraint.

    >>> StructuredOutputsParams(choice=["yes", "no"]).stated
    'choice'
    >>> StructuredOutputsParams(choice=["yes"], regex="no")
    Traceback (most recent call last):
    entropic_jax.parameter_tables.table.ParameterError: structured_outputs must have one of json, regex, \
choice, grammar, json_object; got regex and choice
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name, accepted in ACCEPTED.items():
            value = getattr(self, name)
            if value is not None and not _accepts(name, value):
                raise ParameterError(f"{name} must be {accepted}; got {short(value)}", name)
        stated = self._all_stated()
        if len(stated) != 1:
            names, got = ", ".join(ACCEPTED), " and ".join(stated) or "none"
            raise ParameterError(
                f"structured_outputs must have one of {names}; got {got}", "structured_outputs"
            )

    @property
    def stated(self) -> str:
        """The name of the field that is stated."""
        return self._all_stated()[0]

    def _all_stated(self) -> list[str]:
        names = [field.name for field in fields(self)]
        return [
            name for name in names if getattr(self, name) is not None and getattr(self, name) is not False
        ]


def _accepts(name: str, value: Any) -> bool:
    """Whether a field accepts a value."""
    match name:
        case "json":
            return isinstance(value, Mapping | str)
        case "choice":
            listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            return listed and len(value) > 0 and all(isinstance(x, str) and x for x in value)
        case "json_object":
            return isinstance(value, bool)
    return isinstance(value, str) and value != ""
