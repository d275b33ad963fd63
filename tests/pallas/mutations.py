"""Mutation tests of the kernels: a fault is sown into a copy of the tree, and its tests must fail.

`pytest -m mutation` runs all of `mutants.py`; `python -m tests.pallas.mutations WORD ...` runs those whose
name or file holds a word, and prints what is caught.
"""

import sys
import tempfile
from pathlib import Path

from ..mutation import runner
from .mutants import MUTANTS, Mutant, Tests


def failure(tree: Path, tests: Tests) -> str | None:
    """The end of the output of tests that fail in a copy of the tree; None if they pass."""
    return runner.failure(tree, _arguments(tests))


def _arguments(tests: Tests) -> list[str]:
    """With the cases that CI leaves out: some faults show in these alone."""
    chosen = ["-k", tests.expression] if tests.expression else []
    return [tests.file, "-m", "exhaustive or slow or not slow", *chosen]


def mutation_failure(tree: Path, mutant: Mutant) -> str | None:
    """`failure` of the mutant's tests with its fault in a copy of the tree, which is restored."""
    text = (tree / mutant.file).read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds its text {text.count(mutant.old)} times")
    return runner.failure_with(
        tree, mutant.file, text.replace(mutant.old, mutant.new), _arguments(mutant.tests)
    )


def main() -> None:
    """Run the mutants whose names or files hold one of the arguments, or all, and print what is caught."""
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(x in m.name or x in m.file for x in sys.argv[1:])]
    num_caught = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        runner.copy_tree(tree)
        for mutant in chosen:
            caught = mutation_failure(tree, mutant) is not None
            num_caught += caught
            print(f"{'caught' if caught else 'MISSED'}  {mutant.file}: {mutant.name}", flush=True)
    print(f"{num_caught} of {len(chosen)} caught")


if __name__ == "__main__":
    main()
