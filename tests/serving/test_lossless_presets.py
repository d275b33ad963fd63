"""The presets meso and full are lossless: their tokens are those of off and micro."""

import json
import re
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from entropic_jax import LLM, SamplingParams
from entropic_jax.methods.presets import preset
from entropic_jax.parameter_tables.control_gains import DRAFTS, PRESET_TABLE, PRUNING, SCALES
from entropic_jax.parameter_tables.speculation_names import AUTO, OFF, drafter_of
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving import cli
from entropic_jax.serving.engine.draft_choice import DraftChoice
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.engine.row_controllers import RowControllers
from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.served_model import describe
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.llm.options import read_options
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.options.speculation_options import default_preset
from entropic_jax.serving.request import RequestError
from entropic_jax.speculation import make_speculator
from tests.serving.live import serving
from tests.serving.test_engine import engine_of, engine_request, model, run  # noqa: F401  (fixture)
from tests.serving.test_speculation import NARROW, PLAIN, repetitive, requests, results

ROOT = Path(__file__).resolve().parents[2]
SHORT_DRAFTS = dict(num_speculative_tokens=1)  # which compiles less
LOSSY = "must not be set with the preset full, which has no page selection"


def under(name: str) -> list:
    """Requests that differ in their sampling, all with a preset."""
    return [
        replace(request, control=Control(name))
        for request in requests(24)
        if request.control.preset == "off" and request.request.max_tokens > 1
    ]


@pytest.fixture(scope="module")
def plain(model):  # noqa: F811
    yield from engine_of(model, **PLAIN)


@pytest.fixture(scope="module")
def full(model):  # noqa: F811
    yield from engine_of(model, **{**PLAIN, "scheduling_policy": None}, preset="full", **SHORT_DRAFTS)


@pytest.mark.slow
def test_a_crowd_gets_the_tokens_of_off_and_micro(plain, full, monkeypatch):
    monkeypatch.setattr(DraftChoice, "drafts", lambda *_, **__: True)  # whatever pays on this machine
    expected = results(plain, [*under("off"), *under("micro")])
    assert results(full, [*under("meso"), *under("full")]) == expected
    assert full.snapshot()["num_accepted_tokens"] > 40
    assert plain.snapshot()["num_drafts"] == 0


@pytest.mark.slow
def test_requests_under_off_alone_are_decoded_plainly(plain, full):
    before = full.snapshot()["num_drafts"]
    assert results(full, under("off")[:4]) == results(plain, under("off")[:4])
    assert full.snapshot()["num_drafts"] == before


@pytest.mark.slow
def test_a_request_says_whether_tokens_are_drafted_for_it(plain, full):
    """Rows of one launch: tokens are drafted for some and not for others."""
    undrafted = [replace(r, control=Control("meso", speculate=OFF)) for r in under("off")[:3]]
    drafted = [replace(r, control=Control("off", speculate=AUTO)) for r in under("off")[3:6]]
    together = run(full, *undrafted, *drafted)
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in run(plain, *under("off")[:6])]
    counts = [last.summary["num_drafted"] for _, last in together]
    assert counts[:3] == [0, 0, 0] and sum(counts[3:]) > 0


@pytest.mark.parametrize("drafter", ["suffix", "pruned"])
def test_a_drafter_that_the_engine_does_not_have_is_refused(full, drafter):
    with pytest.raises(RequestError, match=f"speculate must be off or auto in .*; got '{drafter}'") as error:
        full.submit(engine_request("refused", (1, 2), Control("off", speculate=drafter)))
    assert error.value.param == "speculate"


def test_where_drafts_are_refused():
    options = dict(pruning=True, entropic_schedule=False)
    controllers = RowControllers("normalised", None, **options)
    assert not controllers.row_gains(Control("off", speculate=OFF)).drafts
    with pytest.raises(RequestError, match="speculate must be off in this engine; got 'auto'"):
        controllers.row_gains(Control("full", speculate=AUTO))
    drafting = RowControllers("normalised", None, **options, drafter=AUTO)
    with pytest.raises(RequestError, match="off with preset full-lossy, which leaves pages unread"):
        drafting.row_gains(Control("full-lossy", speculate=AUTO))


