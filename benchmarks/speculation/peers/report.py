"""Tables of speculation beside other engines: rates, and greedy tokens beside ours."""

import statistics
from typing import Any

from ...harness.baselines.weights import library_of
from ...harness.provenance import stamp
from ...harness.tables import Table
from .measure import ENGINES, PLAIN

MEASURED_CODE = (
    "entropic_jax/speculation",
    "entropic_jax/loop.py",
    "entropic_jax/phases",
    "entropic_jax/pallas",
    "models/layers.py",
    "models/embedded",
)
AUTO = "ours-auto"

Rates = dict[tuple[int, int], float]  # tokens a second, by text and repetition


def tables(results: dict[str, Any]) -> list[Table]:
    """The rate of every engine, beside its plain decoding and beside `auto`; and the tokens beside ours."""
    kept = kept_texts(results)
    rates = {name: _rates(results, name, kept) for name in ENGINES}
    rows, agreement = [], []
    for name, drafts in ENGINES.items():
        if not rates[name]:
            continue
        entries = [entry for entry in results["rates"] if entry["engine"] == name and entry["text"] in kept]
        tokens, passes = (sum(entry[key] for entry in entries) for key in ("tokens", "passes"))
        plain = rates.get(PLAIN[library_of(name)], {})
        rows.append(
            [
                name,
                drafts,
                spread(rates[name], "{:.0f}"),
                ratio(rates[name], plain) if name not in PLAIN.values() else "1",
                ratio(rates[AUTO], rates[name]) if name != AUTO else "1",
                f"{tokens / passes:.2f}",
            ]
        )
        agreement.append(_agreement(results, name))
    header = ["engine", "drafts", "tokens/s, median (range)", "÷ its plain decoding"]
    header += ["`ours-auto` ÷ it", "tokens a pass"]
    title = f"Copies after {results['context']} tokens, greedy, one sequence, by engine"
    compared = ["engine", "texts equal to `ours-off`", "first difference, token", "repetitions equal"]
    return [(title, header, rows), ("Greedy tokens by engine", compared, agreement)]


def kept_texts(results: dict[str, Any]) -> list[int]:
    """The numbers of the texts that do not loop; of all if every one does."""
    numbers = range(len(results["texts"]))
    return [number for number in numbers if not results["texts"][number]["loops"]] or list(numbers)


def _rates(results: dict[str, Any], name: str, kept: list[int]) -> Rates:
    """The rates of an engine over texts.

    Args:
        results: the results of a run.
        name: the name of the engine.
        kept: the numbers of the texts.
    """
    return {
        (entry["text"], entry["repetition"]): entry["tokens"] / entry["seconds"]
        for entry in results["rates"]
        if entry["engine"] == name and entry["text"] in kept
    }


def by_text(values: Rates) -> list[float]:
    """The median of the repetitions of each text."""
    texts = dict.fromkeys(text for text, _ in values)
    return [statistics.median(v for (text, _), v in values.items() if text == number) for number in texts]


def spread(values: Rates, form: str) -> str:
    """Median and range over texts."""
    medians = by_text(values)
    return "{} ({}–{})".format(
        *(form.format(x) for x in (statistics.median(medians), min(medians), max(medians)))
    )


def ratio(rates: Rates, others: Rates) -> str:
    """Median and range of the ratios of paired measurements; a dash if there are none."""
    pairs = {key: rate / others[key] for key, rate in rates.items() if key in others}
    return spread(pairs, "{:.2f}") if pairs else "–"


def _agreement(results: dict[str, Any], name: str) -> list[str]:
    """The row of an engine in the table of tokens."""
    differences = [
        text["first_difference"][name] for text in results["texts"] if name in text["first_difference"]
    ]
    unequal = [first for first in differences if first is not None]
    same = [entry["same"] for entry in results["rates"] if entry["engine"] == name]
    return [
        name,
        f"{len(differences) - len(unequal)} of {len(differences)}",
        str(min(unequal)) if unequal else "–",
        f"{sum(same)} of {len(same)}",
    ]


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, what was compared, what engines chose, and failures."""
    texts, chosen = results["texts"], {k: v for k, v in results["settings"].items() if v}
    copied = statistics.median(text["copied"] for text in texts)
    looping = sum(text["loops"] for text in texts)
    layers = ", ".join(map(str, results["draft_layers"]))
    machine = (
        f"{results['cpu']}, {results['threads']} threads for every engine; model {results['model']}. "
        "Weights, products, keys and values are float32 in every engine; only the draft head of `ours-auto`, "
        "which proposes and does not verify, has int8 matrices."
    )
    prompt = (
        f"{len(texts)} prompts: code that the model has not seen, and its first third once more, so that the "
        f"text goes on with the second. The median text copies the first {copied:g} of its "
        f"{results['tokens']} tokens. {looping} texts loop; they are left out of the rates, unless all do."
    )
    time = (
        "A rate counts the tokens after the first event of a text, and the time since; prompts are not "
        "timed. A ratio is that of one text in one repetition; medians and ranges are over texts."
    )
    draft = (
        f"The draft model is layers {layers} of the model (from 0) with its embedding and last norm, not "
        "trained further. How many of its drafts are right is seen from its tokens a pass; a trained draft "
        "model would have more."
    )
    lookup = (
        "llama.cpp's lookup is `LlamaPromptLookupDecoding` of llama-cpp-python, driven through "
        "`llama_decode` like its plain decoding, which costs less than `Llama.generate`."
    )
    lines = [machine, prompt, time, draft, lookup]
    if chosen:
        settings = "; ".join(f"{name}: {text}" for name, text in chosen.items())
        lines.append(f"Fastest settings on other prompts, of those tried: {settings}.")
    lines.append("; ".join(dict.fromkeys(results["versions"].values())) + ".")
    return lines + [f"{name} failed: {reason}" for name, reason in results["failures"].items()]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit of the tables."""
    return stamp([results], MEASURED_CODE)
