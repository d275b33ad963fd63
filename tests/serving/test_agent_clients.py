"""Unmodified agent frameworks against the real engine and the embedded model.

The embedded model knows no tools: the grammar holds it to valid calls, which the frameworks parse and run.
"""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from entropic_jax.serving.options.model import EMBEDDED

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MISSING = "the extra `clients` is not installed"


class Paint(BaseModel):
    """A thing to paint."""

    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]
    twice: bool


@pytest.fixture
def painted():
    """The calls of the tool `paint`."""
    return []


@pytest.fixture
def paint(painted):
    def paint(colour: Literal["red", "blue"], twice: bool) -> str:
        """Paint the door.

        Args:
            colour: the colour.
            twice: whether to paint it twice.
        """
        painted.append((colour, twice))
        return "painted"

    return paint


def test_pydantic_ai(real):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=MISSING)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.output import NativeOutput
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{real.url}/v1", api_key="none")
    settings = {"max_tokens": 200, "seed": 3, "temperature": 0.8}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("embedded", provider=provider)
        for output in (Paint, NativeOutput(Paint)):  # by a call of a tool, and by a schema
            agent = pydantic_ai.Agent(model, output_type=output, model_settings=settings)
            result = agent.run_sync("Paint the door.")
            assert isinstance(result.output, Paint) and result.usage.output_tokens > 0

    async def streamed() -> str:
        agent = pydantic_ai.Agent(OpenAIChatModel("embedded", provider=provider), model_settings=settings)
        async with agent.run_stream("import json") as stream:
            return "".join([piece async for piece in stream.stream_text(delta=True)])

    assert asyncio.run(streamed())


def test_openai_agents(real, paint, painted):
    agents = pytest.importorskip("agents", reason=MISSING)
    agents.set_tracing_disabled(True)

    async def run(kind) -> str:
        client = agents.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="none")
        agent = agents.Agent(
            name="painter",
            instructions="Use the tool.",
            model=kind(model="embedded", openai_client=client),
            tools=[agents.function_tool(paint)],
            model_settings=agents.ModelSettings(
                tool_choice="required", max_tokens=200, parallel_tool_calls=False
            ),
            tool_use_behavior="stop_on_first_tool",
        )
        result = await agents.Runner.run(agent, "Paint the door.", max_turns=2)
        streamed = agents.Runner.run_streamed(agent, "Paint the door.", max_turns=2)
        events = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in events and streamed.final_output == "painted"
        await client.close()
        return result.final_output

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        assert asyncio.run(run(kind)) == "painted"
    assert len(painted) == 4 and {colour for colour, _ in painted} <= {"red", "blue"}


def test_llama_index(real):
    pytest.importorskip("llama_index.llms.openai_like", reason=MISSING)
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    options = {"model": "embedded", "api_base": f"{real.url}/v1", "api_key": "none", "context_window": 1024}
    options |= {"max_tokens": 100, "additional_kwargs": {"seed": 3}}
    text = OpenAILike(**options)
    said = text.complete("import json").text
    assert said and "".join(piece.delta or "" for piece in text.stream_complete("import json")) == said
    chat = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)
    messages = [ChatMessage(role="user", content="Paint the door.")]
    said = chat.chat(messages).message.content
    assert "".join(piece.delta or "" for piece in chat.stream_chat(messages)) == said

    def paint(colour: Literal["red", "blue"], twice: bool) -> str:
        """Paint the door."""
        return f"{colour} {twice}"

    answer = chat.chat_with_tools(
        [FunctionTool.from_defaults(paint)], chat_history=messages, tool_required=True
    )
    (call,) = chat.get_tool_calls_from_response(answer)
    assert call.tool_name == "paint" and call.tool_kwargs["colour"] in ("red", "blue")
    assert isinstance(chat.as_structured_llm(Paint).complete("Paint the door.").raw, Paint)


def test_instructor(real):
    """In the Python named by `INSTRUCTOR_PYTHON`: it needs an older `rich` than this package."""
    python = os.environ.get("INSTRUCTOR_PYTHON")
    if python is None:
        pytest.skip("INSTRUCTOR_PYTHON does not name a Python with `instructor`")
    script = Path(__file__).with_name("instructor_client.py")
    run = subprocess.run(
        [python, str(script), f"{real.url}/v1"], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answers = json.loads(run.stdout)
    assert set(answers) == {"default", "TOOLS", "JSON_SCHEMA"}
    assert all(Paint.model_validate(answer) for answer in answers.values())


def test_guidellm(real, tmp_path):
    """In the environment of the program that `GUIDELLM` names: it needs older packages than others."""
    program = os.environ.get("GUIDELLM")
    if program is None:
        pytest.skip("GUIDELLM does not name the program of `guidellm`")
    requests, tokens = 6, 8
    report = tmp_path / "report.json"
    command = [
        *(program, "run", "--disable-console", "--output", f"kind=json,path={report}"),
        *("--backend", f"kind=openai_http,target={real.url},model=embedded"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={requests}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={tokens}"),
        *("--tokenizer", f"kind=huggingface_auto,model={EMBEDDED}"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == requests
    assert benchmark["metrics"]["request_totals"]["errored"] == 0
    counts = benchmark["metrics"]["output_token_count"]["successful"]
    assert counts["mean"] == tokens
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
