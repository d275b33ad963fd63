"""`/v1/files` and `/v1/batches`: forms, files and their owners, batches, what ends them, restarts."""

import contextlib
import json
import socket
import threading
import time

import httpx2
import pytest

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")

from entropic_jax.serving.http import batch_runner, file_store
from entropic_jax.serving.http.file_store import OVERHEAD, FileStore, StoreFullError
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.multipart import parts
from entropic_jax.serving.http.routes import files
from entropic_jax.serving.http.settings import Limits, Settings
from entropic_jax.serving.request import RequestError

from .live import refused, serving
from .scripted_engine import ScriptedEngine

ENDED = ("completed", "failed", "expired", "cancelled")


@contextlib.contextmanager
def server(served, folder, **settings):
    """A server over a scripted engine, with a folder for files."""
    engine = ScriptedEngine(served)
    with serving(Frontend(engine, served, Settings(port=0, files_dir=str(folder), **settings))) as live:
        live.engine = engine
        yield live


@pytest.fixture(scope="module")
def live(served, tmp_path_factory):
    limits = Limits(file_bytes=200_000)
    keys = ("one", "two")
    with server(served, tmp_path_factory.mktemp("files"), api_keys=keys, limits=limits) as running:
        yield running


def ask(live, method, path, key="one", type_of=None, **fields):
    headers = {"Authorization": f"Bearer {key}"} | ({"Content-Type": type_of} if type_of else {})
    return httpx2.request(method, live.url + path, headers=headers, timeout=60, **fields)


def upload(live, content, key="one", **fields):
    content = content if isinstance(content, bytes) else b"\n".join(json.dumps(x).encode() for x in content)
    form = {"purpose": "batch", **fields}
    return ask(live, "POST", "/v1/files", key, files={"file": ("in.jsonl", content)}, data=form)


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


def test_the_parts_of_a_form():
    body = (
        b'--x y\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
        b'--x y\r\ncontent-disposition: form-data; name="file"; filename="f \xc3\xa4.bin"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n\r\n--x\r\n\x00\xff\n\r\n--x y--\r\n"
    )
    first, second = parts('multipart/form-data; boundary="x y"', body)
    assert first == ("a", None, b"1") and second[:2] == ("file", "f ä.bin")
    assert second.content == b"\r\n--x\r\n\x00\xff\n"
    for content_type, wrong in (("text/plain", body), ("multipart/form-data; boundary=z", body), ("", b"")):
        with pytest.raises(RequestError, match="must be"):
            list(parts(content_type, wrong))


DISPOSITION = b'Content-Disposition: form-data; name="file"; '


def form_of(*pieces):
    return b"".join(b"--x\r\n" + piece + b"\r\n" for piece in pieces) + b"--x--\r\n"


@pytest.mark.parametrize(
    ("filename", "said"),
    [
        (b"filename*=undefined''abc", "charset"),
        (b"filename*=idna''xn--%ff%fe", "charset"),
        (b"filename*=punycode''%ff-%fe!!9", "charset"),
        (b"filename*=a%00b''%ff", "charset"),
        (b"filename*=utf-7''+2AA-", "charset"),
        (b"filename*=unicode_escape''\\ud800", "charset"),
        (b"filename*=utf-8''%ed%a0%80", "charset"),
        (b"filename*0*=undefined''a; filename*1=b", "charset"),
        (b"filename*" + b"9" * 4000 + b"=b; filename*0=x", None),
        (b"filename*" + b"9" * 5000 + b"=b", "headers of at most 4096 bytes"),
        (b"a=b; " * 20_000, "headers of at most 4096 bytes"),
    ],
)
def test_odd_names_of_files_are_refused(live, filename, said):
    form = form_of(
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        DISPOSITION + filename + b"\r\n\r\n{}",
    )
    answer = ask(live, "POST", "/v1/files", content=form, type_of="multipart/form-data; boundary=x")
    if said is None:
        assert answer.status_code in (200, 400)
    else:
        assert said in refused(answer, 400)["message"]
    assert ask(live, "GET", "/v1/files").status_code == 200


