"""Batches and stored files without a server: lines that a shutdown leaves, and the room of expired files."""

import asyncio
import json

import pytest

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")

from entropic_jax.serving.http import batch_runner
from entropic_jax.serving.http.file_store import OVERHEAD, FileStore
from entropic_jax.serving.http.internal_request import InternalAnswer

from .test_batches import line


def test_a_batch_that_a_shutdown_cuts_off_has_not_ended(tmp_path):
    """Its lines without an answer are left to the next server."""
    store, posted, draining = FileStore(tmp_path, 100_000, 60), [], False
    content = b"\n".join(json.dumps(line(i)).encode() for i in range(40))
    stated = {"input_file_id": store.put(None, content, "a", "batch").id, "endpoint": "/v1/completions"}

    async def post(path, body, owner, gone):
        nonlocal draining
        posted.append(body["seed"])
        draining = len(posted) == 5
        return InternalAnswer(200, {}, {}, "")

    async def main():
        runner = batch_runner.BatchRunner(store, post, lambda: draining)
        batch = runner.create(None, stated, None)
        await batch.task
        assert draining and not batch.ended and batch.fields["status"] == "in_progress"
        assert batch.fields["request_counts"]["completed"] == 4 and batch.fields["output_file_id"] is None
        later = batch_runner.BatchRunner(store, post, lambda: False)
        later.start()
        batch = later.get(None, batch.fields["id"])
        await batch.task
        assert batch.fields["status"] == "completed" and batch.fields["request_counts"]["completed"] == 40
        assert sorted(posted) == sorted([*range(40), posted[4]])  # the fifth may have been cut off

    asyncio.run(main())


def test_files_that_have_expired_leave_their_room(tmp_path):
    current = 1000.0
    store = FileStore(tmp_path, OVERHEAD + 100, 60, clock=lambda: current)
    expired = store.put(None, b"a" * 60, "a", "batch")
    current = 1060.0
    kept = store.put(None, b"b" * 100, "b", "batch")
    assert store.of_owner(None) == [kept] and store.size == OVERHEAD + 100
    assert not (tmp_path / "files" / expired.id).exists()
