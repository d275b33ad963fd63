"""`LLM`: offline inference through the serving engine, in the order of the prompts."""

import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from entropic_jax import LLM, RequestOutput, SamplingParams
from entropic_jax.serving.cli import main
from entropic_jax.serving.llm.prompts import conversations_of, prompts_of
from entropic_jax.serving.request.transcript import TRACE_FIELDS
from tests.shallow_model import shallow_model

SIZES = dict(max_num_seqs=4, max_model_len=256)
DRAFTS = dict(speculative_config={"method": "auto", "num_speculative_tokens": 3})  # few sizes of passes
PROMPTS = ["def add(a, b):", "import os", "class Stack:", "x = [", "for i in", "print(", "return", "# The"]


@pytest.fixture(scope="module")
def llm():
    with LLM(shallow_model(), preset="off", seed=0, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting():
    with LLM(shallow_model(), seed=0, **SIZES, **DRAFTS) as llm:
        yield llm


@pytest.fixture(scope="module")
def full_lossy():
    with LLM(preset="full-lossy", seed=0, max_num_seqs=1, max_model_len=1024) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.mark.slow
def test_a_batch_larger_than_the_engine_comes_back_in_order(drafting, llm):
    params = [SamplingParams(max_tokens=4 + 3 * i, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    outputs = drafting.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    for output, requested in zip(outputs, params, strict=True):
        (completion,) = output.outputs
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
        assert (len(completion.token_ids), completion.finish_reason) == (requested.max_tokens, "length")
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
        assert completion.error is None and completion.logprobs is None
    alone = [drafting.generate(p, s)[0] for p, s in zip(PROMPTS[:3], params[:3], strict=True)]
    assert texts(alone) == texts(outputs[:3])
    assert texts(llm.generate(PROMPTS, params)) == texts(outputs)
    assert len({output.request_id for output in outputs + alone}) == len(outputs + alone)


def test_prompts_take_every_form(llm):
    greedy = SamplingParams(temperature=0, max_tokens=5)
    ids = llm.get_tokenizer().encode("import os")
    forms = ["import os", ids, np.array(ids), {"prompt": "import os"}, {"prompt_token_ids": tuple(ids)}]
    outputs = llm.generate(forms, greedy)
    assert len(set(texts(outputs))) == 1
    assert [output.prompt for output in outputs] == ["import os", None, None, "import os", None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert texts(llm.generate(ids, greedy)) == texts(llm.generate({"prompt": "import os"}, greedy))
    assert llm.generate([]) == []
    assert prompts_of("x") == ["x"] and prompts_of(("x", "y")) == ["x", "y"]
    assert list(conversations_of([{"role": "user", "content": "x"}])) == ["messages"]


@pytest.mark.slow
def test_the_engine_says_what_it_has_done(llm):
    before = llm.snapshot()
    llm.generate("import os", SamplingParams(temperature=0, max_tokens=5))
    after = llm.snapshot()
    assert after["work_done"] + after["work_left"] > before["work_done"] + before["work_left"]
    assert {"preemptions", "num_draft_tokens", "num_accepted_tokens", "rows"} <= after.keys()
    for _ in range(600):
        if llm.ready():
            break
        time.sleep(0.1)
    assert llm.ready()


@pytest.mark.slow
def test_the_tokens_are_those_of_the_command_line(llm, capsys):
    flags = ["--max-tokens", "24", "--temperature", "0.7", "--top-p", "0.9", "--seed", "5", "--json"]
    assert main(["generate", "--model", str(shallow_model()), "--prompt", PROMPTS[0], *flags]) == 0
    expected = json.loads(capsys.readouterr().out)
    defaults = llm.get_default_sampling_params()  # which the command line takes, too
    params = dataclasses.replace(defaults, max_tokens=24, temperature=0.7, top_p=0.9, seed=5)
    (output,) = llm.generate(PROMPTS[0], params)
    (completion,) = output.outputs
    assert completion.token_ids == expected["token_ids"]
    assert (completion.text, completion.finish_reason) == (expected["text"], expected["finish_reason"])
    np.testing.assert_allclose(completion.trace["entropy"], expected["trace"]["entropy"], atol=1e-3)


@pytest.mark.slow
def test_a_seed_of_the_object_repeats_what_it_draws():
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(shallow_model(), preset="off", seed=7, max_num_seqs=1, max_model_len=256) as llm:
            first, second = llm.generate(["import"] * 2, params)
            (later,) = llm.generate("import", params)
            runs.append([x.outputs[0].token_ids for x in (first, second, later)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


@pytest.mark.slow
def test_n_continuations_draw_with_seeds_of_their_own(llm):
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, n=3)
    first, second = llm.generate(["import", "def"], params)
    for output in (first, second):
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for k, completion in enumerate(second.outputs):
        (alone,) = llm.generate("def", dataclasses.replace(params, n=1, seed=3 + k))
        assert alone.outputs[0].token_ids == completion.token_ids


def test_stop(llm):
    text = texts(llm.generate("import os", SamplingParams(temperature=0, max_tokens=16)))[0]
    stop = text[4:6]
    params = SamplingParams(temperature=0, max_tokens=16, stop=stop)
    (completion,) = llm.generate("import os", params)[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: text.index(stop)]
    token = llm.generate("import os", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[token])
    (completion,) = llm.generate("import os", params)[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", token)


def test_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    (completion,) = llm.generate("import os", params)[0].outputs
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    for token, line in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(line) == 3 and sorted(x.rank for x in line.values()) == [1, 2, 3]
        assert line[token].rank == 1  # greedy
        assert line[token].logprob == max(x.logprob for x in line.values()) < 0
        assert line[token].decoded_token == llm.get_tokenizer().decode([token], skip_special=False)
    total = sum(line[t].logprob for t, line in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == total
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=0, ignore_eos=True)
    (completion,) = llm.generate("import os", params)[0].outputs
    assert [list(line) for line in completion.logprobs or ()] == [[t] for t in completion.token_ids]
    assert {x.rank for line in completion.logprobs or () for x in line.values()} == {None}


def test_logprobs_of_the_prompt(llm):
    """They are those that the model gives the same tokens where it generates them."""
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, n=2)
    (written,) = llm.generate("import os", greedy)
    assert written.prompt_logprobs is None
    ids = written.prompt_token_ids + written.outputs[0].token_ids
    (read,) = llm.generate(ids, dataclasses.replace(greedy, prompt_logprobs=2, logprobs=None))
    assert read.prompt_logprobs is not None and read.prompt_logprobs[0] is None
    assert len(read.prompt_logprobs) == len(ids) and all(read.prompt_logprobs[1:])
    for token, scored in zip(ids[1:], read.prompt_logprobs[1:], strict=True):
        assert scored is not None and token in scored
    generated = read.prompt_logprobs[len(written.prompt_token_ids) :]
    for line, scored in zip(written.outputs[0].logprobs or (), generated, strict=True):
        assert scored is not None and list(scored) == list(line)
        assert [x.rank for x in scored.values()] == [x.rank for x in line.values()] == [1, 2]
        np.testing.assert_allclose(
            [x.logprob for x in scored.values()], [x.logprob for x in line.values()], atol=1e-4
        )


def test_trace_and_summary(llm):
    (completion,) = llm.generate("import os", SamplingParams(max_tokens=6, seed=0, ignore_eos=True))[
        0
    ].outputs
    assert tuple(completion.trace) == TRACE_FIELDS
    assert all(len(values) == 6 for values in completion.trace.values())
    assert completion.trace["temperature"] == [1.0] * 6
    assert completion.summary["mean_entropy"] == pytest.approx(np.mean(completion.trace["entropy"]), rel=1e-4)
    assert completion.summary["entropic_time"] == pytest.approx(completion.trace["entropic_time"][-1])


@pytest.mark.slow
def test_preset_full_lossy_controls_temperature_and_reads(full_lossy, llm):
    params = SamplingParams(max_tokens=24, seed=2, temperature=1.0, ignore_eos=True)
    (plain,) = llm.generate("import json\n\n", params)[0].outputs
    assert plain.trace["temperature"] == [1.0] * 24 and plain.trace["kept_fraction"] == [1.0] * 24
    prompt = "def value(key):\n    return table[key]\n\n\n" * 60
    (controlled,) = full_lossy.generate(prompt, params)[0].outputs
    assert set(controlled.trace["temperature"]) != {1.0}
    (cooler,) = full_lossy.generate(prompt, dataclasses.replace(params, temperature=0.6))[0].outputs
    assert max(controlled.trace["temperature"]) <= 1 and max(cooler.trace["temperature"]) <= np.float32(0.6)
    assert min(controlled.trace["kept_fraction"]) < 1.0
    again = full_lossy.generate(prompt, params)[0].outputs[0]
    assert again.token_ids == controlled.token_ids


@pytest.mark.slow
def test_default_sampling_parameters_are_the_models(llm):
    stated = llm._engine.model.generation
    assert llm.get_default_sampling_params().top_p == stated.get("top_p", 1.0)
    (output,) = llm.generate("import os")
    assert output.outputs[0].token_ids


def test_chat_without_a_template_is_the_plain_one_of_the_server(llm, served):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    greedy = SamplingParams(temperature=0, max_tokens=2)
    (output,) = llm.chat(messages, greedy)
    assert output.prompt == served.chat(messages, add_generation_prompt=True)
    assert output.prompt.endswith("### User\nhi\n\n### Assistant\nWell,\n\n### Assistant\n")
    (output,) = llm.chat(messages, greedy, continue_final_message=True)
    assert output.prompt == served.chat(messages, continue_last=True)
    assert output.prompt.endswith("### Assistant\nWell,")


def test_chat_goes_through_the_template(llm, monkeypatch):
    template = (
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}T{% endif %}"
    )
    template += "{% if add_generation_prompt %}# {{ name or 'assistant' }}:{% endif %}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)
    greedy = SamplingParams(temperature=0, max_tokens=4)
    message = {"role": "user", "content": "add"}
    (output,) = llm.chat([message], greedy)
    assert output.prompt == "# user: add\n# assistant:"
    assert output.outputs[0].text == texts(llm.generate(output.prompt_token_ids, greedy))[0]
    outputs = llm.chat(
        [[message], [message, message]],
        greedy,
        add_generation_prompt=False,
        tools=[{"name": "f"}],
        chat_template_kwargs={"name": "bot"},
    )
    assert [x.prompt for x in outputs] == ["# user: add\nT", "# user: add\n# user: add\nT"]
    with pytest.raises(ValueError, match=r"messages\[1\]\[0\] must be a mapping with role and content"):
        llm.chat([[message], [{"content": "add"}]], greedy)
    with pytest.raises(ValueError, match="chat_template_kwargs must not have the key self"):
        llm.chat([message], greedy, chat_template_kwargs={"self": 1})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["x", ""], None),
        (["x", []], r"prompts\[1\]: prompt must have between 1 and 255 tokens.*; got 0"),
        (["x", [1, -1]], r"prompts\[1\]: a prompt must be a string or a list of token ids; got \[1, -1\]"),
        (["x", 5], r"prompts\[1\]: a prompt must be a string or a list of token ids; got 5"),
        ([{"prompt": "x", "data": {}}], r"prompts\[0\]: the keys must be .* got \['prompt', 'data'\]"),
        ([{"text": "x"}], r"prompts\[0\]: the keys must be prompt or prompt_token_ids; got \['text'\]"),
        ([[10**6]], r"prompts\[0\]: prompt must hold token ids between 0 and .*; got 1000000"),
        ([[1] * 256], r"prompts\[0\]: prompt must have between 1 and 255 tokens.*; got 256"),
        (7, "prompts must be a string, a list of token ids, a mapping with prompt .*; got 7"),
        (b"abc", "prompts must be a string, a list of token ids, .*; got b'abc'"),
        (["x", b"abc"], r"prompts\[1\]: a prompt must be a string or a list of token ids; got b'abc'"),
    ],
)
def test_prompts_that_are_refused(llm, prompts, message):
    if message is None:  # the tokenizer puts a token before a text
        assert len(llm.generate(prompts, SamplingParams(max_tokens=1))) == 2
        return
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, SamplingParams(max_tokens=1))


