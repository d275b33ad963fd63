"""JSON files that options are checked against, read without the modules that load models."""

import json
from pathlib import Path
from typing import Any


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file, or it is a pipe, or holds anything else."""
    try:
        content = json.loads(file.read_text("utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError):  # whoever loads the model says what is wrong
        return {}
    return content if isinstance(content, dict) else {}
