"""Held-out text: the source of `rich`, which is installed with this project and not trained on."""

import importlib.util
from pathlib import Path


def module_files(pattern: str = "*.py") -> list[Path]:
    """The modules of `rich` whose names match a pattern, in order of their names."""
    spec = importlib.util.find_spec("rich")
    assert spec is not None and spec.submodule_search_locations
    return sorted(Path(spec.submodule_search_locations[0]).glob(pattern))


def module_texts(pattern: str = "*.py", longer_than: int = 0) -> list[str]:
    """The text of those modules that have more than `longer_than` characters."""
    return [text for file in module_files(pattern) if len(text := file.read_text("utf-8")) > longer_than]


def module_tokens(tokenizer_file: Path) -> list[int]:
    """All modules as token ids of a tokenizer, one after another."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in module_texts(longer_than=-1)]
    return [token for tokens in encoded for token in tokens]
