"""Requests of the soak test: every kind that a server meets, each with a check of its answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.serving.bench.connection import Pool

Body = dict[str, Any]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
LONG = 500  # tokens: long enough to hold many pages, to be preempted, or to be cut off
CHOICES = ["import", "return", "class"]
ADAPTERS = ("left", "right")  # names of the adapters that the server has
PARAMETERS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "twice": {"type": "boolean"}},
    "required": ["colour", "twice"],
    "additionalProperties": False,
}
CLOSE = 1e-3  # largest difference of components of two embeddings of the same text, whose length is 1
COMPLETIONS = "/v1/completions"
# Each must be refused with a status of 400 to 499.
INVALID: tuple[tuple[str, Any], ...] = (
    (COMPLETIONS, {"prompt": "a", "temperature": -1}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}),
    (COMPLETIONS, {"prompt": "a", "n": 0}),
    (COMPLETIONS, {"prompt": {"a": 1}}),
    (COMPLETIONS, {"prompt": [10**9], "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "word " * 100_000, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "model": "no such model"}),
    (COMPLETIONS, {"prompt": "a", "entropic": {"preset": "warp"}}),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 500}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(("}}),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}),
    (COMPLETIONS, ["not", "an", "object"]),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": "hello"}),
    ("/v1/nothing", {}),
    ("/tokenize", {"prompt": 3}),
)


class WrongAnswerError(Exception):
    """An answer differs from the right one."""


class RefusedError(Exception):
    """429 or 503: the server is full; the request is to be repeated."""


class TimedOutError(Exception):
    """The server has ended a request at its time limit (408)."""


class Known(NamedTuple):
    """A prompt with the answers that it must always get."""

    prompt: str
    greedy: str
    seed: int
    sampled: str
    adapted: tuple[str, ...]  # the greedy text under each adapter
    embedding: tuple[float, ...]

    def same_as(self, other: "Known") -> bool:
        """Whether the texts are equal and the embeddings close."""
        return self._replace(embedding=()) == other._replace(embedding=()) and is_close(
            self.embedding, other.embedding
        )


class Requests:
    """Sends requests of every kind and checks the answers against `known`."""

    def __init__(self, pool: Pool, tokens: int, known: Sequence[Known] = ()) -> None:
        self.pool, self.tokens, self.known = pool, tokens, known

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of an answer. Raises RefusedError where the server is full."""
        response = await self.pool.send("POST", path, body)
        try:
            data = await response.read()
        finally:
            response.close()
        if response.status in (429, 503):
            raise RefusedError
        if response.status >= 500:
            raise WrongAnswerError(f"status {response.status}: {data[:300]!r}")
        try:
            return response.status, json.loads(data)
        except ValueError:
            raise WrongAnswerError(f"status {response.status}, and no JSON: {data[:300]!r}") from None

    async def complete(self, **body: Any) -> list[Body]:
        """The choices of a completion that must succeed."""
        status, tree = await self.post(COMPLETIONS, {"max_tokens": self.tokens, "ignore_eos": True, **body})
        expect(status == 200, f"status {status}: {tree}")
        return tree["choices"]

    async def stream(self, leave_after: int | None = None, **body: Any) -> tuple[str, str | None]:
        """Text and reason of a streamed completion; after `leave_after` events the client disconnects."""
        body = {"max_tokens": self.tokens, "ignore_eos": True, "stream": True, **body}
        response = await self.pool.send("POST", COMPLETIONS, body)
        text, reason, done, events = "", None, False, 0
        try:
            if response.status in (429, 503):
                raise RefusedError
            if response.status == 408:
                raise TimedOutError
            expect(response.status == 200, f"status {response.status}")
            async for line in response.lines():
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    done = True
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    if event["error"].get("code") == 408:
                        raise TimedOutError
                    raise WrongAnswerError(f"an error in the stream: {event['error']}")
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                events += 1
                if leave_after is not None and events >= leave_after:
                    return text, None
            expect(done, "the stream ended without [DONE]")
            return text, reason
        finally:
            response.close()

    async def learn(self, prompt: str, seed: int) -> Known:
        """The answers to a prompt when the server has no other request."""
        (greedy,) = await self.complete(prompt=prompt, temperature=0, seed=seed)
        (sampled,) = await self.complete(prompt=prompt, temperature=0.8, seed=seed)
        adapted = [await self.adapted_text(prompt, seed, name) for name in ADAPTERS]
        embedding = await self.embedding(prompt)
        return Known(prompt, greedy["text"], seed, sampled["text"], tuple(adapted), embedding)

    async def adapted_text(self, prompt: str, seed: int, adapter: str) -> str:
        """The greedy text under an adapter."""
        (choice,) = await self.complete(prompt=prompt, temperature=0, seed=seed, model=adapter)
        return choice["text"]

    async def embedding(self, text: str) -> tuple[float, ...]:
        """The embedding of a text."""
        status, tree = await self.post("/v1/embeddings", {"input": [text]})
        expect(status == 200, f"status {status}: {tree}")
        return tuple(tree["data"][0]["embedding"])

    # The kinds. Each raises WrongAnswerError for a wrong answer.

    async def greedy(self, known: Known, random: np.random.Generator) -> None:
        (choice,) = await self.complete(prompt=known.prompt, temperature=0, seed=known.seed)
        expect_equal(choice["text"], known.greedy)

    async def sampled(self, known: Known, random: np.random.Generator) -> None:
        (choice,) = await self.complete(prompt=known.prompt, temperature=0.8, seed=known.seed)
        expect_equal(choice["text"], known.sampled)

    async def streamed(self, known: Known, random: np.random.Generator) -> None:
        priority = int(random.integers(-5, 6))
        try:
            text, reason = await self.stream(
                prompt=known.prompt, temperature=0.8, seed=known.seed, priority=priority
            )
        except TimedOutError:
            expect(priority > 0, "timed out, though its priority was not low")
            raise
        expect_equal(text, known.sampled)
        expect(reason == "length", f"finish_reason {reason}")

    async def stopped(self, known: Known, random: np.random.Generator) -> None:
        place = int(random.integers(1, max(2, len(known.greedy) - 6)))
        stop = known.greedy[place : place + int(random.integers(1, 6))]
        text, reason = await self.stream(
            prompt=known.prompt, temperature=0, seed=known.seed, stop=[stop, "\0"]
        )
        expect_equal(text, known.greedy[: known.greedy.index(stop)])
        expect(reason == "stop", f"finish_reason {reason}")

    async def tokens_of(self, known: Known, random: np.random.Generator) -> None:
        status, tree = await self.post("/tokenize", {"prompt": known.prompt})
        expect(status == 200, f"status {status}")
        (choice,) = await self.complete(prompt=tree["tokens"], temperature=0, seed=known.seed)
        expect_equal(choice["text"], known.greedy)

    async def several(self, known: Known, random: np.random.Generator) -> None:
        other = self.known[int(random.integers(len(self.known)))]
        choices = await self.complete(prompt=[known.prompt, other.prompt], temperature=0, seed=known.seed)
        expect_equal(choices[0]["text"], known.greedy)
        expect_equal(choices[1]["text"], other.greedy)
        choices = await self.complete(prompt=known.prompt, n=3, temperature=0.8, seed=known.seed)
        expect([c["index"] for c in choices] == [0, 1, 2], "the choices are not in order")
        expect_equal(choices[0]["text"], known.sampled)

    async def logprobs(self, known: Known, random: np.random.Generator) -> None:
        (choice,) = await self.complete(
            prompt=known.prompt, temperature=0, seed=known.seed, logprobs=3, echo=True
        )
        expect_equal(choice["text"], known.prompt + known.greedy)
        expect(choice["logprobs"]["token_logprobs"][0] is None, "the first token has a probability")
        # Probabilities are those before penalties, and the model may recommend some.
        (choice,) = await self.complete(
            prompt=known.prompt, temperature=0, seed=known.seed, logprobs=3, repetition_penalty=1
        )
        logprobs = choice["logprobs"]
        last = logprobs["top_logprobs"][-1]
        chosen = logprobs["token_logprobs"][-1]
        expect(max(last.values()) == chosen, f"a greedy token is not the most likely: {chosen} among {last}")

    async def constrained(self, known: Known, random: np.random.Generator) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        (choice,) = await self.complete(
            prompt=known.prompt, response_format=form, max_tokens=64, ignore_eos=False, seed=known.seed
        )
        if choice["finish_reason"] == "stop":
            tree = json.loads(choice["text"])
            expect(set(tree) == {"name", "count"} and type(tree["count"]) is int, f"not the schema: {tree}")
        (choice,) = await self.complete(
            prompt=known.prompt, structured_outputs={"choice": CHOICES}, ignore_eos=False, seed=known.seed
        )
        expect(choice["text"] in CHOICES, f"{choice['text']!r} is not a choice")

    async def chat(self, known: Known, random: np.random.Generator) -> None:
        messages = [{"role": "user", "content": known.prompt[-200:]}]
        status, tree = await self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8})
        expect(status == 200, f"status {status}: {tree}")
        expect(isinstance(tree["choices"][0]["message"]["content"], str), "the message has no text")

    async def calls(self, known: Known, random: np.random.Generator) -> None:
        """A call of a tool through one of the three APIs."""
        said, function = known.prompt[-100:], {"name": "paint", "parameters": PARAMETERS}
        messages, common = [{"role": "user", "content": said}], {"seed": known.seed}
        kind = int(random.integers(3))
        if kind == 0:
            tools = [{"type": "function", "function": function}]
            body = {"messages": messages, "max_tokens": 200, "tools": tools, "tool_choice": "required"}
            choice = (await self.answer("/v1/chat/completions", body | common))["choices"][0]
            complete = choice["finish_reason"] == "tool_calls"  # or it was too long
            calls = choice["message"]["tool_calls"] if complete else ()
            stated = [json.loads(call["function"]["arguments"]) for call in calls]
        elif kind == 1:
            tools = [{"type": "function", **function}]
            body = {"input": said, "max_output_tokens": 200, "tools": tools, "tool_choice": "required"}
            tree = await self.answer("/v1/responses", body | common)
            complete = tree["status"] == "completed"
            stated = [json.loads(item["arguments"]) for item in tree["output"] if complete]
        else:
            tools = [{"name": "paint", "input_schema": PARAMETERS}]
            body = {"messages": messages, "max_tokens": 200, "tools": tools, "tool_choice": {"type": "any"}}
            tree = await self.answer("/v1/messages", body | common)
            complete = tree["stop_reason"] == "tool_use"
            stated = [block["input"] for block in tree["content"] if complete]
        expect(bool(stated) or not complete, "it ended without a call")
        for arguments in stated if complete else ():
            expect(
                set(arguments) == {"colour", "twice"} and arguments["colour"] in ("red", "blue"),
                f"not what the tool takes: {arguments}",
            )

    async def answer(self, path: str, body: Body) -> Any:
        """The JSON of an answer that must succeed."""
        status, tree = await self.post(path, body)
        expect(status == 200, f"status {status}: {tree}")
        return tree

    async def with_adapter(self, known: Known, random: np.random.Generator) -> None:
        place = int(random.integers(len(ADAPTERS)))
        text = await self.adapted_text(known.prompt, known.seed, ADAPTERS[place])
        expect_equal(text, known.adapted[place])

    async def embeds(self, known: Known, random: np.random.Generator) -> None:
        """The embeddings of two texts in a request, and how one of them ranks."""
        other = self.known[int(random.integers(len(self.known)))]
        tree = await self.answer("/v1/embeddings", {"input": [known.prompt, other.prompt]})
        for entry, text in zip(tree["data"], (known, other), strict=True):
            expect(is_close(entry["embedding"], text.embedding), "another embedding")
        ranked = {"query": known.prompt, "documents": [other.prompt, known.prompt], "scoring": "embedding"}
        best = max((await self.answer("/rerank", ranked))["results"], key=lambda x: x["relevance_score"])
        expect(abs(best["relevance_score"] - 1) < CLOSE, f"a text is not the closest to itself: {best}")

    async def controlled(self, known: Known, random: np.random.Generator) -> None:
        preset = ("micro", "meso-lossy", "full-lossy")[int(random.integers(3))]
        body = {"entropic": {"preset": preset, "trace": True}, "logprobs": 0, "seed": known.seed}
        (choice,) = await self.complete(prompt=known.prompt, **body)
        trace = choice["entropic"]["trace"]
        expect(len(trace["entropy"]) == self.tokens, "the trace is not as long as the text")

    async def invalid(self, known: Known, random: np.random.Generator) -> None:
        path, body = INVALID[int(random.integers(len(INVALID)))]
        status, tree = await self.post(path, body)
        expect(400 <= status < 500, f"status {status} for {str(body)[:80]}")
        expect(isinstance(tree["error"]["message"], str), "an error without a message")

    async def leaves(self, known: Known, random: np.random.Generator) -> None:
        """The client disconnects during the text."""
        await self.stream(leave_after=int(random.integers(1, self.tokens)), prompt=known.prompt)

    async def leaves_early(self, known: Known, random: np.random.Generator) -> None:
        """The client disconnects before the first token."""
        try:
            async with asyncio.timeout(float(random.exponential(0.02))):
                await self.complete(prompt=(known.prompt * 3)[:1800], seed=int(random.integers(1000)))
        except TimeoutError:
            pass

    async def long(self, known: Known, random: np.random.Generator) -> None:
        """A long text, which the server may end at its time limit."""
        text, reason = await self.stream(prompt=known.prompt, max_tokens=LONG, seed=known.seed)
        expect(reason == "length", f"finish_reason {reason}")

    def kinds(self) -> dict[str, tuple[float, Callable[..., Awaitable[None]]]]:
        """Every kind with its share."""
        return {
            "greedy": (14, self.greedy),
            "sampled": (14, self.sampled),
            "streamed": (18, self.streamed),
            "stop strings": (10, self.stopped),
            "token ids": (4, self.tokens_of),
            "several": (5, self.several),
            "logprobs": (5, self.logprobs),
            "grammars": (5, self.constrained),
            "chat": (3, self.chat),
            "tools": (4, self.calls),
            "adapters": (8, self.with_adapter),
            "embeddings": (5, self.embeds),
            "controlled": (6, self.controlled),
            "invalid": (6, self.invalid),
            "disconnects": (5, self.leaves),
            "early disconnects": (4, self.leaves_early),
            "long texts": (1, self.long),
        }


def is_close(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two embeddings are of one text."""
    return len(first) == len(second) and bool(np.all(np.abs(np.subtract(first, second)) <= CLOSE))


def expect(condition: bool, message: str) -> None:
    """Raise WrongAnswerError with the message unless the condition holds."""
    if not condition:
        raise WrongAnswerError(message)


def expect_equal(text: str, expected: str) -> None:
    """Raise WrongAnswerError where the texts differ, with the place."""
    if text != expected:
        place = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), -1)
        raise WrongAnswerError(
            f"another text from character {place} on: {text[:60]!r}, expected {expected[:60]!r}"
        )
