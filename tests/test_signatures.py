"""Signatures of the public surface: every parameter has a type, and a longer list of them is documented."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("entropic_jax", "models", "serving")
UNDOCUMENTED = 2  # parameters, up to which a docstring needs no list of them
# Folders whose functions are not checked yet.
PENDING: tuple[str, ...] = ()
# The parameters of a route are those of the request, which its schema documents.
ROUTES = {"get", "post", "put", "delete", "api_route"}

# A line of Args is a noun phrase: `state: the loop's state`, not `state: of the loop`, `that the loop has`,
# `which state`, `to be run`.
ELLIPTIC = re.compile(r"^ +\*{0,2}\w+(?:, \w+)*: (?:[Oo]f|[Tt]hat|[Ww]hich|[Tt]o be) .*", re.MULTILINE)
# A docstring begins with what it describes: `Cost of a pass`, not `What a pass costs`, `Of a pass`, `As f`.
HEADLESS = re.compile(r'^ *"""(?:What|Of|Those|As|That|Nobody)\b.*', re.MULTILINE)
# Files that may still have such lines of Args, and those below: their text is a key of compiled code.
ELLIPTIC_KERNELS = re.compile(r"entropic_jax/(cpu_runtime/|pallas/.*cpu\w*\.py)")
# A line of Args begins in lower case, but for symbols (`T_min`, `H₁`), abbreviations (`KV`) and names.
CAPITALISED = re.compile(
    r"^ +\*{0,2}\w+(?:, \*{0,2}\w+)*: (?!None\b|True\b|False\b|Python|Azure)"
    r"((?:A|[A-Z][a-z]+)(?![\w₀₁*(]).*)",
    re.MULTILINE,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Signature(NamedTuple):
    """A function of the tree, or a method of one of its classes."""

    file: str
    owner: ast.ClassDef | None
    function: Function

    @property
    def name(self) -> str:
        return self.function.name if self.owner is None else f"{self.owner.name}.{self.function.name}"

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]

    @property
    def public(self) -> bool:
        if self.owner is not None and self.owner.name.startswith("_"):
            return False
        return not self.function.name.startswith("_") or self.function.name == "__init__"

    @property
    def parameters(self) -> list[ast.arg]:
        """All of them but `self` and `cls`."""
        a = self.function.args
        first = [*a.posonlyargs, *a.args]
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in self.function.decorator_list)
        if self.owner is not None and not static:
            first = first[1:]
        return [*first, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]

    @property
    def documented(self) -> set[str]:
        """The parameters that the docstring names; for a constructor, also that of its class."""
        text = ast.get_docstring(self.function) or ""
        if self.owner is not None and self.function.name == "__init__":
            text += "\n\n" + (ast.get_docstring(self.owner) or "")
        return documented_names(text)

    @property
    def is_route(self) -> bool:
        calls = (d.func for d in self.function.decorator_list if isinstance(d, ast.Call))
        return any(isinstance(f, ast.Attribute) and f.attr in ROUTES for f in calls)

    @property
    def is_protocol(self) -> bool:
        return self.owner is not None and any("Protocol" in ast.unparse(base) for base in self.owner.bases)


def documented_names(docstring: str) -> set[str]:
    """The names in the section `Args:` of a docstring.

    >>> sorted(documented_names("Adds.\\n\\nArgs:\\n    a, b: x.\\n    *c: y: z.\\n\\nReturns:\\n    d: e."))
    ['a', 'b', 'c']
    """
    _, separator, section = docstring.partition("Args:\n")
    section = re.split(r"\n\s*\n|\n(?=\S)", section)[0] if separator else ""
    lines = section.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    named = (re.match(rf" {{{indent}}}(\*{{0,2}}\w+(?:, \*{{0,2}}\w+)*):", line) for line in lines)
    return {name.strip(" *") for match in named if match for name in match[1].split(",")}


def signatures(root: Path) -> Iterator[Signature]:
    """Every function at the top of a module, and every method of a class there."""
    for path in sorted(path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.py")):
        file = path.relative_to(root).as_posix()
        if file.startswith(("entropic_jax/models/", "entropic_jax/serving/")):
            continue  # seen through its link
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, Function):
                yield Signature(file, None, node)
            elif isinstance(node, ast.ClassDef):
                methods = (child for child in node.body if isinstance(child, Function))
                yield from (Signature(file, node, method) for method in methods)


def violations(root: Path, pending: tuple[str, ...] = ()) -> list[str]:
    """The public functions without a type, and those whose docstring leaves a parameter out.

    What implements a contract is documented once: a function of the same name in the same folder (the back
    ends of a kernel), a method of the same name in the same folder or of a protocol.
    """
    every = list(signatures(root))
    by_folder, by_protocol = defaultdict(set), defaultdict(set)
    for s in every:
        by_folder[s.folder, s.owner is None, s.function.name] |= s.documented
        if s.is_protocol:
            by_protocol[s.function.name] |= s.documented
    faults = []
    for s in every:
        if not s.public or any(s.folder == p or s.folder.startswith(f"{p}/") for p in pending):
            continue
        place = f"{s.file}:{s.function.lineno} {s.name}"
        untyped = [p.arg for p in s.parameters if p.annotation is None]
        untyped += ["the result"] * (s.function.returns is None)
        if untyped:
            faults.append(f"{place} has no type for {', '.join(untyped)}")
        if len(s.parameters) <= UNDOCUMENTED or s.is_route:
            continue
        known = s.documented
        if s.function.name != "__init__":
            known |= by_folder[s.folder, s.owner is None, s.function.name]
            known |= by_protocol[s.function.name] if s.owner is not None else set()
        missing = [p.arg for p in s.parameters if p.arg not in known]
        if missing:
            faults.append(f"{place} has no line under Args for {', '.join(missing)}")
    return faults


