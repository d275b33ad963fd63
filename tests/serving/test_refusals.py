"""Refusals that name the caller's argument: options that nothing would read, and values of another kind."""

import re
from types import SimpleNamespace

import pytest

from entropic_jax import LLM, SamplingParams
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.http.protocol.chat import Message
from entropic_jax.serving.llm.lora_request import LoRARequest
from entropic_jax.serving.llm.prompts import at, conversations_of, tokenize, tokenize_conversation
from entropic_jax.serving.request import Request, RequestError, chat_template
from tests.shallow_model import shallow_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(budgets=(("budget", 100),)),
            "must not have the key cache_budget with the method dense; got 100",
        ),
        (
            dict(method="snapkv", budgets=(("base", 100),)),
            "not have the key prefill_budget with the method snapkv",
        ),
        (
            dict(method="snapkv", prefill_options=(("segment", 64),)),
            "prefill_options: segment must not be set with the method snapkv, which does not have it",
        ),
        (dict(method="budgeted-prefill"), "prefill_options: table must be set with the method budgeted-pre"),
        (dict(prefill_options=64), "prefill_options must be a mapping with keys among segment, dense_below"),
        (dict(preset="entropix", branches=65), "branches must be an integer between 1 and 64; got 65"),
        (dict(preset="entropix", clarification="\ud800"), "clarification must be Unicode; got '.ud800'"),
        (
            dict(method="snapkv", budgets=(("budget", 10**30),)),
            "budgets must map cache_budget to an integer of at most 2147483647; got 10000",
        ),
        (dict(max_loras=2), "max_loras must be None unless enable_lora is on; got 2"),
    ],
)
def test_engine_options(options, message):
    with pytest.raises(ParameterError, match=message):
        EngineOptions(**options)
    assert EngineOptions(method="snapkv", budgets=(("budget", 100),)).budgets == (("budget", 100),)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cache-budget 100", "--cache-budget must not be set with the method dense, which has none"),
        ("--method snapkv --prefill-budget 100", "--prefill-budget must not be set with the method snapkv"),
        ("--logit-bias 1=1 --logit-bias 1=2", "--logit-bias must state each token once; got 1 twice"),
        (
            "--preset micro --temperature 0.7 --lowest-temperature 5 --highest-temperature 0",
            "--lowest-temperature must be at most --temperature = 0.7 while --highest-temperature is 0",
        ),
        ("--kv-cache-dtype fp8", "error: --kv-cache-dtype must be auto, bfloat16 or int8_per_token_head"),
        (
            "--max-tokens 3 --tensor-parallel-size 3",
            "error: --tensor-parallel-size must be 1, the number of devices",
        ),
        ("--stop-token-ids \u0663", "must be a token id; got \u0663"),
        ("--seed abc", "must be an integer between -9223372036854775808 and 9223372036854775807; got abc"),
        (
            "--method snapkv --cache-budget 99999999999999999999999",
            "--cache-budget must be an integer of at most 2147483647; got 99999",
        ),
    ],
)
def test_the_generate_command(entropic, directory, flags, message):
    status, _, err = entropic("generate", "--model", directory, "--prompt", "x", *flags.split())
    assert status != 0 and message in " ".join(err.split())


@pytest.mark.parametrize("value", [b"ab", "", "12"])
def test_texts_are_no_token_ids(value):
    with pytest.raises(ParameterError, match="allowed_token_ids must be a list of up to"):
        SamplingParams(allowed_token_ids=value)


def test_an_empty_list_of_allowed_tokens_is_not_a_choice_of_all():
    assert SamplingParams(allowed_token_ids=None).replace(seed=1).allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=[3]).replace(seed=1).allowed_token_ids == (3,)
    assert Request.of("x", SamplingParams()).allowed_token_ids is None
    for empty in ([], ()):
        with pytest.raises(ParameterError, match="token ids, at least one, or null; got") as error:
            SamplingParams(allowed_token_ids=empty)
        assert error.value.param == "allowed_token_ids"
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == ()


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_ranges_without_a_length(name):
    with pytest.raises(ParameterError, match=rf"^{name} must be a .*; got range\(0, 10{{30}}\)"):
        SamplingParams(**{name: range(10**30)})


LONE = "x\ud800"


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_lone_surrogates_in_parameters(name):
    with pytest.raises(ParameterError, match=f"^{name} must be Unicode; got ") as error:
        SamplingParams(**{name: [LONE]})
    assert error.value.param == name and str(error.value).isascii()


def test_lone_surrogates_in_prompts(entropic, directory):
    for refused in (
        lambda: Request(prompt=LONE),
        lambda: at("prompts[1]", lambda item: tokenize(item, None), LONE),
        lambda: at(
            "messages", lambda item: tokenize_conversation(item, Echo()), [dict(role="user", content=LONE)]
        ),
    ):
        places = r"^(prompts\[1\]: a prompt|prompt|messages: messages\[0\]\.content) must be Unicode; got"
        with pytest.raises(RequestError, match=places):
            refused()
    status, _, err = entropic("generate", "--model", directory, "--prompt", LONE, "--max-tokens", "2")
    assert status != 0 and "--prompt must be Unicode" in err