def test_a_lossless_engine_has_no_page_summaries(full):
    state = full.scheduler.device_state.state
    assert state.page_policy is None and state.page_policy_state == ()
    assert full.sizes.shapes.page_policies == (None,)
    options = EngineOptions(preset="full")
    assert (options.drafter, options.prunes, options.policy) == (AUTO, False, "entropic")
    assert preset("full", 4).page_policy is None
    for name in ("meso", "full"):
        assert EngineOptions(preset=name, pruning=True).prunes
    with pytest.raises(RequestError, match=r"got 'full-lossy' \(no request may leave pages unread"):
        full.submit(engine_request("lossy", (1, 2), Control("full-lossy")))


def test_the_table_decides_what_a_preset_does():
    assert {name for name, scales in SCALES.items() if DRAFTS in scales} == {"meso", "full"}
    for name, scales in SCALES.items():
        chosen = preset(name, 2)
        assert (chosen.page_policy is not None) == (PRUNING in scales)
        assert chosen.speculate == drafter_of(name) == (AUTO if DRAFTS in scales else OFF)
        assert (make_speculator(chosen.speculate, 2) is not None) == (DRAFTS in scales)


def test_without_drafts_the_lossless_presets_are_off_and_micro_with_macro():
    assert preset("meso", 2)._replace(speculate=OFF) == preset("off", 2)
    assert repr(preset("full")._replace(speculate=OFF)) == repr(preset("micro"))


def test_docs_and_dashboard_say_what_the_table_says():
    usage = (ROOT / "docs" / "usage.md").read_text("utf-8")
    script = (ROOT / "serving" / "http" / "dashboard" / "main.js").read_text("utf-8")
    shown = dict(re.findall(r'^  "?([\w-]+)"?: "(.*)",$', script.partition("};")[0], re.MULTILINE))
    for name, line in PRESET_TABLE.items():
        assert f"| `{name}` | {line.help} |" in usage
        if name != "paper":
            assert shown.pop(name).lower() == f"{line.help}.".lower()
    assert shown == {}


@pytest.mark.exhaustive
def test_llm_and_server_give_the_same_tokens(directory):
    prompts = ["def add(a, b):\n    return a + b\n" * 2, "ab" * 20, "x = 1\n" * 6]
    settings = [
        dict(temperature=0.0, logit_bias={9: 4.0}),
        dict(temperature=0.7, seed=3, logit_bias=NARROW, top_p=0.9),
        dict(temperature=1.0, seed=5, logit_bias=NARROW, repetition_penalty=1.1, frequency_penalty=0.2),
    ]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **fields) for fields in settings]
    tokens, accepted = {}, {}
    for name, fields in (("micro", {}), ("full", SHORT_DRAFTS)):
        with LLM(directory, preset=name, max_num_seqs=4, block_size=4, **fields) as llm:
            outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
            tokens[name] = [o.token_ids for o in outputs]
            accepted[name] = sum(sum(o.trace["from_draft"]) for o in outputs)
            if name == "micro":
                continue
            described = describe(llm._engine.model, directory, ("tiny",), llm._engine.context)
            frontend = Frontend(llm._engine, described, Settings(port=0, control=Control("full")))
            with serving(frontend) as live:
                tokens["server"] = [
                    complete(live.url, prompt, fields)
                    for prompt, fields in zip(prompts, settings, strict=True)
                ]
    assert tokens["full"] == tokens["server"] == tokens["micro"]
    assert accepted["full"] > 10 and accepted["micro"] == 0


