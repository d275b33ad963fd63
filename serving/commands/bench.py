"""Put load on an OpenAI-compatible server and measure what it does.

Requests go out at their times whatever the server does, unless --closed-loop says how many are always under
way. Latencies count from the time a request was due.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..request import RequestError
from .text_input import read_text

if TYPE_CHECKING:
    from ..bench.arrivals import Arrival
    from ..bench.client import Outcome, Target

LIKE = ("azure-conversation", "azure-code")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic bench` takes."""
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="served model name (default: the first that the server lists)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key to send (default: the variable OPENAI_API_KEY, if set)"
    )
    parser.add_argument(
        "--timeout",
        type=_above(0),
        default=600.0,
        metavar="S",
        help="seconds until a request fails (default: 600)",
    )
    parser.add_argument(
        "--body", type=_object, default={}, metavar="JSON", help="fields sent with every request"
    )
    _add_load(parser.add_argument_group("requests"))
    _add_prompts(parser.add_argument_group("prompts (default: random token ids)"))
    _add_outputs(parser.add_argument_group("comparison and output"))


def _add_load(load: argparse._ArgumentGroup) -> None:
    kinds = load.add_mutually_exclusive_group()
    kinds.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace file of Azure (CSV) or Mooncake (JSONL) to replay"
    )
    kinds.add_argument(
        "--like", choices=LIKE, help="draw requests with the published statistics of this trace"
    )
    load.add_argument(
        "--requests",
        type=_positive,
        metavar="INT",
        help="number of requests (default: 100, or all of the trace)",
    )
    load.add_argument("--rate", type=_above(0), metavar="FLOAT", help="requests per second, on average")
    load.add_argument(
        "--cv",
        type=_from(0),
        metavar="FLOAT",
        help="coefficient of variation of the gaps between requests: 0 is a fixed interval, 1 a Poisson "
        "process, more is burstier (default: 1, or that of --like)",
    )
    load.add_argument(
        "--prompt-tokens", type=_range, metavar="N", help="tokens of a prompt, or LOW-HIGH (default: 128)"
    )
    load.add_argument(
        "--output-tokens", type=_range, metavar="N", help="tokens to generate, or LOW-HIGH (default: 64)"
    )
    load.add_argument(
        "--scale-lengths",
        type=_factor,
        default=1.0,
        metavar="FLOAT",
        help="multiply all lengths by this; auto makes 99 %% fit the model (default: %(default)g)",
    )
    load.add_argument(
        "--max-model-len",
        type=_positive,
        metavar="INT",
        help="cut longer requests to this (default: as the server states)",
    )
    load.add_argument(
        "--closed-loop",
        type=_positive,
        metavar="INT",
        help="keep this many requests in flight, without set times",
    )
    load.add_argument(
        "--warm-up",
        type=_count,
        default=2,
        metavar="INT",
        help="unmeasured requests sent first (default: %(default)s)",
    )
    load.add_argument(
        "--seed",
        type=_count,
        default=0,
        metavar="INT",
        help="seed of arrivals, lengths and prompts (default: %(default)s)",
    )


def _add_prompts(prompts: argparse._ArgumentGroup) -> None:
    prompts.add_argument("--text", metavar="FILE", help="cut prompts from this text instead")
    prompts.add_argument("--as-text", action="store_true", help="send text, not token ids")
    prompts.add_argument(
        "--vocabulary",
        type=_positive,
        default=1024,
        metavar="INT",
        help="random ids are below this (default: 1024)",
    )


