"""Schemathesis generates requests from /openapi.json, valid and not, and checks the answers against it."""

import json
import re
from types import SimpleNamespace

import pytest

from entropic_jax.serving.http.settings import Limits, Settings

from .real_server import real_server

# What a schema cannot say: that a text is a grammar or a JSON object, how many tokens it has, how two fields
# compare. A valid request may be refused for these reasons, and no other.
BEYOND_SCHEMA = re.compile(
    r"(structured_outputs|response_format)\b"
    r"|tool_choice must (be none|name one of tools)\b"
    r"|tools must (have different names|be a JSON schema|be a grammar)\b"
    r"|messages must have tool_calls whose arguments are JSON objects;"
    r"|(prompt|input|messages) must (have between|have an item|ask for at most|have at most)\b"
    r"|(text_1|text_2|query|documents) must have (between|at most|1 text)\b|documents and query must have\b"
    r"|text_2 and text_1 must have\b"
    r"|previous_response_id must be\b"
    r"|messages must answer every tool_use\b"
    r"|[\w.]+ must be (below|above|at most) \w+ = "
    r"|min_tokens must be at most max_tokens\b"
    r"|[\w.]+ must not be set with the (law|preset) "
    r"|[\w.]+ must be set with lowest_dropped_mass_limit, "
    r"|[\w.]+ needs the preset \w+; "
    r"|(allowed_token_ids|bad_words) must leave a token\b"
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_path_answers_as_its_schema_says():
    schemathesis = pytest.importorskip("schemathesis", reason="the extra `clients` is not installed")
    from schemathesis import config, engine
    from schemathesis.engine.events import NonFatalError, ScenarioFinished

    options = {"generation": {"max-examples": 2}, "seed": 1, "request-timeout": 120}
    failures, scenarios = [], 0
    settings = Settings(port=0, limits=Limits(sequences=4))
    with real_server(settings, max_model_len=128) as live:
        project = config.SchemathesisConfig.from_dict(options)
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json", config=project)
        for event in engine.from_schema(schema).execute():
            assert not isinstance(event, NonFatalError), event
            if isinstance(event, ScenarioFinished):
                scenarios += 1
                failures += list(failures_of(event.recorder))
    assert scenarios > 10
    assert failures == [], json.dumps(failures[:5], indent=1)


def failures_of(recorder):
    """Label, failed check, request body and answer of every failure that the schema could have prevented."""
    for case, checks in recorder.checks.items():
        interaction = recorder.interactions.get(case)
        response = interaction and interaction.response
        answer = response.content.decode("utf-8", "replace") if response else ""
        for check in checks:
            if check.failure_info is None:
                continue
            refused = check.name == "positive_data_acceptance" and response and response.status_code == 400
            if refused and BEYOND_SCHEMA.match(json.loads(answer)["error"]["message"]):
                continue
            body = (interaction.request.body or b"") if interaction else b""
            failure = str(check.failure_info.failure)[:300]
            yield [recorder.label, failure, body[:400].decode("utf-8", "replace"), answer[:300]]


@pytest.mark.parametrize(
    ("check", "status", "message", "fails"),
    [
        ("positive_data_acceptance", 400, "prompt must have between 1 and 127 tokens, …; got 200", False),
        ("positive_data_acceptance", 400, "low_entropy must be below high_entropy = 1; got 2", False),
        ("positive_data_acceptance", 400, "temperature must be a number from 0 to 2; got 1", True),
        ("positive_data_acceptance", 400, "prompt must be a string; got 'a'", True),
        ("positive_data_acceptance", 403, "prompt must have between 1 and 127 tokens, …; got 200", True),
        ("status_code_conformance", 400, "prompt must have between 1 and 127 tokens, …; got 200", True),
    ],
)
def test_only_a_refusal_beyond_the_schema_is_excused(check, status, message, fails):
    content = json.dumps({"error": {"message": message}}).encode()
    response = SimpleNamespace(status_code=status, content=content)
    interaction = SimpleNamespace(response=response, request=SimpleNamespace(body=b"{}"))
    failed = SimpleNamespace(name=check, failure_info=SimpleNamespace(failure="undeclared"))
    passed = SimpleNamespace(name="not_a_server_error", failure_info=None)
    recorder = SimpleNamespace(
        label="POST /v1/completions", checks={"1": [passed, failed]}, interactions={"1": interaction}
    )
    assert [failure[1] for failure in failures_of(recorder)] == ["undeclared"] * fails
