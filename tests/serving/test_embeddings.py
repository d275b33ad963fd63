"""/v1/embeddings, /score and /rerank: over a scripted engine, and over models."""

import base64
import math
import threading
import time

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.attention.attend import TokenSpan, attend_to
from entropic_jax.serving.engine.embedding import Embedder
from entropic_jax.serving.engine.interface import Embeddings
from entropic_jax.state import cache

from .live import refused
from .real_server import real_server

PATH = "/v1/embeddings"


def embed(live, **fields):
    answer = httpx2.post(live.url + PATH, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(answer) -> np.ndarray:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]])


def test_texts_and_tokens_in_batches(live):
    counted = np.array([[0, 2, 1, 0, 0, 0, 0, 0]])
    answer = embed(live, input=[9, 17, 10])
    assert answer["object"] == "list" and answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    np.testing.assert_allclose(vectors(answer), counted / math.sqrt(5), rtol=1e-6)
    np.testing.assert_allclose(vectors(embed(live, input=[[9, 17, 10]], normalize=False)), counted)
    last = vectors(embed(live, input=[[9, 17, 10], [3]], pooling="last"))
    np.testing.assert_array_equal(last.nonzero()[1], [2, 3])
    texts = ["import os", "x = 1"]
    assert len(vectors(embed(live, input=texts))) == 2
    assert live.engine.embedded[-1][0] == [live.model.encode(text) for text in texts]
    embed(live, input=texts[0], truncate_prompt_tokens=1)
    assert live.engine.embedded[-1][0] == [live.model.encode(texts[0])[-1:]]


def test_dimensions_are_cut_and_normalised_again(live):
    np.testing.assert_allclose(vectors(embed(live, input=[1, 2, 3], dimensions=2)), [[0, 1]])
    message = refused(httpx2.post(live.url + PATH, json={"input": "x", "dimensions": 9}), 400)["message"]
    assert message == "dimensions must be between 1 and 8; got 9"


