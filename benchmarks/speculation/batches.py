"""Batches with drafts and without, through the serving engine: tokens a second of a queue of requests.

Each engine holds the prompts in its prefix cache before the clock starts. Lengths differ, as they do in
service, so that sequences end one after the other and new ones take their rows.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from entropic_jax import LLM, SamplingParams
from entropic_jax.parameter_tables.speculation_names import AUTO, OFF

from .workload import loops, prompts

QUEUE, FEWEST = 1.5, 4  # requests for each row, and in all
LENGTHS = 64, 193  # tokens of a text, drawn uniformly from this range
SHORTEST_FRACTION = 4  # of the texts in `--quick`
WARMING_ROUNDS = 2  # which fill the prefix caches and compile what is compiled when it is needed, at least
WARMING_SECONDS = 5.0  # of them together, in which an engine learns what its launches cost
SPARE = 64  # positions of the context beyond prompt and text
PAGE_SIZE = 64  # of the pool, which holds all prompts


def measure(options: argparse.Namespace, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """The rates of every cell: text, rows, context and temperature.

    Args:
        options: the options of the command.
        advance: called after each cell.
    """
    shortest = min(options.batch_contexts)
    cells = [("held-out", rows, c, 1.0) for rows in options.rows for c in options.batch_contexts]
    cells += [
        ("random", rows, shortest, 1.5) for rows in dict.fromkeys((min(options.rows), max(options.rows)))
    ]
    results = []
    for cell in cells:
        results.append(_cell(options, *cell))
        advance()
    return results


def _cell(
    options: argparse.Namespace, text: str, rows: int, context: int, temperature: float
) -> dict[str, Any]:
    """Tokens a second of each engine in rounds that take turns.

    Args:
        options: the options of the command.
        text: one of `workload.TEXTS`.
        rows: number of rows of the engine.
        context: tokens of a prompt.
        temperature: the temperature of the sampling.
    """
    number = max(FEWEST, int(rows * QUEUE))
    tokens = prompts(text, Path(options.model) / "tokenizer.json", context, number)
    lengths = np.random.default_rng(rows).integers(*LENGTHS, number)
    if options.quick:
        lengths = lengths // SHORTEST_FRACTION
    longest = context + int(lengths.max()) + SPARE
    arms = {}
    for name in (OFF, AUTO):
        arms[name] = LLM(
            options.model,
            speculate=name,
            dtype=options.dtype,
            max_num_seqs=rows,
            max_model_len=longest,
            block_size=PAGE_SIZE,
            num_pages=(number + rows) * (longest // PAGE_SIZE + 1),
            warmup="min",
        )
        while not arms[name].ready():  # otherwise it compiles while the others are timed
            time.sleep(0.1)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    equal = counted = looping = warming = 0
    began = time.perf_counter()
    try:
        while len(rates[OFF]) < warming + options.rounds:
            texts, round_number = {}, len(rates[OFF])
            for name in list(arms) if round_number % 2 else list(arms)[::-1]:
                texts[name], seconds = _run(arms[name], tokens, lengths, temperature, round_number)
                rates[name].append(sum(map(len, texts[name])) / seconds)
            equal += sum(map(np.array_equal, texts[OFF], texts[AUTO]))
            counted += number
            looping += sum(map(loops, texts[OFF]))
            learns = time.perf_counter() - began < 2 * WARMING_SECONDS and not options.quick
            if round_number < WARMING_ROUNDS or (learns and warming == round_number):
                warming += 1
    finally:
        for llm in arms.values():
            llm.shutdown()
    rates = {name: values[warming:] for name, values in rates.items()}
    cell = {"text": text, "rows": rows, "context": context, "temperature": temperature}
    counts = {"equal": equal, "texts": counted, "loops": looping}
    return cell | {"requests": number, "rates": rates} | counts


def _run(
    llm: LLM, tokens: list[list[int]], lengths: np.ndarray, temperature: float, round_number: int
) -> tuple[list[list[int]], float]:
    """The texts of all requests, and the seconds until the last has ended.

    Args:
        llm: the engine.
        tokens: the tokens of the prompts.
        lengths: the lengths of the texts.
        temperature: the temperature of the sampling.
        round_number: from which the seeds are made.
    """
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in tokens]
    params = [
        SamplingParams(temperature=temperature, max_tokens=int(n), seed=1000 * round_number + i)
        for i, n in enumerate(lengths)
    ]
    began = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return [output.outputs[0].token_ids for output in outputs], seconds
