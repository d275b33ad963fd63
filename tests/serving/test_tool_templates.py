"""Chats over HTTP with a model whose chat template for tools has a name."""

import httpx2
import pytest

from entropic_jax.models.chat_templates import DEFAULT
from entropic_jax.serving.http.tools.calling import ToolCalling
from entropic_jax.serving.http.tools.formats import HERMES

from .test_tools import CONVERSATION, HELLO, TOOLS, chat, prompt, tool_server

__all__ = ["tool_server"]

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
WITH_TOOLS = (
    "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{{ '<think>' if add_generation_prompt }}"
)


@pytest.fixture
def named(tool_server):
    """The server, whose model has a template for tools."""
    tokenizer = tool_server.model.tokenizer
    before = {DEFAULT: tokenizer.chat_template, **tokenizer.named_templates}
    tokenizer.set_templates({DEFAULT: PLAIN, "tool_use": WITH_TOOLS})
    tool_server.frontend.tool_calling = calling = ToolCalling(tool_server.model)
    calling.constraint = lambda body: None
    tool_server.engine.tokens = tokenizer.encode("So.", special=False)
    yield tool_server
    tokenizer.set_templates(before)


def test_the_format_is_that_of_the_template_for_tools(named):
    assert named.frontend.tool_calling.form is HERMES


def test_chats_with_tools_have_the_template_for_tools(named):
    (choice,) = chat(named, tools=TOOLS, messages=CONVERSATION)["choices"]
    expected = "[weather][clock]user:Hello\nassistant:<tool_call>Rome\ntool:sunny\n<think>"
    assert prompt(named) == expected
    assert choice["message"]["reasoning_content"] == "So."  # the prompt begins the thought
    body = {"messages": CONVERSATION, "tools": TOOLS, "add_generation_prompt": True}
    tokens = httpx2.post(f"{named.url}/tokenize", json=body).json()["tokens"]
    assert named.model.tokenizer.decode(tokens, skip_special=False) == expected


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}], ids=str)
def test_other_chats_have_the_default(named, body):
    (choice,) = chat(named, **body)["choices"]
    assert prompt(named) == "user:Hello\n"
    assert choice["message"]["content"] == "So."


def test_calls_without_tools_are_text_in_the_default(named):
    chat(named, messages=CONVERSATION)
    assert 'assistant:{"name"' in prompt(named).replace("<tool_call>\n", "") and "Rome" in prompt(named)


def test_tools_among_the_variables_of_the_template_are_checked(named):
    body = {"messages": HELLO, "chat_template_kwargs": {"tools": 5}}
    answer = httpx2.post(f"{named.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "chat_template_kwargs.tools must be a list of mappings; got 5" in answer.text
