"""The form of the source: linter, formatter, type checker, and house rules on files and errors."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONG = 400  # lines, above which a file must say here why it is one
EXCUSED: dict[str, str] = {}
LONG_FUNCTION = 80  # lines with signature and docstring, above which a function must say here why it is one
EXCUSED_FUNCTIONS: set[str] = set()
LONG_PHASE = 40  # lines with signature and docstring, of a step of the loop and each of its phases
PHASES = (  # the files in which a step and its phases are written
    "entropic_jax/loop.py",
    "entropic_jax/state/row_subset.py",
    "entropic_jax/phases/*.py",
    "entropic_jax/sampling/processors.py",
    "entropic_jax/sampling/sampler.py",
    "entropic_jax/sampling/step_entropy.py",
    "entropic_jax/speculation/speculator.py",
    "entropic_jax/speculation/verification.py",
)
EXCUSED_PHASES = {
    "prefill.py: start"
}  # runs once, on the host: most of it is the description of its arguments


def tool(name: str) -> str:
    """The program next to this Python; the test is skipped if it is not installed."""
    path = Path(sys.executable).parent / (f"{name}.exe" if os.name == "nt" else name)
    if not path.exists():
        pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    return str(path)


def check(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def sources() -> list[str]:
    """Every Python file that is or could be committed."""
    folders = ("entropic_jax", "models", "serving", "benchmarks", "examples", "tests")
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in [*files, ROOT / "run"])


def test_linter():
    check(tool("ruff"), "check", "--quiet", "--output-format", "concise")


def test_formatter():
    check(tool("ruff"), "format", "--check")


def test_types():
    check(
        tool("pyrefly"), "check", "--python-interpreter-path", sys.executable, "--output-format", "min-text"
    )


def test_no_file_is_a_heap():
    heaps = ("utils.py", "util.py", "common.py", "helpers.py", "misc.py")
    assert [path for path in sources() if path.split("/")[-1] in heaps] == []


def test_no_test_moves_the_clock_of_other_threads():
    moved = re.compile(r"setattr\([\w.]*\btime, |setattr\([\"']time\.")
    assert [path for path in sources() if moved.search((ROOT / path).read_text("utf-8"))] == []


def test_no_file_is_long_without_a_reason():
    long = {path for path in sources() if len((ROOT / path).read_text("utf-8").splitlines()) > LONG}
    assert long == set(EXCUSED)


def long_functions(text: str, most: int = LONG_FUNCTION) -> list[str]:
    """Qualified names of the functions of more than `most` lines; decorators do not count."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)

    def search(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (*functions, ast.ClassDef)):
                yield from search(child, prefix)
                continue
            end = child.end_lineno or child.lineno
            if isinstance(child, functions) and end - child.lineno >= most:
                yield prefix + child.name
            yield from search(child, f"{prefix}{child.name}.")

    return list(search(ast.parse(text), ""))


def test_no_function_is_long_without_a_reason():
    long = {
        f"{path}:{name}" for path in sources() for name in long_functions((ROOT / path).read_text("utf-8"))
    }
    assert long == EXCUSED_FUNCTIONS


def test_a_phase_of_the_step_fits_on_a_screen():
    paths = [path for pattern in PHASES for path in sorted(ROOT.glob(pattern))]
    assert len(paths) > len(PHASES)
    long = {
        f"{path.name}: {name}"
        for path in paths
        for name in long_functions(path.read_text("utf-8"), LONG_PHASE)
    }
    assert long == EXCUSED_PHASES


def function_of(lines: int, head: str = "def f():") -> str:
    return "\n".join([head, *["    pass"] * (lines - 1)])


def test_long_functions_are_recognised():
    assert long_functions(function_of(LONG_FUNCTION)) == []
    assert long_functions(function_of(LONG_FUNCTION + 1)) == ["f"]
    assert long_functions(function_of(LONG_PHASE), LONG_PHASE) == []
    assert long_functions(function_of(LONG_PHASE + 1), LONG_PHASE) == ["f"]
    assert long_functions(function_of(LONG_FUNCTION + 1, "async def f():")) == ["f"]
    method = "class C:\n" + textwrap.indent(function_of(LONG_FUNCTION + 1), "    ")
    assert long_functions(method) == ["C.f"]
    inner = "if True:\n" + textwrap.indent(
        "def g():\n    x = 1\n" + textwrap.indent(function_of(81), "    "), "    "
    )
    assert long_functions(inner) == ["g", "g.f"]


def test_no_work_is_left_for_later():
    markers = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    marked = [p for p in sources() if any(m in (ROOT / p).read_text("utf-8") for m in markers)]
    assert marked == []


# Errors read `X must be …; got …`. The old form was `X is …; accepted are …`.
OLD_ERRORS = re.compile(
    r"\baccepted (?:are|is)\b|\baccepted:|\bis not accepted\b|\b(?:is|has|holds) \{\}[;:]"
)


def strings(path: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string except docstrings; `{}` stands for a value of an f-string."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.lineno, node.value


def test_errors_say_what_a_value_must_be():
    files = [path for path in sources() if not path.startswith("tests/")]
    assert [f"{p}:{n}: {text}" for p in files for n, text in strings(p) if OLD_ERRORS.search(text)] == []


@pytest.mark.parametrize(
    ("text", "old"),
    [
        ("k is {}; accepted are 1 to {}", True),
        ("k is {}; 1 to {}", True),
        ("{} is missing; accepted: a list", True),
        ("{} is not accepted; give a number", True),
        ("k must be between 1 and {}; got {}", False),
        ("the offer was accepted", False),
    ],
)
def test_old_errors_are_recognised(text, old):
    assert bool(OLD_ERRORS.search(text)) == old


def shadowing_fields(text: str) -> list[str]:
    """`class.field` of the fields of named tuples that hide a method of tuples."""
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return [
        f"{node.name}.{field.target.id}"
        for node in classes
        if any(ast.unparse(base).split(".")[-1] == "NamedTuple" for base in node.bases)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.target.id in ("count", "index")
    ]


def test_fields_of_named_tuples_do_not_hide_methods():
    assert [
        f"{p}:{name}" for p in sources() for name in shadowing_fields((ROOT / p).read_text("utf-8"))
    ] == []


def test_fields_that_hide_methods_are_recognised():
    body = "    index: int\n    num_rows: int\n    count: int = 0\n"
    assert shadowing_fields(f"class A(NamedTuple):\n{body}") == ["A.index", "A.count"]
    assert shadowing_fields(f"class A(typing.NamedTuple):\n{body}") == ["A.index", "A.count"]
    assert shadowing_fields(f"class A:\n{body}") == []
