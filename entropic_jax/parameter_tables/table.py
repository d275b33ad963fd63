"""Tables of parameters: the default, accepted values, unit and help of each, stated once.

A table is a frozen dataclass whose fields are made by `parameter`. Validation, command-line options, the HTTP
schema and the documentation are derived from it. Imports neither JAX nor NumPy.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Pump(Table):
...     pressure: float = parameter(1.0, Number(float, 0, 10, above_low=True), "of the water", unit="bar")
>>> Pump(pressure=2).pressure
2.0
>>> Pump(pressure=0)
Traceback (most recent call last):
entropic_jax.parameter_tables.table.ParameterError: pressure must be a number above 0 and at most 10; got 0
"""

import dataclasses
import difflib
import functools
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

AUTO = "auto"
T = TypeVar("T", bound="Table")
LARGEST_INT = 2**31 - 1  # what the device's integers hold


class ParameterError(ValueError):
    """A value that a parameter does not accept. `param` is its name, or None if no single one is at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Accepted(Protocol):
    """The values that a parameter accepts; `str` of it is a phrase that follows "must be"."""

    def check(self, name: str, value: Any) -> Any:
        """The value in its normal form. Raises ParameterError, which names `name`."""

    @property
    def interval(self) -> str:
        """The same in a few characters, for a column of a table."""


class Number(NamedTuple):
    """The finite numbers of a type from `low` to `high`.

    `above_low` and `below_high` exclude the ends; `auto` also accepts the string AUTO; `optional` None.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    above_low: bool = False
    below_high: bool = False
    auto: bool = False
    optional: bool = False

    def __str__(self) -> str:
        noun = "an integer" if self.kind is int else "a number"
        low, high = f"{self.low:.10g}", f"{self.high:.10g}"
        if self.kind is int:
            low, high = str(self.low), str(self.high)
        if self.above_low or self.below_high:
            bounds = (
                f"{'above' if self.above_low else 'at least'} {low} and "
                f"{'below' if self.below_high else 'at most'} {high}"
            )
        else:
            bounds = f"between {low} and {high}"
        return f"{noun} {bounds}" + ' or "auto"' * self.auto + " or null" * self.optional

    @property
    def interval(self) -> str:
        """The range in mathematical notation.

        >>> Number(float, 0, 1, above_low=True).interval
        '(0, 1]'
        """
        ends = [f"−{-x:.10g}" if x < 0 else f"{x:.10g}" for x in (self.low, self.high)]
        if self.kind is int:
            ends = [_power(int(x)) for x in (self.low, self.high)]
        left, right = "(" if self.above_low else "[", ")" if self.below_high else "]"
        return f"{left}{ends[0]}, {ends[1]}{right}" + " or `auto`" * self.auto

    def check(self, name: str, value: Any) -> Any:
        """The value as this type; whole floats are integers. Raises ParameterError."""
        if (self.auto and isinstance(value, str) and value == AUTO) or (self.optional and value is None):
            return value
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and self._contains(value):
            return self.kind(value)  # type: ignore[bad-argument-type]
        raise ParameterError(f"{name} must be {self}; got {short(value)}", name)

    def _contains(self, value: Any) -> bool:
        return (
            self.low <= value <= self.high  # neither NaN nor an infinity
            and not (self.above_low and value == self.low)
            and not (self.below_high and value == self.high)
            and (self.kind is float or value == int(value))
        )


class Flag(NamedTuple):
    """True or false."""

    def __str__(self) -> str:
        return "true or false"

    @property
    def interval(self) -> str:
        """The two values."""
        return "true, false"

    def check(self, name: str, value: Any) -> bool:
        """The value if it is a bool. Raises ParameterError."""
        if isinstance(value, bool):
            return value
        raise ParameterError(f"{name} must be {self}; got {short(value)}", name)


