"""Griffe extension for the API reference: fences doctests and turns trailing comments into descriptions."""

import io
import re
import tokenize
from typing import Any

from griffe import Attribute, Class, Docstring, ExprName, Extension, Object

DOCTEST = re.compile(r"(?:^|(?<=\n))>>> .*(?:\n(?!\s*\n).+)*")


class DocstringBlocks(Extension):
    """Rewrites docstrings as they are collected; the sources stay as they are."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Fence the doctests of an object's docstring."""
        if obj.docstring and "```" not in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_class_instance(self, *, cls: Class, **_: Any) -> None:
        """Treat `state.pytree` as the `dataclasses.dataclass` that it is, so that fields are arguments."""
        for decorator in cls.decorators:
            if decorator.callable_path.endswith("state.pytree.pytree"):
                decorator.value = ExprName("dataclasses.dataclass")

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Take the comment on an attribute's lines for its docstring where it has none."""
        if attr.docstring is None and attr.lineno and (text := comment(attr.source)):
            attr.docstring = Docstring(text, lineno=attr.lineno, parent=attr)


def comment(source: str) -> str:
    """The comments in a few lines of Python, joined."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    try:
        words = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    except (tokenize.TokenError, IndentationError):
        return ""
    text = " ".join(words)
    return "" if text.startswith(("noqa", "type:")) else text
