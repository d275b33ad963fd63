"""Names of presets in raw measurements that were recorded before `meso` and `full` became lossless.

Until then the two left pages of the KV cache unread, as `meso-lossy` and `full-lossy` do. Raw files keep the
names that they were recorded with; tables and plots show those of today. Benchmarks whose results are renamed
here run no lossless `meso` or `full`: they measure control laws and pages, not drafts.
"""

import re
from typing import Any

FORMER = re.compile(r"(?<![\w-])(meso|full)(?!-lossy)(?!\w)")
NOTE = (
    "`meso-lossy` and `full-lossy`: older raw files call them `meso` and `full`, their former names: "
    "these two became lossless since. In runs older than their fixed ε of 0.02, ε followed H₁ of the step "
    "before, from 0.03 at low to 0.012 at high entropy."
)


def current_name(name: str) -> str:
    """The name of an arm today.

    >>> current_name("meso, every 2"), current_name("full-half"), current_name("entropyinfer + meso")
    ('meso-lossy, every 2', 'full-lossy-half', 'entropyinfer + meso-lossy')
    >>> current_name("meso-lossy"), current_name("macro")
    ('meso-lossy', 'macro')
    """
    return FORMER.sub(r"\1-lossy", name)


def with_current_names(rows: list[dict[str, Any]], *fields: str) -> list[dict[str, Any]]:
    """The rows with today's names of presets in some of their fields."""
    return [
        {**row, **{field: current_name(row[field]) for field in fields if isinstance(row.get(field), str)}}
        for row in rows
    ]
