"""Options of the sparse prefills besides their budget: what each accepts, and the methods that have it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .table import LARGEST_INT, Accepted, Flag, Number, ParameterError, short

ENTROPY_METHODS = ("entropyinfer", "entropy-prefill", "entropy-matched")
BUDGETED = "budgeted-prefill"
SPARSE_METHODS = (
    *ENTROPY_METHODS,
    "entropy-as-released",
    "criti-prefill",
    "uniform-prefill",
    "oracle-prefill",
    BUDGETED,
)


class PowerOfTwo(NamedTuple):
    """The powers of two from `low` to `high`."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"a power of two between {self.low} and {self.high}"

    @property
    def interval(self) -> str:
        """The ends."""
        return f"powers of two in [{self.low}, {self.high}]"

    def check(self, name: str, value: Any) -> int:
        """The value as an integer. Raises ParameterError.

        >>> PowerOfTwo(64, 256).check("segment", 128)
        128
        """
        number = Number(int, self.low, self.high)
        try:
            result = number.check(name, value)
        except ParameterError:
            result = 0
        if result == 0 or result & (result - 1):
            raise ParameterError(f"{name} must be {self}; got {short(value)}", name)
        return result


class FilePath(NamedTuple):
    """The path of a file."""

    def __str__(self) -> str:
        return "the path of a file"

    @property
    def interval(self) -> str:
        """The same."""
        return "a path"

    def check(self, name: str, value: Any) -> str:
        """The path as a string. Raises ParameterError."""
        if isinstance(value, str) and value and "\0" not in value:
            return value
        raise ParameterError(f"{name} must be {self}; got {short(value)}", name)


class PrefillOption(NamedTuple):
    """An option: accepted values, help, default as text, and the methods that have it."""

    accepts: Accepted
    help: str
    default: str
    methods: tuple[str, ...]


PREFILL_OPTIONS: dict[str, PrefillOption] = {
    "segment": PrefillOption(
        PowerOfTwo(64, 32768), "prompt tokens of a prefill segment", "512", SPARSE_METHODS
    ),
    "dense_below": PrefillOption(
        Number(int, 0, LARGEST_INT),
        "position before which segments of a prompt read all earlier tokens",
        "4096",
        SPARSE_METHODS,
    ),
    "tolerance": PrefillOption(
        Number(float, 0, 10),
        "Δ: relative growth of a head's entropy from a segment to the next that leaves its budget unchanged",
        "0.4",
        ENTROPY_METHODS,
    ),
    "growth": PrefillOption(
        Number(float, 0, 100),
        "α: growth of a head's budget, as a multiple of the base, per unit of growth of its entropy beyond Δ",
        "0.5",
        ENTROPY_METHODS,
    ),
    "rigid_below": PrefillOption(
        Number(float, 0, 1),
        "entropy, relative to the largest possible, below which a head keeps the base budget",
        "0.84",
        ENTROPY_METHODS,
    ),
    "table": PrefillOption(
        FilePath(), "table of head needs, from `entropic heads --calibrate --table`", "none", (BUDGETED,)
    ),
    "entropy": PrefillOption(
        Flag(),
        "weigh a head's need by exp(entropy of its attention in the segment before)",
        "no",
        (BUDGETED,),
    ),
    "least_share": PrefillOption(
        Number(float, 0, 1), "least budget of a head, as a part of the mean", "0.05", (BUDGETED,)
    ),
}


def check_prefill_options(options: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The options in their normal form.

    Args:
        options: values by name.
        method: name of the method that they are for.

    Raises:
        ParameterError: for an unknown name, a value that is not accepted, an option that the method does not
            have, or one that it needs and is missing.

    >>> check_prefill_options({"segment": 256.0}, "uniform-prefill")
    {'segment': 256}
    """
    result = {}
    for name, value in options.items():
        if name not in PREFILL_OPTIONS:
            names = ", ".join(PREFILL_OPTIONS)
            raise ParameterError(f"prefill_options must have no keys but {names}; got {short(name)}")
        option = PREFILL_OPTIONS[name]
        if method not in option.methods:
            raise ParameterError(
                f"{name} must not be set with the method {method}, which does not have it (only "
                f"{', '.join(option.methods)}); got {short(value)}",
                name,
            )
        result[name] = option.accepts.check(name, value)
    if method == BUDGETED and "table" not in result:
        raise ParameterError(
            f"table must be set with the method {method}: a file that `entropic heads --calibrate --table` "
            "has written; got none",
            "table",
        )
    return result