def complete(url: str, prompt: str, fields: dict) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "entropic": {"trace": True}, **fields}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["entropic"]["trace"]["token_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(preset="meso", method="snapkv"),
            "preset must not draft tokens together with the method snapkv",
        ),
        (dict(preset="full", batch_invariant=True), "preset must not draft tokens together with batch_inv"),
        (
            dict(preset="full-lossy", speculate="suffix"),
            "speculate must be off together with the preset full",
        ),
        (
            dict(preset="meso-lossy", speculate="auto"),
            "speculate must be off together with the preset meso",
        ),
        (dict(preset="meso-lossy", num_speculative_tokens=3), "must not be set with speculate off; got 3"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(options, message):
    with pytest.raises(ParameterError, match=message):
        EngineOptions(**options)
    with pytest.raises(ParameterError, match=message):
        read_options(options["preset"], {k: v for k, v in options.items() if k != "preset"})


def test_every_interface_has_the_same_default_preset():
    """Who states none gets meso, or off where other options exclude drafts; an engine's options have none."""
    plan = ("--model", "m", "--topology", "v5e:1x1")
    for command, required in (("generate", ()), ("chat", ()), ("serve", ()), ("plan", plan)):
        assert cli.parsed([command, *required]).preset is None, command
    assert read_options(None, {})[0].preset == default_preset() == "meso"
    assert read_options(None, {"method": "h2o"})[0].preset == default_preset(method="h2o") == "off"
    assert EngineOptions().preset == Control().preset == "off"


def test_speculate_overrides_the_preset():
    for options in (dict(method="snapkv"), dict(batch_invariant=True), {}):
        assert EngineOptions(preset="meso", speculate="off", **options).drafter == OFF
    assert EngineOptions(preset="meso", speculate="suffix").drafter == "suffix"
    assert EngineOptions(preset="micro", speculate="pruned").drafter == "pruned"
    assert EngineOptions(preset="micro").drafter == EngineOptions().drafter == OFF


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "full", "--dropped-mass-limit", "0.1"), f"--dropped-mass-limit {LOSSY}; got 0.1"),
        (("--preset", "full", "--low-entropy", "0.1"), f"--low-entropy {LOSSY}; got 0.1"),
        (
            ("--preset", "full", "--method", "h2o"),
            "--preset must not draft tokens together with the method h2o",
        ),
        (("--preset", "meso", "--method", "h2o"), "off; got 'meso'"),
    ],
)
def test_command_lines_that_are_refused(entropic, directory, arguments, message):
    status, _, errors = entropic("generate", "--model", directory, "--prompt", "x", *arguments)
    assert status == 2 and message in errors


def test_meso_is_refused_where_nothing_is_drafted(plain):
    with pytest.raises(RequestError, match=r"one of off, .*; got 'meso' \(the engine drafts no tokens"):
        plain.submit(engine_request("meso", (1, 2), Control("meso")))
    assert "meso" not in plain.snapshot()["presets"] and "full" in plain.snapshot()["presets"]


@pytest.mark.slow
def test_full_is_micro_where_nothing_is_drafted(plain):
    pair = [engine_request(name, repetitive(20), Control(name), max_tokens=9) for name in ("full", "micro")]
    (first, _), (second, _) = run(plain, *pair)
    assert first == second


@pytest.mark.exhaustive
def test_generate_command(directory, entropic):
    line = ["generate", "--model", directory, "--prompt", "ab" * 20, "--json", "--max-tokens", "24"]
    line += ["--temperature", "0", "--ignore-eos", "--repetition-penalty", "0.5"]  # which makes it repeat
    trees = {}
    for options in (("meso",), ("meso", "--speculate", "off")):
        status, out, errors = entropic(*line, "--preset", *options)
        assert status == 0, errors
        trees[options] = json.loads(out)
    drafts, plain = trees.values()
    assert drafts["token_ids"] == plain["token_ids"]
    assert drafts["num_drafted"] > 0 == plain["num_drafted"]
