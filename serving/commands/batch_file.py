"""Many requests from a file of JSON lines, and their completions as JSON lines."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from entropic_jax.parameter_tables.table import ParameterError, check_unicode, short

from ..offline.generation import Generator
from ..options.sampling_options import OPTIONS
from ..request import Request, RequestError

FIELDS = ("prompt", *(line.name for line in OPTIONS))
KEYS = (*FIELDS, "messages", "id")


class Record(NamedTuple):
    """One line of the file: an object with `prompt` or `messages` and any other of `KEYS`."""

    line: int
    values: dict[str, Any]


def read_records(text: str) -> list[Record]:
    """Every line that is not blank. Raises RequestError, which names the first invalid line."""
    return [Record(n, _parse(line, n)) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def _parse(line: str, number: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).most_common(1):
            if count > 1:
                raise RequestError(f"line {number} must state {short(key)} once; got it {count} times")
        return dict(pairs)

    try:
        values = json.loads(line, object_pairs_hook=unique)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"line {number} must be a JSON object; got {line.strip()[:60]} ({error})"
        ) from None
    if not isinstance(values, dict) or ("prompt" in values) == ("messages" in values):
        raise RequestError(
            f"line {number} must be an object with either `prompt` or `messages`; got {line.strip()[:60]}"
        )
    unknown = [key for key in values if key not in KEYS]
    if unknown:
        raise RequestError(f"line {number} must only have the keys {', '.join(KEYS)}; got {unknown[0]!r}")
    try:
        json.dumps(values.get("id"), allow_nan=False)
    except (ValueError, RecursionError):
        raise RequestError(f"line {number}: id must be finite JSON; got {short(values['id'])}") from None
    return values


def requests_of(
    records: Sequence[Record], generator: Generator, overrides: Mapping[str, Any], chat: bool
) -> Iterator[Request]:
    """The request of every record: what the line says, else `overrides`, else the model's defaults.

    Line i (from 0) draws with the given seed plus i, so that equal lines have different continuations.

    Args:
        records: number and values of each line.
        generator: model and its defaults.
        overrides: from the command line; a line's own values go before.
        chat: whether a line's prompt is the message of a user in the model's chat template.
    """
    for index, (line, values) in enumerate(records):
        fields = {**generator.defaults, **overrides, "seed": (overrides["seed"] + index) % 2**31}
        fields |= {name: value for name, value in values.items() if name in FIELDS and value is not None}
        try:
            if "messages" in values or chat:
                messages = values.get("messages", [{"role": "user", "content": values.get("prompt")}])
                fields["prompt"] = generator.chat(_checked(messages))
            yield Request(**fields)
        except ParameterError as error:
            raise RequestError(f"line {line}: {error}") from None


def _checked(messages: Any) -> list[dict[str, str]]:
    if (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(message, dict)
            and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in messages
        )
    ):
        for index, message in enumerate(messages):
            check_unicode(f"messages[{index}].content", message["content"])
        return messages
    raise RequestError(
        f"messages must be a list of one or more objects with `role` and `content`; got {short(messages)}"
    )


def run_batch(records: Sequence[Record], requests: Sequence[Request], generator: Generator) -> int:
    """Print one line per request, in order, with a progress bar on a terminal; returns how many failed.

    Args:
        records: number and values of each line.
        requests: the requests of the records.
        generator: continues the prompts.
    """
    failed = tokens = 0
    console = Console(stderr=True)
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=False,
    ) as progress:
        bar = progress.add_task("", total=len(requests), rate="")
        for index, completion in enumerate(generator.batch(requests)):
            name = {"id": records[index].values["id"]} if "id" in records[index].values else {}
            line = {"index": index, **name, **completion.as_json(), "seed": requests[index].seed}
            sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
            sys.stdout.flush()
            failed += completion.finish_reason == "error"
            tokens += completion.usage.completion_tokens
            elapsed = progress.tasks[bar].elapsed or 0.0
            progress.update(bar, advance=1, rate=f"{tokens / elapsed:.0f} tokens/s" if elapsed else "")
    return failed
