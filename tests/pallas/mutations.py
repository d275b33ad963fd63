"""Mutation tests of the kernels: a fault is sown into a copy of the tree, and its tests must fail.

`pytest -m mutation` runs all of `mutants.py`; `python -m tests.pallas.mutations WORD ...` runs those whose
name or file holds a word, and prints what is caught.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .mutants import MUTANTS, Mutant, Tests

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("entropic_jax", "tests")  # the rest of the tree is linked
TIME_LIMIT = 600  # seconds for the tests of a mutant; a pool that never returns is caught by it


def copy_tree(target: Path) -> None:
    """Copy the folders that mutants change, and link the rest of the tree."""
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(entry, target / entry.name, symlinks=True, ignore=ignored)
        elif not entry.name.startswith("."):
            (target / entry.name).symlink_to(entry)


def failure(tree: Path, tests: Tests) -> str | None:
    """The end of the output of tests that fail in a copy of the tree; None if they pass.

    Raises:
        ValueError: no test ran.
    """
    selection = ["-k", tests.expression] if tests.expression else []
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, tests.file, *selection]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {TIME_LIMIT} seconds"
    output = f"{done.stdout}\n{done.stderr}"
    if done.returncode == 0:
        return None
    if done.returncode in (2, 3, 4, 5) or "errors during collection" in output:
        raise ValueError(f"{tests}: no test ran\n{output[-3000:]}")
    return output[-3000:]


def mutation_failure(tree: Path, mutant: Mutant) -> str | None:
    """`failure` of the mutant's tests with its fault in a copy of the tree, which is restored."""
    path = tree / mutant.file
    text = path.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds its text {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        return failure(tree, mutant.tests)
    finally:
        path.write_text(text, "utf-8")


def main() -> None:
    """Run the mutants whose names or files hold one of the arguments, or all, and print what is caught."""
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(x in m.name or x in m.file for x in sys.argv[1:])]
    num_caught = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for mutant in chosen:
            caught = mutation_failure(tree, mutant) is not None
            num_caught += caught
            print(f"{'caught' if caught else 'MISSED'}  {mutant.file}: {mutant.name}", flush=True)
    print(f"{num_caught} of {len(chosen)} caught")


if __name__ == "__main__":
    main()
