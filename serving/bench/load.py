"""Open-loop and closed-loop load: requests at given times, or a fixed number in flight."""

import asyncio
import time
from collections.abc import Callable

from .arrivals import Arrival
from .client import Outcome, Target
from .prompts import Prompts

Progress = Callable[[Outcome], object]


async def open_loop(
    target: Target, arrivals: list[Arrival], prompts: Prompts, progress: Progress = lambda outcome: None
) -> list[Outcome]:
    """Send every request at its time, however many are unanswered. Returns outcomes in order of arrival.

    Latencies count from the time at which a request was due, so that a client or a listen queue that falls
    behind does not flatter the server.

    Args:
        target: server and model.
        arrivals: times and lengths.
        prompts: makes the prompt of each arrival.
        progress: called with every outcome.
    """
    # Made before the measurement starts.
    bodies = [prompts(index, arrival) for index, arrival in enumerate(arrivals)]
    start = time.perf_counter() + 0.05

    async def send(index: int, due: float) -> Outcome:
        arrival = arrivals[index]
        outcome = await target.complete(bodies[index], arrival.prompt_tokens, arrival.output_tokens, due)
        progress(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, arrival in enumerate(arrivals):
            due = start + arrival.time
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send(index, due)))
    return [task.result() for task in tasks]


async def closed_loop(
    target: Target,
    arrivals: list[Arrival],
    prompts: Prompts,
    concurrency: int,
    progress: Progress = lambda outcome: None,
) -> list[Outcome]:
    """Keep `concurrency` requests in flight until all have been sent. Arrival times are ignored.

    Args:
        target: server and model.
        arrivals: lengths; the times are ignored.
        prompts: makes the prompt of each arrival.
        concurrency: requests in flight.
        progress: called with every outcome.
    """
    bodies = [prompts(index, arrival) for index, arrival in enumerate(arrivals)]
    outcomes: dict[int, Outcome] = {}
    queue = iter(range(len(arrivals)))

    async def worker() -> None:
        for index in queue:  # shared by the workers: each takes the next
            arrival = arrivals[index]
            outcome = await target.complete(bodies[index], arrival.prompt_tokens, arrival.output_tokens)
            outcomes[index] = outcome
            progress(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(arrivals))):
            group.create_task(worker())
    return [outcomes[index] for index in range(len(arrivals))]


async def warm_up(target: Target, arrivals: list[Arrival], prompts: Prompts, count: int) -> Outcome | None:
    """Send `count` requests one after another, each with its own prompt. Returns the last outcome.

    Args:
        target: server and model.
        arrivals: lengths, from the first on.
        prompts: makes prompts of other numbers than the arrivals'.
        count: how many requests.
    """
    outcome = None
    for index in range(count):
        arrival = arrivals[index % len(arrivals)]._replace(blocks=())
        prompt = prompts(len(arrivals) + index, arrival)
        outcome = await target.complete(prompt, arrival.prompt_tokens, arrival.output_tokens)
        if outcome.error:
            break
    return outcome
