"""A streamed request to an OpenAI-compatible server, and the arrival times of its tokens."""

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from .connection import BrokenOffError, Pool


@dataclass
class Outcome:
    """The result of a request. Times are seconds of `time.perf_counter`.

    `chunks` has the time and the number of tokens of each piece of text. The number comes from the server's
    running usage if it sends one; otherwise each piece counts as one token.
    """

    due: float  # when it was to be sent; time spent waiting in the client counts
    sent: float
    prompt_tokens: int
    requested_tokens: int  # max_tokens of the request
    ended: float = 0.0
    output_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None  # its kind; None if the request succeeded
    detail: str = ""  # the server's error message
    text: str = field(default="", repr=False)

    def as_json(self, start: float) -> dict[str, Any]:
        """A JSON object without the text; times are relative to `start`."""
        tree = asdict(self)
        del tree["text"]
        for name in ("due", "sent", "ended"):
            tree[name] = round(tree[name] - start, 6)
        tree["chunks"] = [[round(when - start, 6), tokens] for when, tokens in self.chunks]
        return tree


@dataclass(frozen=True)
class Target:
    """A server, and the fields that all requests to it share."""

    pool: Pool
    model: str
    timeout: float  # seconds, of one request
    body: dict[str, Any]  # further fields: sampling parameters, extensions

    async def complete(
        self, prompt: list[int] | str, prompt_tokens: int, output_tokens: int, due: float | None = None
    ) -> Outcome:
        """Stream one completion. Errors are recorded in the outcome.

        Args:
            prompt: token ids or text.
            prompt_tokens: length of the prompt.
            output_tokens: tokens to generate, neither more nor fewer.
            due: when the request should have gone out, seconds of `time.perf_counter`; None for now.
        """
        sent = time.perf_counter()
        outcome = Outcome(sent if due is None else due, sent, prompt_tokens, output_tokens)
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            **self.body,
        }
        try:
            async with asyncio.timeout(self.timeout):
                await self._stream(body, outcome)
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"after {self.timeout:g} s"
        except ConnectionRefusedError as error:
            outcome.error, outcome.detail = "refused", str(error)
        except BrokenOffError as error:
            outcome.error, outcome.detail = "broken off", str(error)
        except OSError as error:
            outcome.error, outcome.detail = "connection", str(error)
        except ValueError as error:
            outcome.error, outcome.detail = "not JSON", str(error)
        outcome.ended = time.perf_counter()
        return outcome

    async def _stream(self, body: dict[str, Any], outcome: Outcome) -> None:
        response = await self.pool.send("POST", "/v1/completions", body)
        try:
            if response.status != 200:
                outcome.detail = (await response.read()).decode("utf-8", "replace")[:500]
                outcome.error = f"HTTP {response.status}"
                return
            done = False
            async for line in response.lines():
                timestamp = time.perf_counter()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                    continue  # to the end of the body, so that the connection can be used again
                note(json.loads(data), outcome, timestamp)
            if outcome.error is None and not done:
                outcome.error, outcome.detail = "broken off", "the stream ended without [DONE]"
        finally:
            response.close()


def note(event: dict[str, Any], outcome: Outcome, timestamp: float) -> None:
    """Add an event of the stream to the outcome.

    Args:
        event: as parsed from the stream.
        outcome: the outcome that the event is added to.
        timestamp: the timestamp of the event, seconds of `time.perf_counter`.
    """
    if event.get("error"):
        error = event["error"]
        outcome.error = "error in the stream"
        outcome.detail = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
        return
    usage = event.get("usage") or {}
    if choices := event.get("choices"):
        # A chunk without text may only name the finish reason, or hold tokens that complete no character.
        text = choices[0].get("text") or ""
        outcome.text += text
        spoken = bool(text)
        counted = usage.get("completion_tokens")
        new = int(spoken) if counted is None else counted - outcome.output_tokens
        if new > 0 or spoken:
            outcome.chunks.append((timestamp, max(new, 0)))
            outcome.output_tokens += max(new, 0)
        if choices[0].get("finish_reason") in ("error", "abort"):
            outcome.error = f"finish_reason {choices[0]['finish_reason']}"
    elif "completion_tokens" in usage:  # the last chunk knows what all of it came to
        outcome.output_tokens = usage["completion_tokens"]
    outcome.prompt_tokens = usage.get("prompt_tokens") or outcome.prompt_tokens
