"""Publisher of results: writes every table and plot of docs/results from the stored raw measurements.

    python -m benchmarks.publish

Nothing is measured. To be run after a table's code has changed, so that the table says that it is older.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ..harness.paths import PAGES
from ..harness.publishing import PAGE_OF, write_section
from .sections import draw_plots, sections


def main() -> None:
    """Write the pages."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    for name, text in sections().items():
        write_section(PAGES / PAGE_OF[name], name, text)
    draw_plots(PAGES)


if __name__ == "__main__":
    main()