class Choice(NamedTuple):
    """One of several names."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"

    @property
    def interval(self) -> str:
        """The names."""
        return ", ".join(f"`{name}`" for name in self.names)

    def check(self, name: str, value: Any) -> str:
        """The value if it is one of the names. Raises ParameterError."""
        if isinstance(value, str) and value in self.names:
            return value
        raise ParameterError(f"{name} must be {self}; got {short(value)}", name)


class Strings(NamedTuple):
    """A string, or a sequence of up to `most` of them, each of 1 to `length` characters."""

    most: int
    length: int

    def __str__(self) -> str:
        return f"a string of 1 to {self.length} characters or a list of up to {self.most}"

    @property
    def interval(self) -> str:
        """The number of strings and their length."""
        return f"up to {self.most} strings of 1 to {self.length} characters"

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        """The strings as a tuple. Raises ParameterError."""
        strings = (value,) if isinstance(value, str) else value
        if (
            isinstance(strings, Sequence)
            and _length(strings) <= self.most
            and all(isinstance(string, str) and 0 < len(string) <= self.length for string in strings)
        ):
            for string in strings:
                check_unicode(name, string)
            return tuple(strings)
        raise ParameterError(f"{name} must be {self}; got {short(value)}", name)


class TokenIds(NamedTuple):
    """A sequence of up to `most` token ids. `optional` accepts None instead of an empty one."""

    most: int
    optional: bool = False

    def __str__(self) -> str:
        return f"a list of up to {self.most} token ids" + ", at least one, or null" * self.optional

    @property
    def interval(self) -> str:
        """The number of token ids."""
        return f"up to {self.most} token ids"

    def check(self, name: str, value: Any) -> tuple[int, ...] | None:
        """The token ids as a tuple. Raises ParameterError."""
        if self.optional and value is None:
            return None
        if (
            isinstance(value, Sequence)
            and not isinstance(value, str | bytes | bytearray)
            and self.optional <= _length(value) <= self.most
            and not any(isinstance(token, str) or _token_id(token) is None for token in value)
        ):
            return tuple(int(token) for token in value)
        raise ParameterError(f"{name} must be {self}; got {short(value)}", name)


class TokenBiases(NamedTuple):
    """A mapping of up to `most` token ids to numbers between `low` and `high`, or −inf."""

    low: float
    high: float
    most: int

    def __str__(self) -> str:
        return (
            f"a mapping of up to {self.most} token ids to numbers between {self.low:g} and {self.high:g} "
            "(or -inf)"
        )

    @property
    def interval(self) -> str:
        """The range of a bias, and how many."""
        return f"[−{-self.low:g}, {self.high:g}] or −∞, for up to {self.most} tokens"

    def check(self, name: str, value: Any) -> dict[int, float]:
        """The biases by token id; ids may be written as decimal strings. Raises ParameterError."""
        if not isinstance(value, Mapping) or len(value) > self.most:
            raise ParameterError(f"{name} must be {self}; got {short(value)}", name)
        pairs: dict[int, float] = {}
        for key, bias in value.items():
            token = _token_id(key)
            number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
            if token is None or not (number and self._contains(bias)):
                raise ParameterError(f"{name} must be {self}; got {short(value)}", name)
            if token in pairs:
                raise ParameterError(f"{name} must state each token once; got {token} twice", name)
            pairs[token] = float(bias)
        return pairs

    def _contains(self, bias: Any) -> bool:
        return bool(bias == -math.inf or self.low <= bias <= self.high)


class Parameter(NamedTuple):
    """One line of a table."""

    name: str
    default: Any
    accepts: Any  # an `Accepted`
    unit: str  # "" for a pure number
    help: str  # a phrase without a full stop
    scope: str  # who applies it: a word of the table


def parameter(default: Any, accepts: Any, text: str, *, unit: str = "", scope: str = "") -> Any:
    """A field of a table.

    Args:
        default: its value where none is given.
        accepts: the accepted values: a `Number`, `Flag`, `Choice`, `Strings`, `TokenIds` or `TokenBiases`.
        text: what it does, as a phrase without a full stop.
        unit: the unit of its values; "" for a pure number.
        scope: who applies it; the words are the table's own.

    Returns:
        A `dataclasses.field` whose metadata holds the rest.
    """
    metadata = {"accepts": accepts, "unit": unit, "help": text, "scope": scope}
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Table:
    """A dataclass whose fields made by `parameter` are checked, and brought into their normal form."""

    def __post_init__(self) -> None:
        """Check every parameter. Raises ParameterError."""
        for line in parameters_of(type(self)):
            object.__setattr__(self, line.name, line.accepts.check(line.name, getattr(self, line.name)))

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some fields. Raises ParameterError."""
        return dataclasses.replace(self, **changes)

    def asdict(self) -> dict[str, Any]:
        """The parameters by name."""
        return {line.name: getattr(self, line.name) for line in parameters_of(type(self))}


