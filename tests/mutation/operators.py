"""Mutation operators: small changes of Python source that a test should notice.

Every operator looks at one node of the syntax tree and yields the text that could stand in its place.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
SIGNATURE = ("annotation", "returns", "decorator_list", "args")  # fields of the tree without faults
OPPOSITES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "minimum": "maximum",
    "maximum": "minimum",
}


class Site(NamedTuple):
    """A place in a file and the text that an operator would put there."""

    operator: str
    function: str  # its qualified name in the file
    line: int  # from 1
    start: int  # offsets in bytes
    end: int
    old: str
    new: str
    rank: str  # digest of all but the place: lines added elsewhere do not change it

    def apply(self, source: str) -> str:
        """The source with the fault."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


def _comparison(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield f"({text(node.left)} {COMPARISONS[type(node.ops[0])]} {text(node.comparators[0])})"


def _arithmetic(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield f"(({text(node.left)}) {ARITHMETIC[type(node.op)]} ({text(node.right)}))"


def _constant(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield str(node.value + 1)


def _real_constant(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and type(node.value) is float:
        yield repr(2 * node.value if node.value else 1.0)


def _negation(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield f"({text(node.operand)})"


def _condition(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield f"({word.join(f'({text(value)})' for value in node.values)})"


def _opposite(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.Name) and node.id in OPPOSITES:
        yield OPPOSITES[node.id]
    if isinstance(node, ast.Attribute) and node.attr in OPPOSITES:
        yield f"{text(node.value)}.{OPPOSITES[node.attr]}"


def _branches(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    """Exchanges the values of `where(condition, a, b)` and of `a if condition else b`."""
    if isinstance(node, ast.Call) and text(node.func).endswith("where") and len(node.args) == 3:
        condition, first, second = map(text, node.args)
        yield f"{text(node.func)}({condition}, {second}, {first})"
    if isinstance(node, ast.IfExp):
        yield f"(({text(node.orelse)}) if ({text(node.test)}) else ({text(node.body)}))"


def _statement(node: ast.AST, text: Callable[[ast.AST], str]) -> Iterator[str]:
    """Removes a call whose result is not used, or an assignment such as `x += 1`."""
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"


OPERATORS = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "constant + 1": _constant,
    "constant doubled": _real_constant,
    "negation dropped": _negation,
    "and / or": _condition,
    "min / max": _opposite,
    "branches exchanged": _branches,
    "statement dropped": _statement,
}


def sites(source: str) -> list[Site]:
    """All faults of a file, in an order that depends on their text only, not on where they stand.

    >>> sorted(site.new for site in sites("def f(x):\\n    return x + 1\\n"))
    ['((x) - (1))', '2']
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = lambda node: ast.get_source_segment(source, node) or ""
    seen: dict[tuple[str, ...], int] = {}
    result = []
    for function, node in _nodes_of_functions(ast.parse(source)):
        for operator, mutate in OPERATORS.items():
            for new in mutate(node, text):
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                key = operator, function, text(node), new
                seen[key] = seen.get(key, 0) + 1
                rank = hashlib.sha256("\0".join((*key, str(seen[key]))).encode()).hexdigest()
                result.append(Site(operator, function, node.lineno, start, end, text(node), new, rank))
    return sorted(result, key=lambda site: site.rank)


def _nodes_of_functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of the bodies of functions, with the names of the functions; annotations are left out."""

    def walk(node: ast.AST, name: str, inside: bool) -> Iterator[tuple[str, ast.AST]]:
        for field, value in ast.iter_fields(node):
            if field in SIGNATURE and not (field == "args" and isinstance(node, ast.Call)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST):
                    continue
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    is_function = inside or not isinstance(child, ast.ClassDef)
                    yield from walk(child, f"{name}.{child.name}".lstrip("."), is_function)
                else:
                    if inside and hasattr(child, "lineno"):
                        yield name, child
                    yield from walk(child, name, inside)

    return walk(tree, "", False)