def test_names_of_files_have_a_charset():
    for filename, name in (
        (b"filename*=UTF-8''%c3%a4.bin", "ä.bin"),
        (b"filename*=iso-8859-1''%e4.bin", "ä.bin"),
        (b"filename*0*=utf-8''%c3%a4; filename*1=.bin", "ä.bin"),
    ):
        (part,) = parts("multipart/form-data; boundary=x", form_of(DISPOSITION + filename + b"\r\n\r\n{}"))
        assert part == ("file", name, b"{}")


def test_the_parts_of_a_form_are_few():
    piece = DISPOSITION + b"a=b\r\n\r\n{}"
    assert len(list(parts("multipart/form-data; boundary=x", form_of(*[piece] * 16)))) == 16
    for content_type, form, said in (
        ("multipart/form-data; boundary=x", form_of(*[piece] * 1000), "at most 16 parts"),
        ("multipart/form-data; boundary=x" + "; a=b" * 10_000, form_of(piece), "with a boundary"),
        ("multipart/form-data; boundary*=undefined''x", form_of(piece), "boundary in Content-Type must be"),
        ("multipart/form-data; boundary=", form_of(piece), "with a boundary"),
    ):
        with pytest.raises(RequestError, match=said.replace("*", ".")):
            next(parts(content_type, form))


def test_a_form_is_read_by_a_thread_of_the_files(live, monkeypatch):
    threads = []

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return parts(*arguments)

    monkeypatch.setattr(files, "parts", noted)
    assert upload(live, b"x").status_code == 200
    assert threads[0].startswith("file worker")


def test_a_file_belongs_to_its_key(live):
    before = len(ask(live, "GET", "/v1/files").json()["data"])
    content = b'{"a": "\xc3\xa4"}\r\n\x00'
    file = upload(live, content).json()
    assert (file["object"], file["filename"], file["purpose"], file["bytes"]) == (
        *("file", "in.jsonl", "batch"),
        len(content),
    )
    assert file["expires_at"] - file["created_at"] == 30 * 86400
    path = f"/v1/files/{file['id']}"
    assert ask(live, "GET", path).json() == file
    assert ask(live, "GET", f"{path}/content").content == content
    for method, ending in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        assert refused(ask(live, method, path + ending, "two"), 404)["param"] == "file_id"
    assert ask(live, "GET", "/v1/files", "two").json()["data"] == []
    assert refused(ask(live, "GET", "/v1/files/..%2flock"), 404)
    assert len(ask(live, "GET", "/v1/files").json()["data"]) == before + 1
    assert ask(live, "DELETE", path).json() == {"id": file["id"], "object": "file", "deleted": True}
    refused(ask(live, "GET", path), 404)
    assert len(ask(live, "GET", "/v1/files").json()["data"]) == before


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


@pytest.mark.parametrize(
    ("fields", "status", "param", "said"),
    [
        ({"purpose": "fine-tune"}, 400, "purpose", "purpose must be batch; got 'fine-tune'"),
        ({"expires_after[seconds]": "7200"}, 400, "expires_after[anchor]", "must be created_at; got None"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            *(400, "expires_after[seconds]", "must be an integer between 3600 and 2592000; got '5'"),
        ),
    ],
)
def test_forms_are_checked(live, fields, status, param, said):
    error = refused(upload(live, b"x", **fields), status)
    assert error["param"] == param and said in error["message"]


def test_the_life_of_a_file_has_a_handful_of_digits(live):
    for seconds in ("9" * 5000, "\u0663\u0666\u0660\u0660", "-3600"):
        life = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
        error = refused(upload(live, b"x", **life), 400)
        assert error["message"].startswith(
            "expires_after[seconds] must be an integer between 3600 and 2592000"
        )


def test_a_form_needs_a_file_and_room(live):
    answer = ask(live, "POST", "/v1/files", files={"purpose": (None, "batch")})
    assert refused(answer, 400)["message"] == "file must be a part of the form; it is missing"
    assert "Content-Type must be" in refused(ask(live, "POST", "/v1/files", json={}), 400)["message"]
    assert "bytes that are left of 200000" in refused(upload(live, b"x" * 200_001), 413)["message"]
    life = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = upload(live, b"x", **life).json()
    assert file["expires_at"] - file["created_at"] == 3600


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


