"""Runs tests in a copy of the tree that holds a fault."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("entropic_jax", "models", "serving", "tests")  # the rest of the tree is linked
SECONDS = itertools.count(int(time.time()))
TIME_LIMIT = 600  # seconds for the tests of a mutant; a thread pool that never returns is caught by it


def copy_tree(target: Path) -> None:
    """Copy the folders that mutants change, and link the rest of the tree."""
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(entry, target / entry.name, symlinks=True, ignore=ignored)
        elif not entry.name.startswith("."):
            (target / entry.name).symlink_to(entry)


def failure(tree: Path, arguments: Sequence[str]) -> str | None:
    """The end of the output of tests that fail in a copy of the tree; None if they pass.

    Args:
        tree: the copy.
        arguments: of pytest: files, and expressions that select tests.

    Raises:
        ValueError: no test ran.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", "slow or not slow"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(tree / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", *options, *arguments]
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
        raise ValueError(f"{' '.join(arguments)}: no test ran\n{output[-3000:]}")
    return output[-3000:]


def failure_with(tree: Path, file: str, text: str, arguments: Sequence[str]) -> str | None:
    """`failure` with another text in a file of the copy, which is restored.

    Args:
        tree: the copy.
        file: path in the tree.
        text: of the file, with a fault.
        arguments: of pytest.
    """
    path = tree / file
    original = path.read_text("utf-8")
    write(path, text)
    try:
        return failure(tree, arguments)
    finally:
        write(path, original)


def write(path: Path, text: str) -> None:
    """Write a source with a time of change, in seconds, that no version before it had: Python compiles it."""
    path.write_text(text, "utf-8")
    seconds = next(SECONDS)
    os.utime(path, (seconds, seconds))
