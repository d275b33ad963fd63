"""The code uses the words of `docs/glossary.md`: retired names are gone, and every name in it exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
FOLDERS = ("entropic_jax", "models", "serving", "benchmarks", "examples", "tests")

# Words that no name may contain, and what the glossary says instead.
RETIRED_WORDS = {
    "batcher": "scheduler",
    "board": "device state",
    "desk": "branch state",
    "few": "skinny matmul",
    "jobs": "requests",
    "knobs": "gains",
    "mine": "the name of the thing",
    "seat": "row, slot",
    "seats": "rows, slots",
    "shrinking": "compression",
    "ticket": "output stream",
    "told": "emitted, replayed",
}
# Names that nothing may have; longer names may contain their words.
RETIRED_NAMES = {
    "Cut": "RowSubset",
    "Edits": "StateUpdates",
    "Flight": "InFlight",
    "Launches": "LaunchPlanner",
    "Lists": "PageLists",
    "MEASURES": "TRACE_FIELDS",
    "Pages": "BlockManager",
    "READING": "PREFILLING",
    "Read": "PrefillOutput",
    "Reader": "PageReader",
    "Reading": "ReadStats",
    "Reads": "PagePolicy",
    "Terms": "Constraints",
    "asked": "requested",
    "cut": "row_subset, or the name of the thing",
    "flight": "in_flight",
    "flights": "in_flight",
    "found": "result",
    "given": "options",
    "here": "the name of the thing",
    "made": "the name of the thing",
    "now": "step, time",
    "one": "step, row",
    "own": "the name of the thing",
    "read_prompts": "prefill",
    "some": "the name of the thing",
    "turn": "step",
    "wanted": "requested",
    "where": "step, position",
    "whole": "all, full",
}


def words(name: str) -> list[str]:
    """The words of an identifier in lower case: `_BatchSlot` and `batch_slot` are `batch`, `slot`."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def replacement(name: str) -> str | None:
    """The replacement of a retired name; None for any other name.

    Underscores around a name do not count, nor does the case of a name that is retired in lower case. Plurals
    are retired with their words, but for `ones`, an array.
    """
    bare = name.strip("_")
    if bare != "ones":
        for retired in (bare, bare.lower(), bare.removesuffix("s"), bare.lower().removesuffix("s")):
            if retired in RETIRED_NAMES:
                return RETIRED_NAMES[retired]
    forms = [form for word in words(name) for form in (word, word.removesuffix("s"))]
    return next((RETIRED_WORDS[form] for form in forms if form in RETIRED_WORDS), None)


def targets(node: ast.Assign | ast.AnnAssign) -> Iterator[ast.Name | ast.Attribute]:
    """The variables and attributes that a statement assigns to."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        for part in ast.walk(target):
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield part


def declared_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every class, function, parameter, module variable, field and attribute; no locals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                yield argument.lineno, argument.arg
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    yield from ((x.lineno, x.id) for x in targets(statement) if isinstance(x, ast.Name))
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield from ((x.lineno, x.attr) for x in targets(node) if isinstance(x, ast.Attribute))


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that the code binds, local variables included.

    The names of imported things, and keywords of calls, are left to their declarations.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ExceptHandler) and node.name is not None:
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.lineno, node.asname
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.lineno, node.name


def retired_names(root: Path) -> list[str]:
    """`file:line: name; use …` for every name that the code binds and that is retired."""
    result = []
    files = [path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.py")]
    for path in sorted([*files, *root.glob("run")]):
        place = path.relative_to(root).as_posix()
        names = {(1, path.stem), (1, path.parent.name)} if path.suffix else set()
        names |= set(bound_names(ast.parse(path.read_text("utf-8"))))
        for line, name in sorted(names):
            if (better := replacement(name)) is not None:
                result.append(f"{place}:{line}: {name}; use {better}")
    return result


DASHBOARD = "serving/http/dashboard"
BINDINGS = (
    r"\b(?:const|let|var|class|(?:async )?function)\s+(\w+)",  # in JavaScript
    r'\b(?:id|class)="([\w-]+)',  # in HTML
)


def retired_dashboard_names(root: Path) -> list[str]:
    """`file:line: name; use …` for every retired name that the dashboard's files bind or are called by."""
    result = []
    for path in sorted((root / DASHBOARD).iterdir()):
        lines = [f'id="{path.stem}"', *path.read_text("utf-8").splitlines()]
        for line, text in enumerate(lines):
            for name in (name for pattern in BINDINGS for name in re.findall(pattern, text)):
                if (better := replacement(name.replace("-", "_"))) is not None:
                    result.append(f"{path.name}:{line}: {name}; use {better}")
    return result


