"""Workload of the serving benchmark: the model in float32, prompts as text, and how requests are sent."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.client import Outcome, Target
from entropic_jax.serving.bench.connection import Pool
from entropic_jax.serving.bench.load import closed_loop, open_loop, warm_up
from entropic_jax.serving.bench.prompts import Prompts


class TextPrompts(Prompts):
    """The same prompts as text, for servers that take no token ids."""

    def __init__(self, prompts: Prompts, model: Path) -> None:
        from tokenizers import Tokenizer

        self.prompts, self.tokenizer = prompts, Tokenizer.from_file(str(model / "tokenizer.json"))

    def __call__(self, index: int, arrival: Arrival) -> str:
        """The text of a prompt."""
        prompt = self.prompts(index, arrival)
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)


def drive(
    url: str, requests: list[Arrival], prompts: Prompts, concurrency: int | None = None, **body: Any
) -> list[Outcome]:
    """Send requests to a server and wait for their ends.

    Args:
        url: the URL of the server.
        requests: with the lengths of prompt and text, and arrival times.
        prompts: makes the prompt of each.
        concurrency: requests at a time; without it, they are sent at their arrival times.
        body: more fields of every request.

    Returns:
        The outcome of each request.

    Raises:
        RuntimeError: a request failed.
    """

    async def send() -> list[Outcome]:
        pool = Pool(url)
        target = Target(pool, "", 1800.0, {"temperature": 0.0, "model": None, **body})
        try:
            await warm_up(target, requests, prompts, 2)
            if concurrency is None:
                return await open_loop(target, requests, prompts)
            return await closed_loop(target, requests, prompts, concurrency)
        finally:
            pool.close()

    outcomes = asyncio.run(send())
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].error}: {failed[0].detail}")
    return outcomes


def sustained(outcomes: list[Outcome], concurrency: int) -> float:
    """Requests per second of a closed loop as long as it was full: until the last one was sent."""
    sent = [outcome.sent for outcome in outcomes]
    return (len(outcomes) - concurrency) / (max(sent) - min(sent))


def engine_state(url: str) -> dict[str, Any]:
    """The state of the engine, as a server of ours reports it."""
    with urllib.request.urlopen(f"{url}/entropic/state", timeout=10) as response:
        return json.load(response)
