"""`/v1/batches`: lists of them and of files, what ends them, restarts."""

import json
import time

import httpx2
import pytest

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")

from entropic_jax.serving.http import batch_runner
from entropic_jax.serving.http.file_store import OVERHEAD
from entropic_jax.serving.http.settings import Limits

from .files_server import ask, bounded_server, server, upload
from .live import refused

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def live(served, tmp_path_factory):
    with bounded_server(served, tmp_path_factory.mktemp("files")) as running:
        yield running


def line(number, url="/v1/completions", **body):
    body = {"prompt": f"p{number}", "max_tokens": 4, "seed": number, **body}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}


def batch_of(live, lines, endpoint="/v1/completions", **fields):
    stated = {"input_file_id": upload(live, lines).json()["id"], "completion_window": "24h"}
    answer = ask(live, "POST", "/v1/batches", json={**stated, "endpoint": endpoint, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(live, batch):
    """The batch after its end."""
    deadline = time.monotonic() + 60
    while batch["status"] not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = ask(live, "GET", f"/v1/batches/{batch['id']}").json()
    return batch


def results(live, batch, kind="output"):
    content = ask(live, "GET", f"/v1/files/{batch[f'{kind}_file_id']}/content").text
    return {entry["custom_id"]: entry for entry in map(json.loads, content.splitlines())}


def test_lists_come_in_pages(live):
    names = [upload(live, b"x").json()["id"] for _ in range(3)]
    page = ask(live, "GET", "/v1/files", params={"limit": 2}).json()
    assert [file["id"] for file in page["data"]] == names[:0:-1] and page["has_more"]
    page = ask(live, "GET", "/v1/files", params={"after": page["last_id"], "limit": 1}).json()
    assert page["first_id"] == names[0]
    ordered = ask(live, "GET", "/v1/files", params={"order": "asc"}).json()["data"]
    assert [file["id"] for file in ordered][-3:] == names
    assert refused(ask(live, "GET", "/v1/files", params={"after": "x"}), 400)["param"] == "after"
    refused(ask(live, "GET", "/v1/files", params={"limit": 0}), 400)


def test_a_batch_answers_its_lines_as_requests(live):
    lines = [line(i) for i in range(5)]
    lines += [line(5, model="other"), line(6, max_tokens=-1), line(7, prompt=[1, 2, 3], n=2)]
    batch = batch_of(
        live, lines, metadata={"a": "b"}, output_expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert batch["object"] == "batch" and batch["status"] in ("validating", "in_progress")
    batch = ended(live, batch)
    assert (batch["status"], batch["metadata"]) == ("completed", {"a": "b"})
    assert batch["request_counts"] == {"total": 8, "completed": 6, "failed": 2}
    assert batch["completed_at"] >= batch["in_progress_at"] >= batch["created_at"]
    output, errors = results(live, batch), results(live, batch, "error")
    assert sorted(output) == ["c0", "c1", "c2", "c3", "c4", "c7"] and sorted(errors) == ["c5", "c6"]
    direct = ask(live, "POST", "/v1/completions", json=line(3)["body"]).json()
    response = output["c3"]["response"]
    assert response["status_code"] == 200 and output["c3"]["error"] is None
    assert response["body"]["choices"] == direct["choices"] and response["body"]["usage"] == direct["usage"]
    assert len(output["c7"]["response"]["body"]["choices"]) == 2
    assert errors["c5"]["response"]["status_code"] == 404
    assert errors["c6"]["response"]["body"]["error"]["param"] == "max_tokens"
    stored = ask(live, "GET", f"/v1/files/{batch['output_file_id']}").json()
    assert stored["purpose"] == "batch_output" and stored["expires_at"] - stored["created_at"] == 3600
    priorities = [e.priority for e in live.engine.engine_requests if e.request.seed in range(5)]
    assert batch_runner.PRIORITY in priorities and set(priorities) <= {0, batch_runner.PRIORITY}
    refused(ask(live, "GET", f"/v1/batches/{batch['id']}", "two"), 404)
    assert ask(live, "GET", "/v1/batches").json()["data"][0]["id"] == batch["id"]
    assert "has not ended" in refused(ask(live, "POST", f"/v1/batches/{batch['id']}/cancel"), 409)["message"]


def test_every_endpoint(live):
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "/v1/responses": {"input": "x", "max_output_tokens": 2},
        "/v1/embeddings": {"input": "x"},
    }
    for url, body in bodies.items():
        stated = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        batch = ended(live, batch_of(live, [stated], url))
        answer = results(live, batch)["a"]["response"]["body"]
        assert answer["object"] in ("chat.completion", "response", "list")
        if url == "/v1/responses":  # stored for the owner of the batch
            assert ask(live, "GET", f"{url}/{answer['id']}").status_code == 200
            refused(ask(live, "GET", f"{url}/{answer['id']}", "two"), 404)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"{}\nno json", "invalid_custom_id", 1),
        (b"no json", "invalid_json_line", 1),
        (b"\n \n", "empty_file", None),
        ([line(1), line(1)], "duplicate_custom_id", 2),
        ([{**line(1), "method": "GET"}], "invalid_method", 1),
        ([line(1, "/v1/embeddings")], "mismatched_url", 1),
        ([{**line(1), "body": []}], "invalid_body", 1),
        ([line(1), line(2, stream=True)], "invalid_body", 2),
    ],
)
def test_a_wrong_line_fails_the_batch(live, content, code, number):
    before = len(live.engine.engine_requests)
    batch = ended(live, batch_of(live, content))
    assert batch["status"] == "failed" and batch["output_file_id"] is None
    first = batch["errors"]["data"][0]
    assert (first["code"], first["line"]) == (code, number)
    assert len(live.engine.engine_requests) == before


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, None),
    ],
)
def test_the_fields_of_a_batch_are_checked(live, fields, status, param):
    body = {"input_file_id": upload(live, [line(1)]).json()["id"], "endpoint": "/v1/completions"}
    error = refused(
        ask(live, "POST", "/v1/batches", json={**body, "completion_window": "24h", **fields}), status
    )
    assert param is None or error["param"] == param