def test_public_functions_have_types_and_say_what_their_parameters_are():
    assert violations(ROOT, PENDING) == []


DOCUMENTED = '''
class Law(Protocol):
    def update(self, signal: int, action: int, state: int) -> int:
        """The next state.

        Args:
            signal: measured.
            action, state: in force.
        """

class Plain:
    def __init__(self, a: int, b: int, c: int) -> None:
        """Three numbers.

        Args:
            a: the first.
            b: the second.
            c: the third.
        """

    def update(self, signal: int, action: int, state: int) -> int: ...

def few(a: int, b: int) -> int: ...

def _private(a, b, c): ...

@router.post("/")
async def route(a: int, b: int, c: int) -> int: ...
'''


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DOCUMENTED, []),
        ("def f(a) -> int: ...", ["serving/x.py:1 f has no type for a"]),
        ("def f(*a: int): ...", ["serving/x.py:1 f has no type for the result"]),
        ("class A:\n    def f(self, a, /) -> int: ...", ["serving/x.py:2 A.f has no type for a"]),
        (
            "def f(a: int, b: int, *, c: int) -> int: ...",
            ["serving/x.py:1 f has no line under Args for a, b, c"],
        ),
        (
            'def f(a: int, b: int, c: int) -> int:\n    """F.\n\n    Args:\n        a: c:\n        b: c."""',
            ["serving/x.py:1 f has no line under Args for c"],
        ),
        (
            "class A:\n    def update(self, signal: int, action: int, state: int) -> int: ...",
            ["serving/x.py:2 A.update has no line under Args for signal, action, state"],
        ),
    ],
)
def test_what_is_left_out_is_found(tmp_path, text, said):
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving/x.py").write_text(text)
    assert violations(tmp_path) == said
    assert violations(tmp_path, ("serving",)) == []


def argument_sections(text: str) -> str:
    """The sections `Args:` of all docstrings of a module."""
    sections = re.findall(r"^( +)Args:\n((?:\1 +.*\n)+)", text, re.MULTILINE)
    return "".join(section for _, section in sections)


def capitalised(root: Path) -> dict[str, list[str]]:
    """The descriptions of arguments that begin in upper case, of each file that has any."""
    files = (path for folder in (*FOLDERS, "benchmarks") for path in root.glob(f"{folder}/**/*.py"))
    lines_of = {
        path.relative_to(root).as_posix(): CAPITALISED.findall(argument_sections(path.read_text("utf-8")))
        for path in files
        if not path.relative_to(root).as_posix().startswith(("entropic_jax/models/", "entropic_jax/serving/"))
    }
    return {file: lines for file, lines in lines_of.items() if lines and not ELLIPTIC_KERNELS.match(file)}


def test_descriptions_of_arguments_begin_in_lower_case():
    assert capitalised(ROOT) == {}


def test_a_description_in_upper_case_is_found(tmp_path):
    lines = {
        "a": "The state.",
        "b": "the state. None is the last.",
        "c": "T_min, in nats.",
        "d": "KV cache.",
        "e": "A state.",
        "f": "None for all.",
        "g": "H₁ of the row.",
        "h": "Consumed.",
    }
    text = (
        'def f(state: int) -> int:\n    """F.\n\n    Args:\n        state: {}\n    """\n    note: The = 1\n'
    )
    (tmp_path / "serving").mkdir()
    for name, line in lines.items():
        (tmp_path / f"serving/{name}.py").write_text(text.format(line))
    assert capitalised(tmp_path) == {f"serving/{name}.py": [lines[name]] for name in "aeh"}


def lines_like(form: re.Pattern[str], root: Path) -> dict[str, list[str]]:
    """The lines of that form in each file that has any."""
    files = (path for folder in (*FOLDERS, "benchmarks") for path in root.glob(f"{folder}/**/*.py"))
    lines_of = {path.relative_to(root).as_posix(): form.findall(path.read_text("utf-8")) for path in files}
    return {file: lines for file, lines in lines_of.items() if lines}


def test_docstrings_begin_with_what_they_describe():
    assert lines_like(HEADLESS, ROOT) == {}


@pytest.mark.parametrize("line", ["What a pass costs.", "Of a pass.", "As `f`.", "That many bytes."])
def test_a_docstring_without_a_head_is_found(tmp_path, line):
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving/x.py").write_text(f'def f():\n    """{line}"""\n    x = "What a pass costs."\n')
    assert lines_like(HEADLESS, tmp_path) == {"serving/x.py": [f'    """{line}"""']}


def elliptic(root: Path) -> dict[str, list[str]]:
    """The elliptic lines of Args in each file that has any."""
    lines_of = lines_like(ELLIPTIC, root)
    return {file: lines for file, lines in lines_of.items() if lines and not ELLIPTIC_KERNELS.match(file)}


def test_arguments_are_described_by_full_phrases():
    assert elliptic(ROOT) == {}


def test_an_elliptic_line_is_found(tmp_path):
    text = 'def f(state: int) -> int:\n    """F.\n\n    Args:\n        state: {}.\n    """\n'
    lines = (
        ("a", "of the loop"),
        ("b", "the loop's state"),
        ("c", "Of the loop"),
        ("d", "that the loop has"),
        ("e", "To be run"),
        ("f", "which state"),
        ("g", "thatch, and to boot"),
    )
    for name, line in lines:
        (tmp_path / "serving").mkdir(exist_ok=True)
        (tmp_path / f"serving/{name}.py").write_text(text.format(line))
    assert sorted(elliptic(tmp_path)) == [f"serving/{name}.py" for name in "acdef"]