def test_no_retired_name_is_used():
    assert list(retired_names(ROOT)) == []
    assert retired_dashboard_names(ROOT) == []


def test_retired_names_of_the_dashboard_are_found(tmp_path):
    (folder := tmp_path / DASHBOARD).mkdir(parents=True)
    (folder / "flight.js").write_text(
        "const inFlight = 1;\nexport class Flight {}\nasync function one() {}\n"
    )
    (folder / "index.html").write_text('<tbody id="flight" class="in-flight"></tbody>\n')
    assert retired_dashboard_names(tmp_path) == [
        "flight.js:0: flight; use in_flight",
        "flight.js:2: Flight; use InFlight",
        "flight.js:3: one; use step, row",
        "index.html:1: flight; use in_flight",
    ]


def glossary_errors(page: str, root: Path) -> list[str]:
    """Files in a glossary's last column that do not exist, and names that a row's files do not declare."""
    errors = []
    for row in page.splitlines():
        if not row.startswith("| ") or row.startswith(("| term |", "| --- |")):
            continue
        entries = re.findall(r"`([^`]+)`", row.split("|")[3])
        files, names = [e for e in entries if "/" in e], [e for e in entries if "/" not in e]
        errors += [f"{file} does not exist" for file in files if not (root / file).exists()]
        trees = [ast.parse((root / file).read_text("utf-8")) for file in files if (root / file).is_file()]
        declared = {name for tree in trees for _, name in declared_names(tree)}
        errors += [f"{name} is not in {', '.join(files)}" for name in names if name not in declared]
    return errors


def test_every_name_in_the_glossary_exists():
    assert glossary_errors(GLOSSARY.read_text("utf-8"), ROOT) == []


def test_no_term_is_explained_twice():
    terms = [row.split("|")[1].strip() for row in GLOSSARY.read_text("utf-8").splitlines() if row[:2] == "| "]
    terms = [term for term in terms if term not in ("term", "---")]
    assert len(terms) > 40
    assert len(terms) == len(set(terms))


def test_retired_and_missing_names_are_found(tmp_path):
    folder = tmp_path / "serving"
    folder.mkdir()
    (folder / "batcher.py").write_text(
        "class DeviceState:\n"
        "    seat_of: int\n"
        "    boards: int\n"
        "    turns, ones = 1, 2\n"
        "    def step(self, told=None):\n"
        "        self.flight, result, one_row = told, 1, 2\n"
        "        for found in np.where(x, where=1):\n"
        "            cut = lambda mine, *given: 0\n"
        "class Dashboard: ...\n"
        "def _whole(reader, Whole): ...\n"
    )
    assert retired_names(tmp_path) == [
        "serving/batcher.py:1: batcher; use scheduler",
        "serving/batcher.py:2: seat_of; use row, slot",
        "serving/batcher.py:3: boards; use device state",
        "serving/batcher.py:4: turns; use step",
        "serving/batcher.py:5: told; use emitted, replayed",
        "serving/batcher.py:6: flight; use in_flight",
        "serving/batcher.py:7: found; use result",
        "serving/batcher.py:8: cut; use row_subset, or the name of the thing",
        "serving/batcher.py:8: given; use options",
        "serving/batcher.py:8: mine; use the name of the thing",
        "serving/batcher.py:10: Whole; use all, full",
        "serving/batcher.py:10: _whole; use all, full",
    ]
    page = "| term | meaning | in the code |\n| --- | --- | --- |\n"
    page += "| step | … | `serving/batcher.py` `Dashboard` |\n| row | … | `serving/batcher.py` `Row` |\n"
    assert glossary_errors(page + "| page | … | `serving/pages.py` |\n", tmp_path) == [
        "Row is not in serving/batcher.py",
        "serving/pages.py does not exist",
    ]


@pytest.mark.parametrize(
    ("name", "words_of_it"),
    [
        ("RowSubset", ["row", "subset"]),
        ("KV_compression", ["kv", "compression"]),
        ("_in_flight", ["in", "flight"]),
    ],
)
def test_words_of_a_name(name, words_of_it):
    assert words(name) == words_of_it
