"""Interpreter of a small subset of Python, which evaluates what a model wrote without executing it.

The subset has numbers, strings, tuples, lists, sets and dicts, operators, functions, loops, conditions,
comprehensions, assertions, and some built-in functions and methods. It has no imports, no attributes but the
methods listed, and no files. The number of steps is bounded. Code outside of the subset raises `Unknown`.
"""

# ruff: noqa: N802, N815, N818 (methods are named after the nodes of the tree; not every exception is an error)

import ast
import operator
from collections.abc import Callable, Iterable
from typing import Any

STEPS = 100_000
LONGEST = 10_000  # items of a container or characters, and bits of an integer


class Unknown(Exception):
    """Code outside of the subset, or beyond its bounds."""


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Break(Exception): ...


class _Continue(Exception): ...


BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
FUNCTIONS = (abs, all, any, bool, chr, dict, divmod, enumerate, float, int, len, list, max, min, ord, range)
MORE_FUNCTIONS = (reversed, round, set, sorted, str, sum, tuple, zip)
BUILTINS: dict[str, Any] = {f.__name__: f for f in (*FUNCTIONS, *MORE_FUNCTIONS)}
METHODS: dict[type, set[str]] = {
    str: set("lower upper strip lstrip rstrip split join startswith endswith isdigit isalpha isupper islower "
             "isalnum find count index title capitalize swapcase replace".split()),
    list: set("append extend pop insert index count sort reverse copy remove".split()),
    dict: set("get items keys values pop setdefault update copy".split()),
    set: set("add discard remove union intersection difference copy".split()),
    tuple: {"index", "count"},
}  # fmt: skip


