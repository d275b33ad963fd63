"""JSON by schema and tool calls, with drafts and without, through the serving engine.

Requests take the way of the server's, but for HTTP: chat template, grammar, engine. Two engines take turns.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropic_jax.parameter_tables.speculation_names import AUTO, OFF
from entropic_jax.serving.engine.interface import Engine, EngineRequest
from entropic_jax.serving.engine.start import start
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.protocol.chat import ChatBody
from entropic_jax.serving.http.routes.conversation import prompt_of
from entropic_jax.serving.http.routes.preparation import engine_requests_of, requests_of
from entropic_jax.serving.http.served_model import describe
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.llm.options import read_options
from entropic_jax.serving.options.compilation_cache import remember_compilations

from .schemas import KINDS, StructuredTask, structured_tasks

CONTEXT = 2048  # positions of a row
WARMING_ROUNDS = 2  # which fill the prefix caches and compile what is compiled when it is needed
SEEDS = 1000  # of a round


def measure(options: argparse.Namespace, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """The cells of every number of requests at a time.

    Args:
        options: the options of the command.
        advance: called after each kind of requests.
    """
    results = []
    for rows in options.rows:
        with front_ends(options.model, rows, options.dtype) as arms:
            for kind in KINDS:
                results += _cells(options, arms, kind, rows)
                advance()
    return results


@contextmanager
def front_ends(model: Path, rows: int, dtype: str) -> Iterator[dict[str, Frontend]]:
    """A front end without drafts and one with, by the value of `speculate`, each with an engine.

    Args:
        model: the directory of the model.
        rows: number of rows of the engines.
        dtype: the dtype of the model and its KV cache.
    """
    remember_compilations()
    engines: list[Engine] = []
    arms: dict[str, Frontend] = {}
    try:
        for name in (OFF, AUTO):
            stated = {"speculate": name, "dtype": dtype, "max_num_seqs": rows, "max_model_len": CONTEXT}
            control, engine_options = read_options(None, {**stated, "warmup": "min"})
            engine = start(model, engine_options, control=control)
            engines.append(engine)
            while not engine.ready():  # otherwise it compiles while the others are timed
                time.sleep(0.1)
            served = describe(engine.model, str(model), (model.name,), CONTEXT, defaults={})
            settings = Settings(control=control, request_timeout=None, log_requests=False)
            arms[name] = Frontend(engine, served, settings)
        yield arms
    finally:
        for frontend in arms.values():
            frontend.pools.close()
        for engine in engines:
            engine.close()


def engine_request(frontend: Frontend, task: StructuredTask, seed: int, max_tokens: int) -> EngineRequest:
    """The engine request of a task, with its grammar, as the server makes it.

    Args:
        frontend: whose model writes the prompt.
        task: the task.
        seed: the seed of the request.
        max_tokens: tokens of the answer, at most.
    """
    body = ChatBody.model_validate(task.request(seed, max_tokens))
    prompt = frontend.model.encode(prompt_of(frontend, body), special=False, rendered=True)
    requests = requests_of(frontend, body, prompt, 1, max_tokens)
    (request,) = engine_requests_of(frontend, body, requests, f"{task.name}-{seed}", None)
    return request


def _cells(
    options: argparse.Namespace, arms: dict[str, Frontend], kind: str, rows: int
) -> list[dict[str, Any]]:
    """One at a time, a cell for each task; several at once, a cell for all tasks of the kind together.

    Args:
        options: the options of the command.
        arms: as `front_ends` makes them.
        kind: one of `schemas.KINDS`.
        rows: requests at a time.
    """
    tasks = [task for task in structured_tasks() if task.kind == kind]
    groups = {task.name: [task] for task in tasks} if rows == 1 else {"mixed": tasks}
    return [
        {"kind": kind, "task": name, "rows": rows, **_cell(options, arms, group, rows)}
        for name, group in groups.items()
    ]


def _cell(
    options: argparse.Namespace, arms: dict[str, Frontend], tasks: list[StructuredTask], rows: int
) -> dict[str, Any]:
    """Tokens and seconds of each arm in rounds that take turns, and what its passes drafted.

    Args:
        options: the options of the command.
        arms: as `front_ends` makes them.
        tasks: whose requests are in flight together.
        rows: requests at a time.
    """
    number = options.requests * len(tasks)
    rounds: dict[str, list[tuple[int, float]]] = {name: [] for name in arms}
    counts = {name: dict.fromkeys(("tokens", "passes", "drafted", "accepted"), 0) for name in arms}
    equal = ended = 0
    for round_number in range(-WARMING_ROUNDS, options.rounds):
        first = SEEDS * (round_number + WARMING_ROUNDS)
        texts: dict[str, list[list[int]]] = {}
        for name in list(arms) if round_number % 2 else list(arms)[::-1]:
            requests = [
                engine_request(arms[name], tasks[i % len(tasks)], first + i, options.tokens)
                for i in range(number)
            ]
            texts[name], seconds, reasons, counted = run(arms[name].engine, requests, rows)
            if round_number >= 0:
                rounds[name].append((counted["tokens"], seconds))
                counts[name] = {key: counts[name][key] + value for key, value in counted.items()}
                ended += reasons.count("stop") if name == OFF else 0
        if round_number >= 0:
            equal += sum(text == other for text, other in zip(texts[OFF], texts[AUTO], strict=True))
    total = number * options.rounds
    return {"rounds": rounds, "counts": counts, "texts": total, "equal": equal, "ended": ended}


def run(
    engine: Engine, requests: list[EngineRequest], rows: int
) -> tuple[list[list[int]], float, list[str | None], dict[str, int]]:
    """The texts of requests, the seconds until the last has ended, why each ended, and what was counted.

    Args:
        engine: the engine that runs them.
        requests: in their order.
        rows: requests at a time: 1 submits each when the one before it has ended, more submit all at once.
    """
    began = time.perf_counter()
    if rows == 1:
        outputs = [list(engine.submit(request)) for request in requests]
    else:
        outputs = [list(stream) for stream in [engine.submit(request) for request in requests]]
    seconds = time.perf_counter() - began
    texts = [[token.id for delta in deltas for token in delta.tokens] for deltas in outputs]
    last = [deltas[-1] for deltas in outputs]
    counted = {"tokens": sum(map(len, texts))}
    for name, field in (("passes", "passes"), ("drafted", "num_drafted"), ("accepted", "num_accepted")):
        counted[name] = int(sum(delta.summary.get(field, 0) for delta in last))
    return texts, seconds, [delta.finish_reason for delta in last], counted
