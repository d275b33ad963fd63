"""Batches: files of requests that run behind those of clients, and outlive the process.

Results are appended to a file as they come. After a restart, a batch goes on with the lines that have none.
"""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .batch_lines import Line, error, read_lines
from .file_store import FileStore, StoreFullError, load_json, write
from .internal_request import InternalAnswer

logger = logging.getLogger("entropic_jax.serving.batches")
WINDOW = 24 * 3600  # seconds that a batch has
CONCURRENT = 16  # lines of all batches that run at once
MOST_UNFINISHED = 64  # batches
PRIORITY = 1  # of lines that state none: after the requests of clients
RETRIED, LONGEST_PAUSE = (429, 503), 30.0  # statuses of a busy server; seconds until a line is sent again
ENDED = ("completed", "failed", "expired", "cancelled")
RESULTS = ("output", "error")  # files of a batch
Post = Callable[[str, Mapping[str, Any], bytes | None, asyncio.Event], Awaitable[InternalAnswer]]


class Batch:
    """A batch: its object in OpenAI's form, and what runs."""

    def __init__(self, owner: str | None, fields: dict[str, Any], lives: float | None) -> None:
        """A batch that does not run.

        Args:
            owner: the digest of an API key, as hexadecimal digits.
            fields: the object.
            lives: seconds that its results live; None is those of the store.
        """
        self.owner, self.fields, self.lives = owner, fields, lives
        self.gone = asyncio.Event()  # set when its lines need not go on
        self.task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more happens."""
        return self.fields["status"] in ENDED

    def enter(self, status: str) -> None:
        """Change the status, and note the time."""
        self.fields["status"] = status
        if status != "validating":
            self.fields[f"{status}_at"] = int(time.time())


class BatchRunner:
    """The batches of a server."""

    def __init__(self, store: FileStore, post: Post, draining: Callable[[], bool]) -> None:
        """The batches that the store's folder holds; none runs before `start`.

        Args:
            store: holds their input and their results.
            post: sends the body of a line to a path of the server.
            draining: whether the server shuts down.
        """
        self.store, self._post, self._draining = store, post, draining
        self.folder = store.folder / "batches"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._slots = asyncio.Semaphore(CONCURRENT)
        described = [load_json(file) for file in self.folder.glob("*.json")]
        described.sort(key=lambda entry: (entry["fields"]["created_at"], entry["fields"]["id"]))
        self._batches = {entry["fields"]["id"]: Batch(**entry) for entry in described}

    def start(self) -> None:
        """Go on with the batches that have not ended. Call it in the server's event loop."""
        for batch in self._batches.values():
            if not batch.ended and batch.task is None:
                self._launch(batch)

    def close(self) -> None:
        """Stop all batches; a later server goes on with them."""
        for batch in self._batches.values():
            if batch.task is not None:
                batch.task.cancel()
        self.store.close()

    def create(self, owner: str | None, fields: Mapping[str, Any], lives: float | None) -> Batch:
        """A new batch, which begins to run.

        Args:
            owner: the digest of an API key.
            fields: the fields that the client states: input file, endpoint, window, metadata.
            lives: seconds that its results live; None is those of the store.

        Raises:
            StoreFullError: Too many batches are unfinished.
        """
        self._forget_old()
        unfinished = sum(not batch.ended for batch in self._batches.values())
        if unfinished >= MOST_UNFINISHED:
            raise StoreFullError(
                f"unfinished batches must be at most {MOST_UNFINISHED}; got {unfinished + 1}"
            )
        current = int(time.time())
        counts = {"total": 0, "completed": 0, "failed": 0}
        state: dict[str, Any] = dict.fromkeys(("errors", "output_file_id", "error_file_id"))
        state |= {"created_at": current, "expires_at": current + WINDOW, "request_counts": counts}
        name = f"batch_{uuid.uuid4().hex}"
        stated = {"id": name, "object": "batch", "status": "validating", **fields, **state}
        batch = self._batches[name] = Batch(owner, stated, lives)
        self._save(batch)
        self._launch(batch)
        return batch

    def of_owner(self, owner: str | None) -> list[Batch]:
        """The batches of an owner, from the oldest to the newest."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    def get(self, owner: str | None, name: str) -> Batch | None:
        """The batch with an id; None if it is not there, or has another owner."""
        batch = self._batches.get(name)
        return batch if batch is not None and batch.owner == owner else None

    def cancel(self, batch: Batch) -> None:
        """End a batch; what it has computed so far becomes its results."""
        batch.enter("cancelling")
        self._save(batch)
        batch.gone.set()

    def _launch(self, batch: Batch) -> None:
        batch.task = asyncio.create_task(self._run(batch))

    async def _run(self, batch: Batch) -> None:
        """Run a batch to its end, whatever happens."""
        try:
            await self._follow(batch)
        except StoreFullError as full:
            await self._finish(batch, "failed", [error("storage_full", str(full))])
        except Exception:
            logger.exception("a batch failed", extra={"batch": batch.fields["id"]})
            await self._finish(batch, "failed", [error("server_error", "unexpected error; see the log")])
        if batch.ended:
            logger.info("batch ended", extra={"batch": batch.fields["id"], "status": batch.fields["status"]})

    async def _follow(self, batch: Batch) -> None:
        """Check the input of a batch, answer its lines and store the results."""
        fields = batch.fields
        file = self.store.get(batch.owner, fields["input_file_id"])
        if file is None:
            missing = error("missing_file", "input_file_id must be a file that has not been deleted")
            await self._finish(batch, "failed", [missing])
            return
        content = await asyncio.to_thread(self.store.content, file)
        lines, errors = await asyncio.to_thread(read_lines, content, fields["endpoint"])
        if errors:
            await self._finish(batch, "failed", errors)
            return
        done, failed = (await asyncio.to_thread(self._recorded, batch)).values()
        fields["request_counts"] = {"total": len(lines), "completed": len(done), "failed": len(failed)}
        if fields["status"] == "cancelling":
            batch.gone.set()
        if fields["status"] == "validating":
            batch.enter("in_progress")
        self._save(batch)
        left = [line for line in lines if line.custom_id not in done | failed]
        try:
            async with asyncio.timeout(fields["expires_at"] - time.time()):
                await self._answer_all(batch, left)
            if not self._draining():
                await self._finish(batch, "cancelled" if batch.gone.is_set() else "completed")
        except TimeoutError:
            unanswered = {line.custom_id for line in left}.difference(*self._recorded(batch).values())
            late = {"code": "batch_expired", "message": "the batch did not end within its window"}
            for name in sorted(unanswered):
                self._record(batch, "error", name, None, late)
            await self._finish(batch, "expired")

    async def _answer_all(self, batch: Batch, lines: Sequence[Line]) -> None:
        """Answer some lines at a time."""
        running = iter(lines)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENT, len(lines))):
                    group.create_task(self._work(batch, running))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self, batch: Batch, lines: Any) -> None:
        """Answer lines until there are none, the batch is cancelled, or the server shuts down."""
        for line in lines:
            async with self._slots:
                answer = await self._answer(batch, line)
            if answer is None:
                return
            response = {
                "status_code": answer.status,
                "request_id": answer.request_id,
                "body": answer.body,
            }
            kind = "output" if answer.status == 200 else "error"
            self._record(batch, kind, line.custom_id, response, None)
            batch.fields["request_counts"]["completed" if kind == "output" else "failed"] += 1

    async def _answer(self, batch: Batch, line: Line) -> InternalAnswer | None:
        """The answer to a line; None where the line is left alone."""
        path, owner = batch.fields["endpoint"], batch.owner
        body = dict(line.body)
        if path != "/v1/embeddings":
            body.setdefault("priority", PRIORITY)
        while not (self._draining() or batch.gone.is_set()):
            answer = await self._post(path, body, None if owner is None else bytes.fromhex(owner), batch.gone)
            if self._draining() or batch.gone.is_set():
                return None  # the answer may have been cut off
            if answer.status not in RETRIED:
                return answer
            stated = answer.headers.get("retry-after", "1")
            pause = min(LONGEST_PAUSE, float(stated) if stated.isdecimal() else 1.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(batch.gone.wait(), pause)
        return None

    def _results(self, batch: Batch, kind: str) -> Path:
        return self.folder / f"{batch.fields['id']}.{kind}"

    def _record(self, batch: Batch, kind: str, custom_id: str, response: Any, failure: Any) -> None:
        """Append the result of a line.

        Args:
            batch: the batch of the line.
            kind: the file that it belongs to, of `RESULTS`.
            custom_id: the name of the line.
            response: the status and the body of its answer.
            failure: why it has none.
        """
        name = f"batch_req_{uuid.uuid4().hex}"
        result = {"id": name, "custom_id": custom_id, "response": response, "error": failure}
        text = json.dumps(result).encode() + b"\n"
        sizes = [path.stat().st_size for k in RESULTS if (path := self._results(batch, k)).exists()]
        self.store.set_aside(batch.fields["id"], sum(sizes) + len(text), "results")
        with self._results(batch, kind).open("ab") as out:
            out.write(text)

    def _recorded(self, batch: Batch) -> dict[str, set[str]]:
        """The names of the lines with a result; one that was cut off by the end of a process is removed."""
        names: dict[str, set[str]] = {}
        for kind in RESULTS:
            path = self._results(batch, kind)
            content = path.read_bytes() if path.exists() else b""
            complete = content[: content.rfind(b"\n") + 1]
            if complete != content:
                write(path, complete)
            names[kind] = {json.loads(text)["custom_id"] for text in complete.splitlines()}
        return names

    async def _finish(self, batch: Batch, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        """Store the results, and end the batch."""
        if errors:
            batch.fields["errors"] = {"object": "list", "data": errors}
        elif status == "completed":
            batch.enter("finalizing")
        try:
            await asyncio.to_thread(self._store_results, batch)
        finally:
            self.store.give_back(batch.fields["id"])
        batch.enter(status)
        self._save(batch)
        for kind in RESULTS:
            self._results(batch, kind).unlink(missing_ok=True)

    def _store_results(self, batch: Batch) -> None:
        for kind in RESULTS:
            path, batch_id = self._results(batch, kind), batch.fields["id"]
            if path.exists():
                # The id follows from the batch's, so that results that are stored again replace themselves.
                identity = f"file-{batch_id.removeprefix('batch_')}-{kind}"
                filename = f"{batch_id}_{kind}.jsonl"
                self.store.keep(
                    batch.owner, path.read_bytes(), filename, "batch_output", batch.lives, identity
                )
                batch.fields[f"{kind}_file_id"] = identity

    def _save(self, batch: Batch) -> None:
        entry = {"owner": batch.owner, "fields": batch.fields, "lives": batch.lives}
        write(self.folder / f"{batch.fields['id']}.json", json.dumps(entry).encode())

    def _forget_old(self) -> None:
        """Forget batches that ended longer ago than files live."""
        oldest = time.time() - max(self.store.seconds, WINDOW)
        for name, batch in list(self._batches.items()):
            if batch.ended and batch.fields["created_at"] < oldest:
                del self._batches[name]
                (self.folder / f"{name}.json").unlink(missing_ok=True)
