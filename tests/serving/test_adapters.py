"""LoRA adapters over HTTP and through `LLM`, over a scripted engine and over a real one."""

import os
import tempfile
import threading
from pathlib import Path

import httpx2
import pytest

from entropic_jax import LLM, LoRARequest, SamplingParams, models
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.cli import parser
from entropic_jax.serving.commands import serve_setup
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.engine.start import start
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.options import lora
from entropic_jax.serving.request import RequestError
from tests.lora_adapters import write_adapter
from tests.shallow_model import shallow_model

from .live import refused
from .real_server import real_server

FOLDER = tempfile.TemporaryDirectory()
SERVER_SETTINGS = {"lora_dir": FOLDER.name}


def post(live, path: str, **fields) -> httpx2.Response:
    return httpx2.post(f"{live.url}{path}", json=fields, timeout=120)


@pytest.fixture
def folder(live):
    """The folder of adapters with the directory `a`, and one outside of it."""
    root = Path(FOLDER.name)
    for directory in (root / "a", root.parent / f"{root.name}-outside"):
        directory.mkdir(exist_ok=True)
        (directory / "adapter_config.json").write_text("{}")
    live.engine.adapters.clear()
    return root


def test_adapters_are_loaded_listed_chosen_and_unloaded(live, folder):
    answer = post(live, "/v1/load_lora_adapter", lora_name="sql", lora_path="a")
    assert answer.text == "Success: LoRA adapter 'sql' was loaded." and answer.status_code == 200
    assert live.engine.adapters == {"sql": str(folder.resolve() / "a")}
    cards = {card["id"]: card for card in httpx2.get(f"{live.url}/v1/models").json()["data"]}
    assert cards["sql"]["parent"] == "embedded" and cards["sql"]["root"].endswith("/a")
    assert cards["embedded"]["parent"] is None
    assert httpx2.get(f"{live.url}/v1/models/sql").json()["id"] == "sql"
    messages = [{"role": "user", "content": "x"}]
    for path, fields in (
        ("/v1/completions", {"prompt": "x", "cache_salt": "s"}),
        ("/v1/chat/completions", {"messages": messages, "cache_salt": "s"}),
        ("/v1/messages", {"messages": messages}),
        ("/v1/responses", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
    ):
        for name, adapter in (("sql", "sql"), ("embedded", None)):
            most = {} if path == "/score" else {"max_output_tokens" if "resp" in path else "max_tokens": 2}
            answer = post(live, path, model=name, **most, **fields)
            assert (answer.status_code, answer.json()["model"]) == (200, name), answer.text
            assert live.engine.engine_requests[-1].adapter == adapter
            assert live.engine.engine_requests[-1].cache_salt == fields.get("cache_salt")
    answer = post(live, "/v1/embeddings", model="sql", input="x")
    message = "model must be one of embedded, default, since adapters have no embeddings; got 'sql'"
    assert refused(answer, 400)["message"] == message
    answer = post(live, "/score", model="sql", text_1="x", text_2="y", scoring="embedding")
    assert refused(answer, 400)["param"] == "model"
    answer = post(live, "/v1/unload_lora_adapter", lora_name="sql", lora_nme="x")
    assert answer.headers["x-warning"] == "unknown field lora_nme: did you mean lora_name?"
    assert answer.text == "Success: LoRA adapter 'sql' was unloaded."
    assert "got 'sql'" in refused(post(live, "/v1/completions", model="sql", prompt="x"), 404)["message"]
    assert refused(post(live, "/v1/unload_lora_adapter", lora_name="sql"), 404)["param"] == "lora_name"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_name": "embedded", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x" * 201, "lora_path": "a"}, "lora_name"),
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "a", "load_inplace": True}, "load_inplace"),
        ({"lora_name": "x", "lora_path": "missing"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "."}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a/adapter_config.json"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a/\0"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "../OUTSIDE"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a/../../OUTSIDE"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "link"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "linked_file"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "loop"}, "lora_path"),
    ],
)
def test_names_and_paths_are_checked(live, folder, fields, param):
    outside = folder.parent / f"{folder.name}-outside"
    (folder / "linked_file").mkdir(exist_ok=True)
    for link, target in (
        ("link", outside),
        ("linked_file/adapter_model.safetensors", outside / "adapter_config.json"),
        ("loop", folder / "loop"),
    ):
        if not (folder / link).is_symlink():
            os.symlink(target, folder / link)
    fields = {name: str(value).replace("OUTSIDE", outside.name) for name, value in fields.items()} | (
        {"load_inplace": True} if "load_inplace" in fields else {}
    )
    assert refused(post(live, "/v1/load_lora_adapter", **fields), 400)["param"] == param
    assert live.engine.adapters == {}


def test_an_adapter_that_is_unloaded_before_the_request_is_submitted_is_not_found(live, folder, monkeypatch):
    post(live, "/v1/load_lora_adapter", lora_name="sql", lora_path="a")

    def submit(engine_request):
        raise RequestError(f"model must name a loaded adapter; got {engine_request.adapter!r}", "model")

    monkeypatch.setattr(live.engine, "submit", submit)
    error = refused(post(live, "/v1/completions", model="sql", prompt="x"), 404)
    assert error["message"] == "model must name a loaded adapter; got 'sql'" and error["param"] == "model"


