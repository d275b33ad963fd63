"""Provenance of a measurement: machine, date and commit, and whether the code has changed since."""

import ast
import datetime
import functools
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .paths import ROOT

BUSY = 0.5  # load average from which on timings are not to be trusted
UNCOMMITTED = " with uncommitted changes"
OLDER = "Older than the code: what it measures has changed since."


def processor_name() -> str:
    """The name of this machine's processor, as the operating system gives it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def file_slug(name: str) -> str:
    """A name as part of a file name: `Intel(R) Xeon(R) Processor` becomes `intel-xeon-processor`."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def current_commit() -> str | None:
    """The short hash of the checked-out commit, marked if files differ from it; None without a repository."""
    try:
        commit = _git("rev-parse", "--short=7", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except FileNotFoundError:
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + (UNCOMMITTED if changes.stdout.strip() else "")


def describe_run(console: Console) -> dict[str, Any]:
    """When, where and at which commit a run is made, and how busy the machine is; warns if it is busy."""
    load = os.getloadavg()[0]
    if load > BUSY:
        console.print(f"[yellow]the machine is busy (load {load:.1f}): these numbers will mislead[/yellow]")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": current_commit(),
        "cpu": processor_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": load,
    }


def changed_since(commit: str, paths: Sequence[str]) -> bool | None:
    """Whether code of any of the paths differs from that at a commit; None where git cannot tell.

    Comments and docstrings of Python files are no code.
    """
    name = commit.partition(" ")[0]
    try:
        differing = _git("diff", "--name-only", "--no-renames", name, "--", *paths)
    except FileNotFoundError:
        return None
    if differing.returncode:
        return None
    return any(_code_differs(name, path) for path in differing.stdout.splitlines())


@functools.cache
def _code_differs(commit: str, path: str) -> bool:
    """Whether a file that differs from that at a commit has other code."""
    file = ROOT / path
    if not file.is_file() or file.suffix != ".py":
        return True
    before = _git("show", f"{commit}:{path}")
    if before.returncode:
        return True
    return code_of(before.stdout) != code_of(file.read_text("utf-8"))


def code_of(source: str) -> str:
    """A form of Python code that comments, docstrings and the layout of its text do not change."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def is_unknown(commit: str) -> bool:
    """Whether a repository with all of its history does not have a commit; False where git cannot tell."""
    try:
        shallow = _git("rev-parse", "--is-shallow-repository").stdout.strip()
        return shallow == "false" and _git("cat-file", "-e", commit.partition(" ")[0]).returncode != 0
    except FileNotFoundError:
        return False


def stamp(runs: Iterable[dict[str, Any]], measured_code: Sequence[str]) -> str:
    """The line that stands under the title of every published table.

    Args:
        runs: the runs whose figures the table has; of each, `date` and `commit`, or `recorded_in`, the commit
            that brought the figures, where the commit of the run itself was not noted.
        measured_code: files and folders that the table measures, relative to the root of the repository.

    Returns:
        Date and commit, and a sentence that says so if the measured code has changed since.
    """
    runs = list(runs)
    dates = sorted({run["date"] for run in runs if run.get("date")})
    exact = dict.fromkeys(run["commit"] for run in runs if run.get("commit"))
    recorded = dict.fromkeys(run["recorded_in"] for run in runs if run.get("recorded_in"))
    parts = [f"Measured {' and '.join(dates)}" if dates else "Date not noted"]
    if exact:
        parts.append(f"at {_commits(exact)}")
    if recorded:
        parts.append(f"recorded in {_commits(recorded)}")
    if not exact and not recorded:
        parts.append("recorded before commits were noted")
    changed = [changed_since(commit, measured_code) for commit in (*exact, *recorded)]
    unknown = any(map(is_unknown, (*exact, *recorded)))
    older = any(changed) or not changed or unknown or any(UNCOMMITTED in commit for commit in exact)
    return ", ".join(parts) + "." + (f" {OLDER}" if older else "")


def withdraw(stamps: Mapping[str, str], reasons: Mapping[str, str]) -> dict[str, str]:
    """The stamps of tables, with the reason on those whose conclusion is withdrawn.

    Args:
        stamps: the stamp of each table, by its title.
        reasons: why the tables with these titles are withdrawn.
    """
    return {
        title: f"{line} Withdrawn: {reasons[title]}" if title in reasons else line
        for title, line in stamps.items()
    }


def _commits(commits: Iterable[str]) -> str:
    quoted = []
    for commit in commits:
        name, space, _ = commit.partition(" ")
        text = f"`{name}`{UNCOMMITTED if space else ''}"
        quoted.append(f"{text} (not in this history)" if is_unknown(commit) else text)
    return ("commits " if len(quoted) > 1 else "commit ") + " and ".join(quoted)
