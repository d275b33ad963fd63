"""Edits of held-out code: rename an identifier, add type hints, reorder a table, each with its answer.

A prompt is code of a module up to a function, an instruction, and the function, or a table of functions. What
is to follow is the function, or the table, after the edit: most of it is copied, and no part of it loops.
"""

import ast
import dataclasses
import functools
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...harness.held_out_text import module_texts
from ..workload import loops

ANSWER = 64, 320  # tokens of an answer, at least and at most
REQUEST = 360  # tokens that instruction and code have at most
LARGEST_SHARE = 0.75  # of a prompt, that they may take
CHARACTERS = 12  # of the text before, that a token of a prompt has at most
OCCURRENCES = 4  # of an identifier that is renamed, at least
HINTS = 3  # that a function has, at least
ROWS = 12  # of a table
NEW_NAMES = ("payload", "cursor", "entry", "buffer", "origin")
HEADER = "| name | line | arguments | lines |\n| --- | --- | --- | --- |\n"

Span = tuple[int, int, bytes]  # where bytes begin and end, and what takes their place


class Edit(NamedTuple):
    """An edit as text."""

    before: str  # the modules up to the code
    instruction: str
    code: str
    answer: str

    @property
    def request(self) -> str:
        """The request after the preceding text: the instruction, and the code that it is about."""
        return f"# Task: {self.instruction}\n\n{self.code.rstrip()}\n\n# After the change:\n\n"


class Task(NamedTuple):
    """An edit as tokens."""

    prompt: list[int]
    answer: list[int]


@dataclasses.dataclass(frozen=True)
class Module:
    """A held-out module, and the text of those before it."""

    before: str
    text: str

    @functools.cached_property
    def data(self) -> bytes:
        """The text as bytes, in which a syntax tree counts columns."""
        return self.text.encode()

    @functools.cached_property
    def line_starts(self) -> list[int]:
        """The offset of every line."""
        return list(itertools.accumulate(map(len, self.data.splitlines(keepends=True)), initial=0))

    def functions(self) -> list[ast.FunctionDef]:
        """Its functions and methods, by line."""
        nodes = [node for node in ast.walk(ast.parse(self.text)) if isinstance(node, ast.FunctionDef)]
        return sorted(nodes, key=lambda node: node.lineno)

    def offset(self, line: int, column: int) -> int:
        """The offset in bytes of a place in the module.

        Args:
            line: from 1.
            column: in bytes, from 0.
        """
        return self.line_starts[line - 1] + column

    def edited(self, node: ast.FunctionDef, spans: list[Span]) -> str:
        """The code of a function, decorators included, after replacements.

        Args:
            node: the function.
            spans: within the function.
        """
        end = self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        parts, position = [], self.offset(first_line(node), 0)
        for begin, until, new in sorted(spans):
            parts += [self.data[position:begin], new]
            position = until
        return b"".join([*parts, self.data[position:end]]).decode() + "\n"

    def text_before(self, node: ast.FunctionDef) -> str:
        """The text of all modules up to a function."""
        return self.before + self.data[: self.offset(first_line(node), 0)].decode()


def first_line(node: ast.FunctionDef) -> int:
    """The line in which a function begins, with its decorators."""
    return min(part.lineno for part in (node, *node.decorator_list))


def modules() -> Iterator[Module]:
    """The held-out modules."""
    before = ""
    for text in module_texts():
        yield Module(before[-(1 << 16) :], text)
        before += text


def renamings() -> Iterator[Edit]:
    """An edit for each function with an identifier that occurs often enough."""
    for module in modules():
        for node in module.functions():
            code = module.edited(node, [])
            if (name := identifier(node)) is None:
                continue
            spans = places(module, node, name)
            first = len(code) % len(NEW_NAMES)
            new = next((x for x in (*NEW_NAMES[first:], *NEW_NAMES) if x not in code), None)
            if new is None or any(module.data[begin:end] != name.encode() for begin, end in spans):
                continue
            answer = module.edited(node, [(begin, end, new.encode()) for begin, end in spans])
            instruction = f"rename `{name}` to `{new}` in this function."
            yield Edit(module.text_before(node), instruction, code, answer)


def places(module: Module, node: ast.FunctionDef, name: str) -> list[tuple[int, int]]:
    """Beginnings and ends of an identifier that is a variable or parameter of a function.

    Args:
        module: the module that has it.
        node: the function.
        name: the identifier.
    """
    spans = []
    for part in ast.walk(node):
        if (isinstance(part, ast.Name) and part.id == name) or (
            isinstance(part, ast.arg) and part.arg == name
        ):
            begin = module.offset(part.lineno, part.col_offset)
            spans.append((begin, begin + len(name.encode())))
    return spans