def test_a_link_inside_the_folder_is_followed(folder, tmp_path):
    os.symlink(folder / "a", folder / "alias")
    assert lora.inside("alias", folder) == lora.inside(str(folder / "a"), folder) == folder.resolve() / "a"
    os.symlink(folder, tmp_path / "root")
    assert lora.inside("a", tmp_path / "root") == folder.resolve() / "a"
    with pytest.raises(ParameterError, match="lora_path must be a directory below the server's --lora-dir"):
        lora.inside(str(tmp_path), folder)


def test_without_a_folder_there_are_no_such_routes(directory):
    with real_server(max_num_seqs=1) as live:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            refused(post(live, path, lora_name="x", lora_path="a"), 404)


def options_of(*arguments: str):
    return parser().parse_args(["serve", *arguments])


def test_options_of_the_command_line(tmp_path):
    options = options_of(
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", "a=x=y"),
        *('{"name": "b", "path": "z", "base_model_name": "c"}', "--lora-dir", str(tmp_path)),
    )
    assert lora.fields(options) == {
        "enable_lora": True,
        "lora_modules": (lora.LoRAModule("a", "x=y"), lora.LoRAModule("b", "z")),
        "max_loras": None,
        "max_lora_rank": 8,
    }
    assert serve_setup.settings_of(options).lora_dir == str(tmp_path)
    with pytest.raises(RequestError, match="--lora-dir needs --enable-lora"):
        serve_setup.settings_of(options_of("--lora-dir", str(tmp_path)))
    with pytest.raises(RequestError, match="--lora-dir must be a directory"):
        serve_setup.settings_of(options_of("--enable-lora", "--lora-dir", str(tmp_path / "missing")))


ENTRIES = ("a", "=x", "a=", "{", "[]", '{"name": "a"}', '{"name": "a", "path": "b", "c": 1}')


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_lora_modules_are_checked(entry, capsys):
    with pytest.raises(SystemExit):
        options_of("--lora-modules", entry)
    assert "--lora-modules must" in capsys.readouterr().err


@pytest.fixture(scope="module")
def embedded_adapters(tmp_path_factory) -> Path:
    """Two adapters of the model of `real_server`."""
    root, model = tmp_path_factory.mktemp("adapters"), models.load(shallow_model(), progress=False)
    for seed, name in enumerate("ab"):
        write_adapter(root / name, model, seed, rank=2, size=0.15)
    return root


def test_adapters_are_checked_before_weights_are_read(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    options = EngineOptions(enable_lora=True, lora_modules=(lora.LoRAModule("a", str(tmp_path / "none")),))
    with pytest.raises(RequestError, match=r"lora_path must be an adapter that can be served: .* must be"):
        start(directory, options)


@pytest.mark.slow
def test_a_server_answers_under_adapters(embedded_adapters):
    root = embedded_adapters
    modules = (lora.LoRAModule("a", str(root / "a")),)
    options = dict(enable_lora=True, lora_modules=modules, max_loras=2, max_lora_rank=4)
    options |= dict(preset="off", max_num_seqs=2)
    text = lambda live, model: post(
        live, "/v1/completions", model=model, prompt="def add(", temperature=0, max_tokens=24
    ).json()["choices"][0]["text"]
    with real_server(Settings(port=0, lora_dir=str(root)), **options) as live:
        base, first = text(live, "embedded"), text(live, "a")
        assert post(live, "/v1/load_lora_adapter", lora_name="b", lora_path="b").status_code == 200
        second = text(live, "b")
        assert len({base, first, second}) == 3
        answers: dict[int, str] = {}
        ask = lambda i: answers.update({i: text(live, ("embedded", "a", "b")[i % 3])})
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[i] for i in range(9)] == [base, first, second] * 3
        message = refused(post(live, "/v1/load_lora_adapter", lora_name="c", lora_path="b"), 400)["message"]
        assert "all 2 (max_loras) are in use" in message
        assert httpx2.get(f"{live.url}/server_info").json()["engine"]["adapters"]["slots_free"] == 0
    with LLM(
        shallow_model(), max_num_seqs=2, max_model_len=256, enable_lora=True, max_loras=1, max_lora_rank=4
    ) as llm:
        sampled = SamplingParams(temperature=1, seed=5, max_tokens=24)
        requests = {name: LoRARequest(name, i, root / name) for i, name in enumerate("ab", 1)}
        written = lambda prompts, adapter: [
            output.outputs[0].text
            for output in llm.generate(prompts, sampled, lora_request=adapter, use_tqdm=False)
        ]
        (base,), (first,), (second,) = (
            written("def add(", adapter) for adapter in (None, requests["a"], requests["b"])
        )
        assert len({base, first, second}) == 3
        # Each time, the adapter of the call before makes room.
        assert written(["def add("] * 2, [None, requests["a"]]) == [base, first]
        assert written(["def add("] * 2, [requests["b"], None]) == [second, base]
        with pytest.raises(ValueError, match=r"must name at most 1 adapters \(max_loras\); got 2"):
            written(["x", "y"], [requests["a"], requests["b"]])
        with pytest.raises(ValueError, match="lora_int_id 2 must stand for b#2"):
            written("x", LoRARequest("other", 2, root / "a"))
        with pytest.raises(ValueError, match="1 of them; got 2"):
            written("x", [requests["a"]] * 2)
        with pytest.raises(TypeError, match="lora_request must be a LoRARequest"):
            written("x", "a")
        with pytest.raises(ValueError, match="must be an adapter that can be served"):
            written("x", LoRARequest("c", 3, root / "missing"))
    with pytest.raises(ValueError, match="lora_int_id must be an integer of at least 1; got 0"):
        LoRARequest("a", 0, root / "a")