def _add_outputs(runs: argparse._ArgumentGroup) -> None:
    runs.add_argument("--compare", metavar="URL", help="run a second server alternately, and compare the two")
    runs.add_argument(
        "--repeat", type=_positive, default=1, metavar="INT", help="runs of each server (default: 1)"
    )
    runs.add_argument(
        "--slo",
        metavar="BOUNDS",
        help="bounds for goodput, in milliseconds: 'ttft:500 itl:50 tpot:40 e2e:5000'",
    )
    runs.add_argument("--json", action="store_true", help="print the figures as one object")
    runs.add_argument("--out", type=Path, metavar="FILE", help="store the figures and every request as JSON")
    runs.add_argument("--plot", type=Path, metavar="FILE", help="plot the figures: .png, .svg, .pdf")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit status: 1 where a request failed."""
    import asyncio

    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from ..bench import load, measures, report
    from ..bench.connection import BrokenOffError
    from ..bench.prompts import Prompts

    slo = measures.parse_slo(options.slo) if options.slo else None
    arrivals = _arrivals(options)
    console = Console(highlight=False, stderr=options.json)
    urls = [options.url] + ([options.compare] if options.compare else [])
    try:
        targets = [await _target(options, url) for url in urls]
        source = await _source(options, targets[0][0])
    except (OSError, TimeoutError, BrokenOffError) as error:
        raise RequestError(f"the server cannot be reached: {error}") from None
    lengths = [length for _, length in targets if length is not None]
    context = options.max_model_len or min(lengths, default=None)
    sized, factor = _sized(options, arrivals, context)
    for target, _ in targets:
        first = Prompts(source, options.seed, factor)
        outcome = await load.warm_up(target, sized, first, options.warm_up)
        if outcome is not None and outcome.error:
            raise RequestError(f"the first request failed: {outcome.error}: {outcome.detail}")
    runs: list[list[list[Outcome]]] = [[] for _ in targets]
    for repetition in range(options.repeat):
        # Both servers get the same prompts, each repetition others: none should be found in a prefix cache.
        prompts = Prompts(source, options.seed + repetition, factor)
        for index, (target, _) in enumerate(targets):
            with _progress(len(sized), f"{urls[index]}, run {repetition + 1}", options.json) as advance:
                if options.closed_loop:
                    going = load.closed_loop(target, sized, prompts, options.closed_loop, advance)
                else:
                    going = load.open_loop(target, sized, prompts, advance)
                runs[index].append(await going)
    for target, _ in targets:
        target.pool.close()

    figures = [[measures.summary(outcomes, slo) for outcomes in server_runs] for server_runs in runs]
    rows = measures.compared(*figures) if options.compare else None
    if not options.json:
        for url, server_runs in zip(urls, figures, strict=True):
            for index, summary in enumerate(server_runs):
                report.show(
                    summary, console, f"{url}, run {index + 1}" if len(server_runs) > 1 or rows else ""
                )
        if rows is not None:
            report.show_comparison(rows, ("first", "second"), console)
    tree = _tree(options, urls, targets, figures, rows, factor)
    if options.json:
        print(json.dumps(tree, allow_nan=False))
    if options.out is not None:
        for server, server_runs in zip(tree["servers"], runs, strict=True):
            for summary, outcomes in zip(server["runs"], server_runs, strict=True):
                start = min(outcome.due for outcome in outcomes)
                summary["outcomes"] = [outcome.as_json(start) for outcome in outcomes]
        try:
            options.out.write_text(json.dumps(tree, allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"--out {options.out}: {error}") from None
    if options.plot is not None:
        report.draw(
            [(url, server_runs[-1]) for url, server_runs in zip(urls, runs, strict=True)], options.plot
        )
    return int(any(summary["errors"] for server_runs in figures for summary in server_runs))


def _arrivals(options: argparse.Namespace) -> "list[Arrival]":
    from ..bench.arrivals import drawn, drawn_like, read_trace

    length_source = "--trace" if options.trace else "--like" if options.like else None
    if length_source and (options.prompt_tokens or options.output_tokens):
        raise RequestError(
            f"--prompt-tokens and --output-tokens must be absent with {length_source}, which has lengths; "
            "--scale-lengths changes those"
        )
    if options.trace is not None:
        if options.cv is not None:
            raise RequestError(
                "--cv must be absent with --trace, which has arrival times; --rate rescales those"
            )
        return read_trace(options.trace, options.requests, options.rate)
    count = options.requests or 100
    if options.like is not None:
        rate = options.rate or (1.0 if options.closed_loop else None)
        return drawn_like(options.like, count, rate, options.cv, options.seed)
    if options.rate is None and not options.closed_loop:
        raise RequestError(
            "one of --rate, --like, --trace and --closed-loop is required: it says when requests arrive"
        )
    prompt, output = options.prompt_tokens or (128, 128), options.output_tokens or (64, 64)
    cv = 1.0 if options.cv is None else options.cv
    return drawn(count, options.rate or 1.0, cv, prompt, output, options.seed)


def _sized(
    options: argparse.Namespace, arrivals: "list[Arrival]", context: int | None
) -> "tuple[list[Arrival], float]":
    from ..bench.arrivals import fitting_factor, scaled

    factor = options.scale_lengths
    if factor is None:
        if context is None:
            raise RequestError("--scale-lengths is auto, but the server names no limit; give --max-model-len")
        factor = fitting_factor(arrivals, context)
    return scaled(arrivals, factor, context), factor


async def _target(options: argparse.Namespace, url: str) -> "tuple[Target, int | None]":
    """The server, and the most tokens it takes in all where it says so."""
    from ..bench.client import Target
    from ..bench.connection import Pool

    key = options.api_key if options.api_key is not None else os.environ.get("OPENAI_API_KEY")
    pool = Pool(url, key)
    name, length = options.model, None
    status, tree = await _ask(pool, "GET", "/v1/models")
    listed = tree.get("data") if isinstance(tree, dict) else None
    for entry in listed or []:
        if name is None or entry.get("id") == name:
            name, length = entry["id"], entry.get("max_model_len")
            break
    if name is None:
        raise RequestError(f"{url} lists no model ({status}); give --model")
    return Target(
        pool, name, options.timeout, {"temperature": 0.0, "seed": options.seed, **options.body}
    ), length


async def _ask(pool: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of a small request; None where it is not JSON."""
    response = await pool.send(method, path, body)
    data = await response.read()
    response.close()
    try:
        return response.status, json.loads(data)
    except ValueError:
        return response.status, None


