"""A fault that is sown into a kernel, and the tests that must fail."""

from typing import NamedTuple


class Tests(NamedTuple):
    """Tests of one file: those whose names match an expression of `pytest -k`."""

    file: str
    expression: str


class Mutant(NamedTuple):
    """A fault: `old`, which the file holds once, is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: Tests


def sown(file: str, tests: Tests, *faults: tuple[str, str, str]) -> tuple[Mutant, ...]:
    """Mutants of one file with the same tests; each fault is a name, the old text and the new."""
    return tuple(Mutant(name, file, old, new, tests) for name, old, new in faults)
