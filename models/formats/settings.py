"""Fields of `quantization_config`, each checked as it is read."""

from collections.abc import Mapping
from typing import Any

from ..config import ModelError, abbreviate, is_integer


class Settings:
    """An object of config.json whose fields are read by name.

    Args:
        fields: the object.
        name: its name, for messages.
    """

    def __init__(self, fields: Any, name: str = "quantization_config") -> None:
        self.fields, self.name = fields, name
        if not isinstance(fields, Mapping):
            raise ModelError(f"{name} must be an object; got {abbreviate(fields)}")

    def refuse(self, field: str, requirement: str) -> ModelError:
        """The error of a field that must be something else."""
        return ModelError(
            f"{self.name}.{field} must be {requirement}; got {abbreviate(self.fields.get(field))}"
        )

    def choice(self, field: str, accepted: tuple[Any, ...], default: Any = None) -> Any:
        """One of a few values.

        Args:
            field: its name.
            accepted: the values.
            default: where the field is absent or null.
        """
        value = self.fields.get(field)
        value = default if value is None else value
        kinds = [type(x) for x in accepted]
        if not any(value == x and type(value) is kind for x, kind in zip(accepted, kinds, strict=True)):
            raise self.refuse(field, " or ".join(repr(x) for x in accepted))
        return value

    def boolean(self, field: str, default: bool) -> bool:
        return self.choice(field, (True, False), default)

    def group_size(self, field: str, default: int) -> int:
        """Numbers that share a scale; -1: all of a row."""
        value = self.fields.get(field)
        value = default if value is None else value
        if not is_integer(value) or (value < 1 and value != -1):
            raise self.refuse(field, "a positive integer or -1")
        return value

    def block(self, field: str) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None if absent."""
        value = self.fields.get(field)
        if value is None:
            return None
        valid = isinstance(value, (list, tuple)) and len(value) == 2
        if not valid or not all(is_integer(n) and n > 0 for n in value):
            raise self.refuse(field, "a list of two positive integers")
        return value[0], value[1]

    def absent(self, *names: str) -> None:
        """Raise ModelError unless these fields are absent, null, false or empty."""
        for field in names:
            if self.fields.get(field):
                raise self.refuse(field, "absent or null")

    def part(self, field: str) -> "Settings | None":
        """An object in the object; None if absent."""
        value = self.fields.get(field)
        return None if value is None else Settings(value, f"{self.name}.{field}")