def identifier(node: ast.FunctionDef) -> str | None:
    """The parameter or local variable that occurs most often; None if it does not occur often enough.

    Identifiers in formatted strings are left out: before Python 3.12, their places are not known.
    """
    formatted = {
        part.id
        for string in ast.walk(node)
        if isinstance(string, ast.JoinedStr)
        for part in ast.walk(string)
        if isinstance(part, ast.Name)
    }
    names, bound = Counter(), set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names[part.id] += 1
            if isinstance(part.ctx, ast.Store):
                bound.add(part.id)
        elif isinstance(part, ast.arg):
            names[part.arg] += 1
            bound.add(part.arg)
    often = [
        (count, name)
        for name, count in names.items()
        if count >= OCCURRENCES and len(name) > 2 and name in bound - formatted - {"self", "cls"}
    ]
    return max(often)[1] if often else None


def hintings() -> Iterator[Edit]:
    """An edit for each function with hints enough: its code without them, and with them."""
    for module in modules():
        for node in module.functions():
            spans = hints(module, node)
            bare = module.edited(node, [(begin, end, b"") for begin, end in spans])
            if len(spans) < HINTS or not is_bare(bare):
                continue
            instruction = "add type hints to the signature of this function."
            yield Edit(module.text_before(node), instruction, bare, module.edited(node, []))


def hints(module: Module, node: ast.FunctionDef) -> list[tuple[int, int]]:
    """Beginnings and ends of the hints of a signature.

    Args:
        module: the module that has it.
        node: the function.
    """
    spans = []
    for argument in arguments(node):
        if (hint := argument.annotation) is not None:
            begin = module.offset(argument.lineno, argument.col_offset) + len(argument.arg.encode())
            spans.append((begin, module.offset(hint.end_lineno or 0, hint.end_col_offset or 0)))
    if (result := node.returns) is not None:
        end = module.offset(result.end_lineno or 0, result.end_col_offset or 0)
        data = module.data[: module.offset(result.lineno, result.col_offset)]
        spans.append((len(data[: data.rindex(b"->")].rstrip()), end))
    return spans


def arguments(node: ast.FunctionDef) -> list[ast.arg]:
    """All parameters of a function."""
    of, starred = node.args, (node.args.vararg, node.args.kwarg)
    return [*of.posonlyargs, *of.args, *of.kwonlyargs, *(x for x in starred if x is not None)]


def is_bare(code: str) -> bool:
    """Whether code is a function whose signature has no hints."""
    try:
        (node,) = ast.parse(textwrap.dedent(code)).body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(node, ast.FunctionDef):
        return False
    return node.returns is None and all(x.annotation is None for x in arguments(node))


def reorderings() -> Iterator[Edit]:
    """An edit for each table of successive functions of a module: by line, and by name."""
    for module in modules():
        nodes = module.functions()
        for first in range(0, len(nodes) - ROWS + 1, ROWS):
            listed = nodes[first : first + ROWS]
            lines = {node.name: table_row(node) for node in listed}
            if len(lines) < ROWS or list(lines) == sorted(lines):
                continue
            tables = (HEADER + "".join(lines[name] for name in names) for names in (lines, sorted(lines)))
            yield Edit(module.text_before(listed[0]), "sort the rows of this table by name.", *tables)


def table_row(node: ast.FunctionDef) -> str:
    """The row of a function."""
    names = ", ".join(argument.arg for argument in arguments(node)) or "none"
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return f"| {node.name} | {node.lineno} | {names} | {lines} |\n"


KINDS: dict[str, Callable[[], Iterator[Edit]]] = {
    "rename": renamings,
    "type hints": hintings,
    "reorder a table": reorderings,
}


def tasks(kind: str, tokenizer_file: Path, context: int, number: int) -> list[Task]:
    """Tasks of a kind, drawn once and for all; the same edits for every context that has room for them.

    Args:
        kind: one of `KINDS`.
        tokenizer_file: the tokenizer file of the model.
        context: tokens of a prompt: code before the edit is left out, from its beginning, beyond them.
        number: number of tasks.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    edits = list(KINDS[kind]())
    (least, most), longest = ANSWER, min(REQUEST, LARGEST_SHARE * context)
    result: list[Task] = []
    for place in np.random.default_rng(0).permutation(len(edits)):
        edit = edits[place]
        request, answer = encode(edit.request), encode(edit.answer)
        if not least <= len(answer) <= most or len(request) > longest or loops(answer):
            continue
        before = encode(edit.before[-CHARACTERS * context :])
        if len(before) + len(request) < context:
            continue
        result.append(Task([*before[len(before) + len(request) - context :], *request], answer))
        if len(result) == number:
            break
    return result
