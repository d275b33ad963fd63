"""/server_info and /reset_prefix_cache, over a scripted engine and over a real one."""

import tempfile
import time
from pathlib import Path

import httpx2
import pytest
from safetensors.numpy import load_file

from entropic_jax.serving.cli import parser
from entropic_jax.serving.commands import serve_setup
from entropic_jax.serving.engine import start
from entropic_jax.serving.engine.interface import EngineRequest, PrefixCacheReset
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.http.frontend import FrontendError
from entropic_jax.serving.http.routes import administration
from entropic_jax.serving.request import Request

from .live import refused

KEY = "a-key-that-nobody-may-see"
FOLDER = tempfile.TemporaryDirectory()
SERVER_SETTINGS = {"api_keys": (KEY,), "profile_dir": FOLDER.name}
HEADERS = {"Authorization": f"Bearer {KEY}"}


def test_server_info_holds_no_secrets(live):
    refused(httpx2.get(f"{live.url}/server_info"), 401)
    answer = httpx2.get(f"{live.url}/server_info", headers=HEADERS)
    info = answer.json()
    assert KEY not in answer.text
    assert info["model"]["names"] == ["embedded", "default"] and info["model"]["max_model_len"] == 256
    assert info["server"]["requires_api_key"] is True and info["server"]["limits"]["stops"] == 64
    assert info["control"]["preset"] == "off" and info["engine"] == live.engine.describe()


def test_the_prefix_cache_is_reset(live):
    refused(httpx2.post(f"{live.url}/reset_prefix_cache"), 401)
    answer = httpx2.post(f"{live.url}/reset_prefix_cache", headers=HEADERS)
    assert answer.json() == {"released_pages": 3, "pages_in_use": 1}
    live.engine.failed = "the engine broke"
    answer = httpx2.post(f"{live.url}/reset_prefix_cache", headers=HEADERS)
    assert "the engine broke" in refused(answer, 503)["message"]


def test_a_profile_that_nobody_ends_ends_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(administration, "LONGEST_PROFILE", 0.2)
    profiler = administration.Profiler(str(tmp_path))
    for _ in range(2):
        profiler.start()
        deadline = time.monotonic() + 60
        while profiler.running:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        profiler.stop()  # it is written
        with pytest.raises(FrontendError, match="no profile is being recorded"):
            profiler.stop()
    assert len(list(tmp_path.rglob("*.xplane.pb"))) >= 1
    monkeypatch.setattr(administration, "LONGEST_PROFILE", 30.0)
    profiler.start()
    timer = profiler._timer
    profiler.stop()
    timer.join(10)
    assert not timer.is_alive()


def test_a_profile_is_recorded(live):
    post = lambda path: httpx2.post(f"{live.url}{path}", headers=HEADERS, timeout=60)
    refused(httpx2.post(f"{live.url}/start_profile"), 401)
    assert "POST /start_profile begins one" in refused(post("/stop_profile"), 409)["message"]
    assert post("/start_profile").json() == {"recording": True, "folder": FOLDER.name}
    assert "POST /stop_profile ends it" in refused(post("/start_profile"), 409)["message"]
    assert post("/stop_profile").json()["recording"] is False
    assert [path for path in Path(FOLDER.name).rglob("*.xplane.pb") if path.stat().st_size]


@pytest.mark.slow
def test_an_engine_describes_itself_and_forgets_its_prefixes(directory):
    options = EngineOptions(max_num_seqs=1, block_size=16, num_pages=8, warmup="none", pruning=False)
    running = start.start(directory, options)
    try:
        info = running.describe()
        assert info["versions"]["jax"] and info["devices"][0]["platform"] == "cpu"
        stored = load_file(Path(directory) / "model.safetensors")
        assert info["model"]["parameters"] == sum(array.size for array in stored.values())
        assert info["model"]["layers"] == 2 and info["kv_cache"]["pages"] == 8
        assert info["options"]["block_size"] == 16 and info["batch"]["max_num_seqs"] == 1
        request = EngineRequest(id="1", request=Request(prompt=tuple(range(2, 50)), max_tokens=2))
        cached = lambda: [max(delta.cached_tokens for delta in running.submit(request)) for _ in range(2)]
        assert cached() == [0, 32]
        reset = running.reset_prefix_cache().result(30)
        assert reset == PrefixCacheReset(released_pages=3, pages_in_use=0)
        assert cached() == [0, 32] and running.snapshot()["pages_free"] == 8 - 3
    finally:
        running.close()
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        running.reset_prefix_cache()


def test_the_limits_of_stored_responses_are_flags():
    flags = "--max-stored-responses 7 --max-stored-response-bytes 1000 --stored-response-ttl 2.5".split()
    limits = serve_setup.settings_of(parser().parse_args(["serve", *flags])).limits
    assert (limits.stored_responses, limits.stored_response_bytes) == (7, 1000)
    assert limits.stored_response_seconds == 2.5


def test_a_life_of_no_time_is_refused(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--stored-response-ttl", "0"])
    assert "--stored-response-ttl must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "schlüssel", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused(key, capsys):
    # An unset variable in `--api-key "$KEY"` must not open the server to everybody.
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--api-key", key])
    message = f"--api-key must be printable ASCII, at least one character; got {key!r}"
    assert message in capsys.readouterr().err