def test_sampling_parameters_that_are_refused(llm):
    with pytest.raises(ValueError, match="sampling_params must be one, or 2, one per prompt; got 1"):
        llm.generate(["x", "y"], [SamplingParams()])
    accepted = "sampling_params must be SamplingParams or a list of them"
    for params, got in (({"max_tokens": 3}, "dict"), (5, "int"), ([{"temperature": 1}], "a list with dict")):
        with pytest.raises(TypeError, match=f"{accepted}; got {got}"):
            llm.generate(["x"], params)
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(temperature=-1)


def test_a_shut_down_object_says_so():
    llm = LLM(seed=0, **SIZES)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("x")


def test_an_interrupt_leaves_the_engine_usable(llm, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SamplingParams(max_tokens=200))
    params = SamplingParams(temperature=0, max_tokens=5)
    assert texts(llm.generate(PROMPTS[:2], params)) == [
        texts(llm.generate(prompt, params))[0] for prompt in PROMPTS[:2]
    ]


def test_a_failed_engine_is_reported(monkeypatch):
    with LLM(shallow_model(), seed=0, **SIZES) as llm:

        def fail():
            raise ZeroDivisionError("on purpose")

        monkeypatch.setattr(llm._engine.scheduler, "step", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            llm.generate("x", SamplingParams(max_tokens=2))


def test_no_package_of_the_server_is_imported():
    code = """if True:
        import sys
        for name in ("fastapi", "uvicorn", "pydantic", "starlette", "llguidance", "prometheus_client"):
            sys.modules[name] = None  # importing it raises ImportError
        from entropic_jax import LLM, SamplingParams
        import entropic_jax.serving.engine.engine
        print(LLM.__name__)
    """
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "LLM\n", process.stderr


def test_allowed_tokens_and_bad_words(llm):
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = llm.generate("import ", greedy)[0].outputs[0]
    tokens = sorted({*plain.token_ids[2:], 300, 301})
    (output,) = llm.generate("import ", dataclasses.replace(greedy, allowed_token_ids=tokens))
    assert set(output.outputs[0].token_ids) <= set(tokens) and len(output.outputs[0].token_ids) == 6
    word = llm.get_tokenizer().decode(plain.token_ids[1:2], skip_special=False)
    (output,) = llm.generate("import ", dataclasses.replace(greedy, bad_words=[word]))
    assert output.outputs[0].token_ids[0] == plain.token_ids[0]
    assert plain.token_ids[1] not in output.outputs[0].token_ids
