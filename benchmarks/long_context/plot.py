"""Plot of the long-context benchmark: seconds of the prompt and of the tokens after it, by method."""

import statistics
from pathlib import Path
from typing import Any

from entropic_jax.analysis.statistics import split

from ..harness.plots import svg_figure
from ..harness.preset_names import with_current_names

FILE = "long-context.svg"


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw the seconds of each method as bars, one panel a context."""
    rows = [cell for cell in results["cells"].values() if cell.get("study") == "speed"]
    rows = with_current_names(rows, "method")
    contexts = list(split(rows, "context"))
    with svg_figure(file, len(contexts), 9, 2.8) as panels:
        for panel, ((context,), group) in zip(panels, contexts, strict=True):
            methods = [(name, runs) for (name,), runs in split(group, "method")][::-1]
            names = [name for name, _ in methods]
            prompt = [statistics.median(r["prompt_seconds"] for r in runs) for _, runs in methods]
            tokens = [statistics.median(r["token_seconds"] for r in runs) for _, runs in methods]
            panel.barh(names, prompt, color="#4060a0", label="prompt")
            panel.barh(names, tokens, left=prompt, color="#e0a040", label="128 tokens after it")
            panel.set(xlabel="seconds", title=f"{context} tokens")
        panels[len(panels) // 2].legend(frameon=False, fontsize="small", loc="lower right")