def test_base64_holds_the_same_numbers(live):
    fields = {"input": [9, 17, 10]}
    (entry,) = embed(live, **fields, encoding_format="base64")["data"]
    numbers = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    np.testing.assert_allclose(numbers, vectors(embed(live, **fields))[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (PATH, {}, "input", "input is missing"),
        (PATH, {"input": []}, "input", "input must"),
        (PATH, {"input": [10**6]}, "input", "input must hold token ids between 0 and 4095; got 1000000"),
        (PATH, {"input": "x " * 200}, "input", "input must have between 1 and 100 tokens; got"),
        (PATH, {"input": "x", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        (PATH, {"input": "x", "embed_dtype": "float16"}, "embed_dtype", "embed_dtype must be 'float32'"),
        (PATH, {"input": "x", "messages": [{}]}, "messages", "messages must be null"),
        (PATH, {"input": "x", "pooling": "cls"}, "pooling", "pooling must be 'mean' or 'last'; got \"cls\""),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "text_1 must have 1 text, or as many"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents must"),
        ("/rerank", {"query": "a", "documents": ["b"], "scoring": "cross"}, "scoring", 'got "cross"'),
        ("/rerank", {"query": "a", "documents": ["b " * 300]}, "documents", "documents must have between"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query", "query must have between 1 and 255 tokens"),
    ],
)
def test_bad_bodies(live, path, body, param, said):
    error = refused(httpx2.post(live.url + path, json=body), 400)
    assert error["param"] == param and said in error["message"]


def test_a_client_that_leaves_stops_the_work(live):
    live.engine.embed_seconds, stopped = 30.0, live.engine.stopped
    try:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(live.url + PATH, json={"input": "x"}, timeout=0.3)
        end = time.monotonic() + 5
        while live.engine.stopped == stopped or live.frontend.busy:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        live.engine.embed_seconds = 0.0


def test_scores_that_a_sleep_ends(live, monkeypatch):
    """`/sleep` ends requests with the reason `abort`, while the server goes on."""
    submit = live.engine.submit

    def ended(engine_request):
        stream = submit(engine_request)
        stream.cancelled.set()
        return stream

    monkeypatch.setattr(live.engine, "submit", ended)
    answer = httpx2.post(live.url + "/score", json={"text_1": "a", "text_2": "b"})
    assert "the server is shutting down or going to sleep" in refused(answer, 503)["message"]
    assert answer.headers["retry-after"]
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    answer = httpx2.post(live.url + "/v1/messages", json=body)
    assert (
        answer.status_code == 503
        and "the server is shutting down or going to sleep" in answer.json()["error"]["message"]
    )


def test_a_shutdown_ends_the_work(live):
    live.engine.embed_seconds = 30.0
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(httpx2.post(live.url + PATH, json={"input": "x"}))
    )
    try:
        client.start()
        end = time.monotonic() + 5
        while not live.frontend.embedding_stops:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert live.frontend.busy
        live.frontend.draining = True
        live.frontend.abandon()
        client.join(5)
        refused(answers[0], 503)
    finally:
        live.engine.embed_seconds, live.frontend.draining = 0.0, False


@pytest.mark.parametrize("scoring", ["logprob", "embedding"])
def test_scores_and_ranks(live, scoring):
    body = {"text_1": "import os", "text_2": ["x", "import os"], "scoring": scoring}
    answer = httpx2.post(f"{live.url}/v1/score", json=body).json()
    scores = [entry["score"] for entry in answer["data"]]
    if scoring == "logprob":  # each token of a scripted prompt has the log-probability −1
        np.testing.assert_allclose(scores, math.exp(-1))
    else:
        assert scores[1] == pytest.approx(1) and scores[0] < 1
    body = {"query": "import os", "documents": ["x", {"text": "import os"}], "scoring": scoring}
    answer = httpx2.post(f"{live.url}/rerank", json=body).json()
    order = [entry["index"] for entry in answer["results"]]
    assert order == ([0, 1] if scoring == "logprob" else [1, 0])
    assert answer["results"][0]["document"]["text"] == ("x", "import os")[order[0]]
    body |= {"top_n": 1, "return_documents": False}
    answer = httpx2.post(f"{live.url}/v2/rerank", json=body).json()
    assert [set(entry) for entry in answer["results"]] == [{"index", "relevance_score"}]
    assert answer["usage"]["total_tokens"] > 0


@pytest.mark.slow
def test_pooled_hidden_states_are_those_of_one_pass(directory, monkeypatch):
    monkeypatch.setattr("entropic_jax.serving.engine.embedding.CPU_BUDGET", 32)
    model = models.load(directory)
    embedder = Embedder(model, 128, refuse)
    texts = [np.random.default_rng(n).integers(2, 250, n).tolist() for n in (3, 32, 71)]

    def in_one_pass(text):
        kv_cache, _ = cache.grant(cache.allocate(model.decoder.shape, 1, 128), jnp.array([128]))
        attend = attend_to(kv_cache, TokenSpan(jnp.zeros(1, jnp.int32), jnp.array([len(text)])))
        positions = jnp.arange(len(text))[None]
        return model.decoder.hidden(model.params, jnp.array([text]), positions, kv_cache.layers, attend)[0][0]

    states = [np.asarray(jax.jit(lambda text=text: in_one_pass(text))()) for text in texts]
    means = embedder.embed(texts, "mean", threading.Event())
    np.testing.assert_allclose(means, [h.mean(0) for h in states], rtol=1e-4, atol=1e-5)
    last = embedder.embed(texts, "last", threading.Event())
    np.testing.assert_allclose(last, [h[-1] for h in states], rtol=1e-4, atol=1e-5)
    stop = threading.Event()
    stop.set()
    assert embedder.embed(texts, "mean", stop) is None


def refuse(function):
    raise AssertionError("without a mesh, launches are made by whoever asks for them")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_openai_client_while_requests_decode():
    openai = pytest.importorskip("openai", reason="the extra `clients` is not installed")
    near, far = "def add(a, b):\n    return a + b\n", "class Garden:\n    '''Flowers.'''\n"
    with real_server() as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        pieces = client.completions.create(
            model="embedded",
            prompt="import ",
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        next(iter(pieces))
        texts = [near, far, "def add(x, y):\n    return x + y\n"]
        answer = client.embeddings.create(model="embedded", input=texts)
        *_, last = pieces
        numbers = np.array([entry.embedding for entry in answer.data])
        np.testing.assert_allclose(np.linalg.norm(numbers, axis=1), 1, rtol=1e-5)
        assert numbers[0] @ numbers[2] > numbers[0] @ numbers[1]
        assert last.usage.completion_tokens == 100
        plain = client.embeddings.create(model="embedded", input=texts, encoding_format="float")
        np.testing.assert_allclose([entry.embedding for entry in plain.data], numbers, rtol=1e-5)
        body = {"query": "import numpy as np", "documents": ["import pandas as pd\nimport numpy", far]}
        ranked = httpx2.post(f"{live.url}/rerank", json=body, timeout=60).json()["results"]
        assert [entry["index"] for entry in ranked] == [0, 1]
        assert 0 < ranked[1]["relevance_score"] < ranked[0]["relevance_score"] <= 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_states_that_are_not_finite_are_an_error(live, monkeypatch, value):
    counts = np.ones((2, 8), np.float32)
    counts[1, 3] = value
    monkeypatch.setattr(live.engine, "embed", lambda texts, *_: Embeddings(counts[-len(texts) :]))
    texts = ["a", "b"]
    for path, body in (
        (PATH, {"input": "a"}),
        (PATH, {"input": texts, "encoding_format": "base64"}),
        ("/score", {"text_1": "a", "text_2": "b", "scoring": "embedding"}),
        ("/rerank", {"query": "a", "documents": ["b"], "scoring": "embedding"}),
    ):
        error = refused(httpx2.post(live.url + path, json=body), 500)
        assert error["message"] == "the model computed hidden states that are not finite"
