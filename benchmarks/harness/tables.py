"""Tables of results, in a terminal and in Markdown: text columns left-aligned, numbers right-aligned."""

import re
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows
PLACEHOLDERS = ("", "–", "—", "failed", "not measured")
NUMBER = re.compile(r"[<>≤≥~]?\s*[+−-]?\d(?:[^A-Za-z]|(?<=\d)e(?=[+-]?\d))*$")


def is_numeric(cells: list[str]) -> bool:
    """Whether a column holds numbers, with their ranges, ratios and placeholders, rather than text.

    >>> is_numeric(["97.3 (85.6–99.1) 2.07×", "failed"]), is_numeric(["512 tokens"]), is_numeric(["< 1e-4"])
    (True, False, True)
    """
    values = [cell.removesuffix(" then failed") for cell in cells if cell.strip() not in PLACEHOLDERS]
    return bool(values) and all(NUMBER.match(value.strip()) for value in values)


def print_tables(tables: list[Table], notes: list[str], console: Console) -> None:
    """Print tables that have rows, and the notes under them."""
    for title, header, rows in tables:
        if rows:
            table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold")
            for name, cells in zip(header, zip(*rows, strict=True), strict=True):
                justify = "right" if is_numeric(list(cells)) else "left"
                table.add_column(name, justify=justify, overflow="fold")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for line in notes:
        console.print(line, highlight=False, markup=False)


def markdown(tables: list[Table], notes: list[str], stamps: str | Mapping[str, str]) -> str:
    """Tables that have rows, and notes, as Markdown.

    Args:
        tables: title, header and rows of each.
        notes: sentences that apply to all tables; they become a list at the end.
        stamps: the line under the title of a table that says when and at which commit it was measured: one
            for all, or one for each title.

    Returns:
        The text, without a heading of its own.
    """
    parts = []
    for title, header, rows in tables:
        if rows:
            columns = zip(*rows, strict=True)
            rule = ["---:" if is_numeric(list(cells)) else ":---" for cells in columns]
            lines = [header, rule, *rows]
            cells = ((cell.replace("|", "\\|") for cell in line) for line in lines)
            stamp = stamps if isinstance(stamps, str) else stamps[title]
            body = "\n".join("| " + " | ".join(line) + " |" for line in cells)
            parts.append(f"**{title}**\n\n*{stamp}*\n\n{body}")
    parts.append("\n".join(f"- {line}" for line in notes))
    return "\n\n".join(part for part in parts if part)
