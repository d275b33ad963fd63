"""An OpenAI-compatible server without a model that emits tokens at known times and records them.

A request's field `fake` says what to do; what was done stands in `FakeServer.log`, by the clock of the test.
"""

import asyncio
import contextlib
import json
import threading
import time


class FakeServer:
    def __init__(self, context: int | None = 4096, rows: int = 1000) -> None:
        self.context, self.rows = context, rows
        self.log: list[dict] = []  # one entry a completion: body, begun, written (time, tokens), connection
        self.in_flight = self.most_in_flight = self.connections = 0

    def __enter__(self) -> "FakeServer":
        ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)))
        self.thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_) -> None:
        self.loop.call_soon_threadsafe(self.done.set)
        self.thread.join(10)
        assert not self.thread.is_alive()

    async def _main(self, ready: threading.Event) -> None:
        self.loop, self.done = asyncio.get_running_loop(), asyncio.Event()
        self.free = asyncio.Semaphore(self.rows)
        self.tasks: set = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1000, limit=1 << 24)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ready.set()
        await self.done.wait()
        server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _connection(self, reader, writer) -> None:
        self.tasks.add(asyncio.current_task())
        self.connections += 1
        number = self.connections
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                headers = {}
                while line := (await reader.readline()).strip():
                    name, _, value = line.decode().partition(": ")
                    headers[name.lower()] = value
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or "null")
                if not await self._answer(method, path, headers, body, writer, number):
                    break
        writer.close()

    async def _answer(self, method, path, headers, body, writer, number) -> bool:
        if (method, path) == ("GET", "/v1/models"):
            entry = {"id": "fake", "max_model_len": self.context} if self.context else {"id": "fake"}
            return self._json(writer, 200, {"object": "list", "data": [entry]})
        if (method, path) == ("POST", "/tokenize"):
            return self._json(writer, 200, {"tokens": [ord(c) for c in body["prompt"]]})
        if (method, path) != ("POST", "/v1/completions"):
            return self._json(writer, 404, {"error": {"message": "there is no such page"}})
        orders = {
            **dict(first=0.0, gap=0.0, per_chunk=1, usage="running", status=200, cut=None, delay=0),
            **body.get("fake", {}),
        }
        entry = {"body": body, "headers": headers, "begun": time.perf_counter(), "written": [], "on": number}
        self.log.append(entry)
        if orders["status"] != 200:
            return self._json(writer, orders["status"], {"error": {"message": "not today"}})
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async with self.free:
                return await self._speak(writer, body, orders, entry)
        finally:
            self.in_flight -= 1

    async def _speak(self, writer, body, orders, entry) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        said, prompt = 0, len(body["prompt"])
        tree = {"id": "x", "object": "text_completion", "model": "fake"}
        await asyncio.sleep(orders["first"])
        while said < body["max_tokens"]:
            if said:
                await asyncio.sleep(orders["gap"])
            if orders["cut"] is not None and len(entry["written"]) == orders["cut"]:
                return False
            new = min(orders["per_chunk"], body["max_tokens"] - said)
            said += new
            usage = {"prompt_tokens": prompt, "completion_tokens": said}
            event = {**tree, "choices": [{"index": 0, "text": "a" * new, "finish_reason": None}]}
            if orders["usage"] == "running":
                event["usage"] = usage
            entry["written"].append((time.perf_counter(), new))
            self._event(writer, event)
            await writer.drain()
        if orders["usage"]:
            self._event(writer, {**tree, "choices": [], "usage": usage})
        if orders.get("fails"):
            self._event(writer, {"error": {"message": "the roof fell in"}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _event(writer, tree) -> None:
        data = b"data: " + json.dumps(tree).encode() + b"\r\n\r\n"
        # In two pieces: an event may be cut anywhere.
        for piece in (data[:7], data[7:]):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    @staticmethod
    def _json(writer, status, tree) -> bool:
        data = json.dumps(tree).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return True