async def _source(options: argparse.Namespace, target: "Target") -> list[int] | list[str]:
    """The source of prompts: ids of a text by the server's own tokenizer, or pieces of text."""
    from ..bench.prompts import pieces_of, random_tokens

    if options.text is None:
        if options.as_text:
            raise RequestError("--as-text goes with --text, from which prompts are cut")
        return random_tokens(options.vocabulary, options.seed)
    text = read_text(options.text, "--text")
    if not text.strip():
        raise RequestError(f"--text must hold text; {options.text} is empty")
    if options.as_text:
        return pieces_of(text)
    body = {"model": target.model, "prompt": text[: 1 << 18], "add_special_tokens": False}
    status, tree = await _ask(target.pool, "POST", "/tokenize", body)
    if status != 200 or not isinstance(tree, dict) or not tree.get("tokens"):
        raise RequestError(
            f"--text needs a server with /tokenize, or --as-text; POST /tokenize answered {status}"
        )
    return tree["tokens"]


def _progress(total: int, title: str, quiet: bool):
    """A bar on standard error; its value is called with each outcome."""
    import contextlib

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()

    @contextlib.contextmanager
    def bar():
        hidden = quiet or not sys.stderr.isatty()
        # Drawn four times a second: drawing competes with measuring.
        with Progress(
            *columns, console=Console(stderr=True), transient=True, disable=hidden, refresh_per_second=4
        ) as progress:
            task = progress.add_task(title, total=total)
            yield lambda outcome: progress.advance(task)

    return bar()


def _tree(options, urls, targets, figures, rows, factor) -> dict[str, Any]:
    hidden, data = ("command", "flags", "api_key"), str | int | float | list | tuple | Path | None
    shown = {k: v for k, v in vars(options).items() if k not in hidden and isinstance(v, data)}
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in shown.items()}
    servers = [
        {"url": url, "model": target.model, "runs": server_runs}
        for url, (target, _), server_runs in zip(urls, targets, figures, strict=True)
    ]
    tree = {"options": shown, "length_factor": factor, "servers": servers}
    return tree if rows is None else {**tree, "comparison": rows}


def _number(text: str, low: float, above: bool) -> float:
    try:
        value = float(text)
        if (value > low if above else value >= low) and value < float("inf"):
            return value
    except ValueError:
        pass
    bound = f"above {low:g}" if above else f"of at least {low:g}"
    raise argparse.ArgumentTypeError(f"must be a number {bound}; got {text}")


def _above(low: float):
    return lambda text: _number(text, low, True)


def _from(low: float):
    return lambda text: _number(text, low, False)


def _count(text: str, low: int = 0) -> int:
    if text.isdecimal() and int(text) >= low:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least {low}; got {text}")


def _positive(text: str) -> int:
    return _count(text, 1)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = _positive(low), _positive(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW-HIGH; got {text}")
    return bounds


def _factor(text: str) -> float | None:
    return None if text == "auto" else _number(text, 0, True)


def _object(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object; got {text} ({error})") from None
    if isinstance(tree, dict):
        return tree
    raise argparse.ArgumentTypeError(f"must be a JSON object; got {text}")
