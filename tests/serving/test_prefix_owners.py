"""Cached prefixes belong to an API key: no key learns from the cache what another has sent."""

import contextlib
import json

import httpx2
import pytest

from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Settings

from .live import serving
from .scripted_engine import ScriptedEngine

MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES,
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/score": {"text_1": "x", "text_2": "y"},
}


@contextlib.contextmanager
def server(served, *keys, **settings):
    engine = ScriptedEngine(served)
    with serving(Frontend(engine, served, Settings(port=0, api_keys=keys, **settings))) as live:
        live.engine = engine
        yield live


def salt(live, key, path="/v1/completions", **fields):
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx2.post(live.url + path, json={**BODIES[path], **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return live.engine.engine_requests[-1].cache_salt


@pytest.mark.parametrize("path", BODIES)
def test_prefixes_are_found_with_the_same_key_only(served, path):
    with server(served, "a", "b") as live:
        assert salt(live, "a", path) == salt(live, "a", path) != salt(live, "b", path)
        assert "Bearer" not in salt(live, "a", path) and len(salt(live, "a", path)) > 64
        if path == "/v1/completions":
            stated = [salt(live, key, cache_salt=text) for key in ("a", "b") for text in ("s", "t")]
            assert len({*stated, salt(live, "a"), salt(live, "b")}) == 6
            assert salt(live, "b", cache_salt=salt(live, "a")) != salt(live, "a")


def test_keys_may_share_prefixes_and_one_key_has_all(served):
    for keys, settings in ((("a", "b"), {"share_prefix_cache": True}), (("a",), {}), (("a", "a"), {})):
        with server(served, *keys, **settings) as live:
            assert salt(live, keys[-1]) is None
            assert salt(live, keys[-1], cache_salt="s") == "s"


def test_a_batch_has_the_prefixes_of_its_key(served, tmp_path):
    with server(served, "a", "b", files_dir=str(tmp_path)) as live:
        line = {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/completions",
            "body": BODIES["/v1/completions"],
        }
        headers = {"Authorization": "Bearer b"}
        file = httpx2.post(
            f"{live.url}/v1/files",
            headers=headers,
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", json.dumps(line).encode())},
        ).json()
        stated = {"input_file_id": file["id"], "completion_window": "24h", "endpoint": "/v1/completions"}
        batch = httpx2.post(f"{live.url}/v1/batches", json=stated, headers=headers).json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            batch = httpx2.get(f"{live.url}/v1/batches/{batch['id']}", headers=headers).json()
        assert batch["status"] == "completed"
        assert live.engine.engine_requests[-1].cache_salt == salt(live, "b")
