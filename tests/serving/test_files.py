"""`/v1/files`: forms, the names and owners of files, the room for them."""

import socket
import threading
import time

import pytest

pytest.importorskip("llguidance", reason="the extra `serve` is not installed")

from entropic_jax.serving.http import file_store
from entropic_jax.serving.http.file_store import OVERHEAD, FileStore, StoreFullError
from entropic_jax.serving.http.multipart import parts
from entropic_jax.serving.http.routes import files
from entropic_jax.serving.request import RequestError

from .files_server import ask, bounded_server, server, upload
from .live import refused


@pytest.fixture(scope="module")
def live(served, tmp_path_factory):
    with bounded_server(served, tmp_path_factory.mktemp("files")) as running:
        yield running


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


def test_the_parts_of_a_form_are_bounded():
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