class Echo:
    """A tokenizer whose template is the text of the messages."""

    def chat(self, messages, **_):
        return "".join(message["content"] for message in messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model=""), "model must be the path of a directory, or None; got ''"),
        (dict(model="\ud800"), r"model must be a directory with config.json and .*; got '.ud800'"),
        (dict(mesh="x"), "mesh must be a jax.sharding.Mesh or None; got 'x'"),
        (dict(speculative_config={"method": ["ngram"]}), r"speculative_config must .*; got \['ngram'\]"),
    ],
)
def test_options_of_llm(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LLM(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1, "x"), "lora_name must be a string that is not empty; got ''"),
        (("a", 1, None), "lora_path must be a string that is not empty or a Path; got None"),
    ],
)
def test_adapters_of_llm(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LoRARequest(*arguments)


@pytest.mark.slow  # compiles an engine
def test_parameters_for_each_prompt():
    with LLM(shallow_model(), preset="off", max_num_seqs=1, max_model_len=64, warmup="none") as llm:
        for params in ([None], [SamplingParams(), None]):
            with pytest.raises(
                TypeError, match=r"sampling_params must be SamplingParams .* a list with NoneType"
            ):
                llm.generate(["a"] * len(params), params)
        longest = SamplingParams(min_tokens=2**31 - 1, max_tokens=2**31 - 1, temperature=0.0)
        (output,) = llm.generate("a", longest)  # fills its row, whatever the numbers are
        assert len(output.outputs[0].token_ids) > 50 and output.outputs[0].finish_reason == "length"


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("arguments", "param", "message"),
    [
        (
            dict(variables={"self": 1}),
            "chat_template_kwargs",
            "chat_template_kwargs must not have the key",
        ),
        (dict(variables=3), "chat_template_kwargs", "chat_template_kwargs must be a mapping of names; got 3"),
        (dict(tools=3), "tools", "tools must be a list of mappings; got 3"),
        (dict(variables={1: 1}), "chat_template_kwargs", "chat_template_kwargs must be a mapping of names"),
        (
            dict(variables={"tools": 5}),
            "chat_template_kwargs.tools",
            r"chat_template_kwargs\.tools must be a list of mappings; got 5",
        ),
        (
            dict(add_generation_prompt="x"),
            "add_generation_prompt",
            "add_generation_prompt must be true or false; got 'x'",
        ),
        (
            dict(continue_last="yes"),
            "continue_final_message",
            "continue_final_message must be true or false; got 'yes'",
        ),
    ],
)
def test_conversations(arguments, param, message):
    check = lambda item: tokenize_conversation(item, None, **arguments)
    with pytest.raises(RequestError, match=f"^{message}") as error:
        at("messages[2]", check, MESSAGES)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([MESSAGES, [{"content": "x"}]], "messages[1][0] must be a mapping with role and content; got"),
        ([[]], "messages[0] must have at least one message; got []"),
        ([{"role": 1, "content": "x"}], "messages[0].role must be a string; got 1"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "messages[0].content[0] must be {'type': 'text', 'text': …}; got {'type': 'image_url'",
        ),
        ([*MESSAGES, {"content": "hi"}], "messages[1] must be a mapping with role and content; got"),
        ([{"role": "user"}], "messages[0] must be a mapping with role and content; got {'role': 'user'}"),
        ([{"role": "assistant"}], "messages[0] must be a mapping with role and content; got"),
        ([{"role": "user", "tool_calls": []}], "messages[0] must be a mapping with role and content; got"),
        ([*MESSAGES, "hi"], "messages[1] must be a mapping with role and content; got 'hi'"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list of parts; got 5"),
        ([MESSAGES, 7], "messages[1] must be a list of messages; got 7"),
    ],
)
def test_the_message_at_fault_is_named(messages, message):
    with pytest.raises(RequestError, match=f"^{re.escape(message)}") as error:
        conversations_of(messages)
    assert error.value.param == message.split(" must")[0]


def test_the_content_of_messages_is_one_text_wherever_they_come_from():
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world"}]
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    seen = []
    tokenizer = SimpleNamespace(chat=lambda messages, **_: seen.append(messages) or "")
    chat_template.render(tokenizer, messages)
    ((user, assistant),) = seen
    assert user == {"role": "user", "content": "Hello, world"} and assistant["content"] == ""
    assert assistant["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert [Message.model_validate(m).for_template() for m in messages] == [user, assistant]
    del messages[1]["content"]
    assert chat_template.template_message(messages[1], "messages[1]") == assistant
    assert Message.model_validate({"role": "user"}).for_template() == {"role": "user", "content": ""}


def test_a_text_is_no_list_of_token_ids():
    with pytest.raises(
        RequestError, match=r"^prompts\[0\]: prompt_token_ids must be a list of token ids; got 'ab'"
    ):
        at("prompts[0]", lambda item: tokenize(item, None), {"prompt_token_ids": "ab"})


def test_a_lowest_temperature_above_that_of_the_prompt():
    with LLM(preset="micro", lowest_temperature=5, max_num_seqs=1, max_model_len=64) as llm:
        for temperature in (0.7, 4.9):
            with pytest.raises(ValueError, match=r"^lowest_temperature must be at most .* got 5"):
                llm.generate("x", SamplingParams(temperature=temperature))