def test_a_client_that_leaves_during_an_upload_is_no_error(live, caplog):
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
    with caplog.at_level("INFO"):
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
            connection.sendall(head.encode() + b"Content-Length: 99\r\n\r\n--x")
            time.sleep(0.2)
        deadline = time.monotonic() + 20
        while not (lines := [x for x in caplog.records if getattr(x, "path", None) == "/v1/files"]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert [line.levelname for line in lines] == ["INFO"] and lines[0].status == 400
    assert all(record.levelname != "ERROR" for record in caplog.records)


def test_files_expire_and_leave_nothing(tmp_path):
    current = 1000.0
    store = FileStore(tmp_path, 100 + 3 * OVERHEAD, 60, clock=lambda: current)
    first, second = store.put(None, b"a" * 60, "a", "batch"), store.put("k", b"b" * 30, "b", "batch", 600)
    with pytest.raises(
        StoreFullError, match="file must fit into the 10 bytes that are left of 12388; got 11"
    ):
        store.put(None, b"c" * 11, "c", "batch")
    with pytest.raises(RequestError, match="--files-dir must not be in use by another server"):
        FileStore(tmp_path, 100, 60)
    current = 1060.0
    assert store.get(None, first.id) is None and store.get("k", second.id) == second
    assert store.size == 30 + OVERHEAD
    (tmp_path / "files" / "file-cut").write_bytes(b"x")
    store.close()
    store = FileStore(tmp_path, 100, 60, clock=lambda: current)
    assert store.of_owner("k") == [second] and store.content(second) == b"b" * 30
    assert len(list((tmp_path / "files").iterdir())) == 2
    (tmp_path / "taken").write_text("")
    with pytest.raises(RequestError, match="--files-dir must be a folder that can be written"):
        FileStore(tmp_path / "taken", 100, 60)


def test_room_is_set_aside_before_a_file_is_written(tmp_path, monkeypatch):
    store = FileStore(tmp_path, 100 + 2 * OVERHEAD, 60)
    written = file_store.write

    def write(path, content):
        with pytest.raises(StoreFullError, match="into the 40 bytes that are left"):
            store.set_aside("other", 41)
        written(path, content)

    monkeypatch.setattr(file_store, "write", write)
    store.put(None, b"a" * 60, "a", "batch")
    store.set_aside("other", 30)
    store.set_aside("other", 40)  # in place of the 30
    assert store.size == 100 + 2 * OVERHEAD
    with pytest.raises(StoreFullError):
        store.set_aside("other", 41)
    assert store.size == 100 + 2 * OVERHEAD
    store.give_back("other")
    assert store.size == 60 + OVERHEAD


def test_files_of_many_threads_stay_within_the_limit(tmp_path):
    store = FileStore(tmp_path, 20 * (OVERHEAD + 10), 60)
    stored, errors = [], []

    def work():
        for _ in range(20):
            try:
                stored.append(store.put(None, b"a" * 10, "a", "batch"))
            except StoreFullError:
                pass
            except Exception as error:
                errors.append(error)
            store.of_owner(None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(stored) == 20 and store.size == store.max_bytes
    store.delete(stored[0].id)
    store.delete(stored[0].id)  # whoever comes second finds nothing
    assert len(store.of_owner(None)) == 19


def test_a_file_whose_name_is_not_unicode_is_listed(served, tmp_path):
    store = FileStore(tmp_path, 10**6, 60)
    store.put(None, b"a", "a\ud800", "batch")
    store.close()
    with server(served, tmp_path) as live:
        assert ask(live, "GET", "/v1/files").json()["data"][0]["filename"] == "a?"


def test_a_file_that_is_deleted_while_it_is_read_is_not_found(live, monkeypatch):
    file = upload(live, b"x").json()

    def gone(store, file):
        raise FileNotFoundError

    monkeypatch.setattr(FileStore, "content", gone)
    assert refused(ask(live, "GET", f"/v1/files/{file['id']}/content"), 404)["param"] == "file_id"


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
