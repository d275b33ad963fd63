"""Writes the tables of parameters into docs/parameters.md: `python docs/parameter_tables.py`."""

import re
from pathlib import Path

from entropic_jax.parameter_tables.control_gains import ControlGains
from entropic_jax.parameter_tables.sampling_params import SamplingParams
from entropic_jax.parameter_tables.table import markdown

PAGE = Path(__file__).with_name("parameters.md")


def with_tables(page: str) -> str:
    """The page with its tables as they are declared."""
    for table in (SamplingParams, ControlGains):
        begin = rf"(<!-- table: {table.__name__}, .*-->\n\n)(?:\|.*\n)*"
        page = re.sub(begin, lambda match, table=table: f"{match[1]}{markdown(table)}\n", page)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