def run(source: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names that a program leaves behind; Unknown, SyntaxError, or what the program itself raises."""
    scope = dict(names or {})
    machine = _Machine()
    machine.block(ast.parse(source).body, scope)
    return scope


def evaluate(source: str, names: dict[str, Any] | None = None) -> Any:
    """The value of an expression; raises as `run`."""
    return _Machine().value(ast.parse(source.strip(), mode="eval").body, dict(names or {}))


class _Machine:
    def __init__(self) -> None:
        self.left = STEPS

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Unknown("too many steps")

    def block(self, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        for statement in body:
            self.count()
            handler = getattr(self, f"do_{type(statement).__name__}", None)
            if handler is None:
                raise Unknown(type(statement).__name__)
            handler(statement, scope)

    def value(self, node: ast.expr | None, scope: dict[str, Any]) -> Any:
        self.count()
        if node is None:
            return None
        handler = getattr(self, f"of_{type(node).__name__}", None)
        if handler is None:
            raise Unknown(type(node).__name__)
        return self.small(handler(node, scope))

    @staticmethod
    def small(value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict | set) and len(value) > LONGEST:
            raise Unknown("too long")
        if isinstance(value, int) and value.bit_length() > LONGEST:
            raise Unknown("too large")
        return value

    # Statements.

    def do_FunctionDef(self, node: ast.FunctionDef, scope: dict[str, Any]) -> None:
        plain = node.args
        if node.decorator_list or plain.vararg or plain.kwarg or plain.kwonlyargs or plain.posonlyargs:
            raise Unknown("a form of parameters")
        parameters = [a.arg for a in plain.args]
        defaults = [self.value(d, scope) for d in plain.defaults]

        def call(*arguments: Any, **named: Any) -> Any:
            scope_of_call = dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
            scope_of_call |= dict(zip(parameters, arguments, strict=False)) | named
            if len(arguments) > len(parameters) or set(scope_of_call) != set(parameters):
                raise TypeError(f"{node.name}: wrong arguments")
            try:
                self.block(node.body, {**scope, **scope_of_call, node.name: call})
            except _Return as returned:
                return returned.value
            return None

        scope[node.name] = call

    def do_Return(self, node: ast.Return, scope: dict[str, Any]) -> None:
        raise _Return(self.value(node.value, scope))

    def do_Expr(self, node: ast.Expr, scope: dict[str, Any]) -> None:
        self.value(node.value, scope)

    def do_Pass(self, node: ast.Pass, scope: dict[str, Any]) -> None:
        pass

    def do_ImportFrom(self, node: ast.ImportFrom, scope: dict[str, Any]) -> None:
        if node.module != "typing":  # names of types stand in annotations only, which are not evaluated
            raise Unknown("an import")

    def do_Break(self, node: ast.Break, scope: dict[str, Any]) -> None:
        raise _Break

    def do_Continue(self, node: ast.Continue, scope: dict[str, Any]) -> None:
        raise _Continue

    def do_Assert(self, node: ast.Assert, scope: dict[str, Any]) -> None:
        if not self.value(node.test, scope):
            raise AssertionError

    def do_Assign(self, node: ast.Assign, scope: dict[str, Any]) -> None:
        value = self.value(node.value, scope)
        for target in node.targets:
            self.bind(target, value, scope)

    def do_AugAssign(self, node: ast.AugAssign, scope: dict[str, Any]) -> None:
        load = ast.parse(ast.unparse(node.target), mode="eval").body
        operation = ast.BinOp(load, node.op, node.value)
        self.bind(node.target, self.value(operation, scope), scope)

    def do_If(self, node: ast.If, scope: dict[str, Any]) -> None:
        self.block(node.body if self.value(node.test, scope) else node.orelse, scope)

    def do_While(self, node: ast.While, scope: dict[str, Any]) -> None:
        self.loop(iter(lambda: bool(self.value(node.test, scope)), False), None, node, scope)

    def do_For(self, node: ast.For, scope: dict[str, Any]) -> None:
        self.loop(self.value(node.iter, scope), node.target, node, scope)

    def loop(self, items: Iterable[Any], target: ast.expr | None, node: Any, scope: dict[str, Any]) -> None:
        for item in items:
            self.count()
            if target is not None:
                self.bind(target, item, scope)
            try:
                self.block(node.body, scope)
            except _Break:
                return
            except _Continue:
                continue
        self.block(node.orelse, scope)

    def bind(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for part, item in zip(target.elts, list(value), strict=True):
                self.bind(part, item, scope)
        elif isinstance(target, ast.Subscript):
            self.value(target.value, scope)[self.value(target.slice, scope)] = value
        else:
            raise Unknown(type(target).__name__)

    # Expressions.

    def of_Constant(self, node: ast.Constant, scope: dict[str, Any]) -> Any:
        return node.value

    def of_Name(self, node: ast.Name, scope: dict[str, Any]) -> Any:
        if node.id in scope:
            return scope[node.id]
        if node.id in BUILTINS:
            return BUILTINS[node.id]
        raise NameError(node.id)

    def of_Tuple(self, node: ast.Tuple, scope: dict[str, Any]) -> Any:
        return tuple(self.value(x, scope) for x in node.elts)

    def of_List(self, node: ast.List, scope: dict[str, Any]) -> Any:
        return [self.value(x, scope) for x in node.elts]

    def of_Set(self, node: ast.Set, scope: dict[str, Any]) -> Any:
        return {self.value(x, scope) for x in node.elts}

    def of_Dict(self, node: ast.Dict, scope: dict[str, Any]) -> Any:
        return {
            self.value(k, scope): self.value(v, scope) for k, v in zip(node.keys, node.values, strict=True)
        }

    def of_BinOp(self, node: ast.BinOp, scope: dict[str, Any]) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        if isinstance(node.op, ast.Pow):
            if not isinstance(right, int | float) or abs(right) > 64:
                raise Unknown("a power")
            return left**right
        if type(node.op) not in BINARY:
            raise Unknown(type(node.op).__name__)
        if isinstance(node.op, ast.Mult):
            sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
            if sizes and sizes[0] * max(x for x in (left, right) if isinstance(x, int)) > LONGEST:
                raise Unknown("too long")
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            raise Unknown("formatting")
        return BINARY[type(node.op)](left, right)

    def of_UnaryOp(self, node: ast.UnaryOp, scope: dict[str, Any]) -> Any:
        return UNARY[type(node.op)](self.value(node.operand, scope))

    def of_BoolOp(self, node: ast.BoolOp, scope: dict[str, Any]) -> Any:
        stops = isinstance(node.op, ast.Or)
        for part in node.values:
            value = self.value(part, scope)
            if bool(value) is stops:
                break
        return value

    def of_Compare(self, node: ast.Compare, scope: dict[str, Any]) -> Any:
        left = self.value(node.left, scope)
        for op, part in zip(node.ops, node.comparators, strict=True):
            right = self.value(part, scope)
            if not COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def of_IfExp(self, node: ast.IfExp, scope: dict[str, Any]) -> Any:
        return self.value(node.body if self.value(node.test, scope) else node.orelse, scope)

    def of_Slice(self, node: ast.Slice, scope: dict[str, Any]) -> Any:
        return slice(*(self.value(x, scope) for x in (node.lower, node.upper, node.step)))

    def of_Subscript(self, node: ast.Subscript, scope: dict[str, Any]) -> Any:
        return self.value(node.value, scope)[self.value(node.slice, scope)]

    def of_Call(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            if node.func.attr not in METHODS.get(type(owner), set()):
                raise Unknown(f"method {node.func.attr}")
            function = getattr(owner, node.func.attr)
        else:
            function = self.value(node.func, scope)
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise Unknown("unpacking")
        arguments = [self.value(a, scope) for a in node.args]
        if any(isinstance(x, range) and len(x) > LONGEST for x in arguments):
            raise Unknown("too long")
        return function(*arguments, **{str(k.arg): self.value(k.value, scope) for k in node.keywords})

    def of_Lambda(self, node: ast.Lambda, scope: dict[str, Any]) -> Any:
        names = [a.arg for a in node.args.args]
        return lambda *arguments: self.value(node.body, {**scope, **dict(zip(names, arguments, strict=True))})

    def of_ListComp(self, node: ast.ListComp, scope: dict[str, Any]) -> Any:
        return [self.value(node.elt, s) for s in self.scopes(node.generators, scope)]

    of_GeneratorExp = of_ListComp

    def of_SetComp(self, node: ast.SetComp, scope: dict[str, Any]) -> Any:
        return {self.value(node.elt, s) for s in self.scopes(node.generators, scope)}

    def of_DictComp(self, node: ast.DictComp, scope: dict[str, Any]) -> Any:
        return {
            self.value(node.key, s): self.value(node.value, s) for s in self.scopes(node.generators, scope)
        }

    def scopes(self, generators: list[ast.comprehension], scope: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if not generators:
            yield scope
            return
        for item in self.value(generators[0].iter, scope):
            self.count()
            scope_of_call = dict(scope)
            self.bind(generators[0].target, item, scope_of_call)
            if all(self.value(test, scope_of_call) for test in generators[0].ifs):
                yield from self.scopes(generators[1:], scope_of_call)