def refuses_unknown(instead: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """A decorator of tables whose errors for unknown keyword arguments say what to use.

    Args:
        instead: for names that other libraries have, a clause that says what there is in their place.
    """

    def decorate(table: type[T]) -> type[T]:
        init: Callable[..., None] = table.__init__
        names = [field.name for field in dataclasses.fields(table)]

        @functools.wraps(init)
        def checked(self: T, *args: Any, **values: Any) -> None:
            for name in values:
                if name not in names:
                    close = difflib.get_close_matches(name, names, 1)
                    hint = f"did you mean {close[0]}?" if close else f"its parameters are {', '.join(names)}"
                    raise TypeError(f"{table.__name__} has no parameter {name}; {instead.get(name, hint)}")
            init(self, *args, **values)

        table.__init__ = checked  # type: ignore[method-assign]
        return table

    return decorate


def parameters_of(table: type[Table], scopes: Iterable[str] | None = None) -> tuple[Parameter, ...]:
    """The lines of a table, in order; of some `scopes` only, if they are given."""
    lines = []
    for field in dataclasses.fields(table):
        if "accepts" not in field.metadata:
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        lines.append(Parameter(field.name, default, **field.metadata))
    return tuple(line for line in lines if scopes is None or line.scope in scopes)


def markdown(table: type[Table]) -> str:
    """The table in Markdown, as the documentation holds it."""
    rows = [("Parameter", "Default", "Accepted", "Unit", "Meaning"), ("---",) * 5]
    for line in parameters_of(table):
        first = line.help[0].upper() if line.help[0].isascii() else line.help[0]
        text = first + line.help[1:].replace("|", "\\|")
        rows.append((f"`{line.name}`", _default(line.default), line.accepts.interval, line.unit, text))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _default(value: Any) -> str:
    if value is None or value in ((), {}):
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _power(value: int) -> str:
    """An integer, short where it is next to a power of two.

    >>> _power(2**31 - 1), _power(-(2**63)), _power(20)
    ('2³¹ − 1', '−2⁶³', '20')
    """
    superscripts = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    size = abs(value)
    for offset, tail in ((1, " − 1"), (0, "")):
        exponent = (size + offset).bit_length() - 1
        if exponent > 15 and size + offset == 1 << exponent and (value > 0 or not offset):
            return f"{'−' if value < 0 else ''}2{str(exponent).translate(superscripts)}{tail}"
    return f"−{size}" if value < 0 else str(value)


def _token_id(key: Any) -> int | None:
    """A token id as an integer, from an integer or decimal digits; None if it is not one."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(LARGEST_INT)):
        key = int(key)
    if not isinstance(key, numbers.Integral) or isinstance(key, bool):
        return None
    token = int(key)
    return token if 0 <= token <= LARGEST_INT else None


def _length(value: Sequence[Any]) -> int:
    """The number of items, or the largest that Python states."""
    try:
        return len(value)
    except OverflowError:  # of a range
        return sys.maxsize


def check_unicode(name: str, text: str) -> None:
    """Raise ParameterError for a text with lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{name} must be Unicode; got {short(text)}, which has a lone surrogate"
        raise ParameterError(message, name) from None


def short(value: Any) -> str:
    """The value as Python writes it, cut to 60 characters.

    >>> short(10**5000), short([10**5000])
    ('a very large integer', 'a list with a very large integer')
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        large = "a very large integer"
        return large if isinstance(value, int) else f"a {type(value).__name__} with {large}"
    return text if len(text) <= 60 else text[:57] + "..."