def test_a_cancelled_batch_keeps_its_results(served, tmp_path):
    with server(served, tmp_path) as live:
        live.engine.pace = 0.05
        batch = batch_of(live, [line(i, max_tokens=8) for i in range(64)])
        while not (batch := ask(live, "GET", f"/v1/batches/{batch['id']}").json())["request_counts"][
            "completed"
        ]:
            time.sleep(0.02)
        assert ask(live, "POST", f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
        batch = ended(live, batch)
        assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
        completed = batch["request_counts"]["completed"]
        assert 0 < completed < 64 and len(results(live, batch)) == completed
        deadline = time.monotonic() + 10
        while live.engine.running:  # lines that were under way have been cut off
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_batch_waits_for_a_busy_server(served, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "LONGEST_PAUSE", 0.05)
    with server(served, tmp_path) as live:
        live.engine.room, live.engine.pace = 2, 0.01
        batch = ended(live, batch_of(live, [line(i) for i in range(12)]))
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}


def test_a_batch_goes_on_after_a_restart(served, tmp_path):
    """Also if the last result was cut off in the middle."""
    with server(served, tmp_path, drain=0.3) as live:
        live.engine.pace = 0.05
        batch = batch_of(live, [line(i) for i in range(48)])
        while not ask(live, "GET", f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"]:
            time.sleep(0.02)
        live.frontend.draining = True
    (partial,) = (tmp_path / "batches").glob("*.output")
    done = partial.read_bytes().splitlines(keepends=True)
    assert 0 < len(done) < 48
    partial.write_bytes(b"".join(done) + b'{"id": "batch_req_1", "cust')
    with server(served, tmp_path) as live:
        batch = ended(live, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 48, "completed": 48, "failed": 0}
        assert len(live.engine.engine_requests) == 48 - len(done)
        output = results(live, batch)
        assert len(output) == 48 and not list((tmp_path / "batches").glob("*.output"))
        again = ask(live, "GET", f"/v1/batches/{batch['id']}").json()
    with server(served, tmp_path) as live:
        assert ask(live, "GET", f"/v1/batches/{batch['id']}").json() == again
        assert len(results(live, batch)) == 48


def test_a_batch_whose_time_is_over_expires(served, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "WINDOW", 1)
    with server(served, tmp_path) as live:
        live.engine.pace = 0.1
        batch = ended(live, batch_of(live, [line(i, max_tokens=6) for i in range(40)]))
        assert batch["status"] == "expired"
        late = results(live, batch, "error")
        completed = batch["request_counts"]["completed"]
        assert len(late) == 40 - completed and {e["error"]["code"] for e in late.values()} == {
            "batch_expired"
        }


def test_results_that_do_not_fit_fail_the_batch(served, tmp_path):
    with server(served, tmp_path, limits=Limits(file_bytes=4000 + 2 * OVERHEAD)) as live:
        batch = ended(live, batch_of(live, [line(i) for i in range(20)]))
        assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "storage_full"
        assert 0 < len(results(live, batch)) < 20


def test_there_are_no_such_paths_without_the_option(scripted_server):
    assert httpx2.get(f"{scripted_server.url}/v1/files").status_code == 404
    assert "/v1/batches" not in httpx2.get(f"{scripted_server.url}/openapi.json").json()["paths"]


def test_the_client_of_openai_runs_a_batch(live):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="one")
    content = json.dumps(line(1)).encode()
    file = client.files.create(file=("a.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while client.batches.retrieve(batch.id).status not in ENDED:
        time.sleep(0.02)
    batch = client.batches.retrieve(batch.id)
    assert json.loads(client.files.content(batch.output_file_id).text)["custom_id"] == "c1"
    assert batch.id in [b.id for b in client.batches.list()]
    assert client.files.delete(file.id).deleted
