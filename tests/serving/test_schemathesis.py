"""/openapi.json and what the server does agree: schemathesis makes up requests, right and wrong ones."""

import json

import pytest

from entropic_jax.serving.http.settings import Limits, Settings

from .real_server import real_server

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# Whether a text is a grammar, how many tokens it has, what is below what: a schema cannot say that.
BEYOND = ("structured_outputs", "response_format", "lowest", "low ", "prompt has", "prompt asks")


def test_every_path_keeps_its_word():
    schemathesis = pytest.importorskip("schemathesis", reason="the extra `clients` is not installed")
    from schemathesis import config, engine
    from schemathesis.engine.events import NonFatalError, ScenarioFinished

    settings = {"generation": {"max-examples": 5}, "seed": 1, "request-timeout": 120}
    failures, scenarios = [], 0
    few = Settings(port=0, limits=Limits(sequences=4))
    with real_server(few, max_model_len=128) as live:
        made = config.SchemathesisConfig.from_dict(settings)
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json", config=made)
        for event in engine.from_schema(schema).execute():
            assert not isinstance(event, NonFatalError), event
            if isinstance(event, ScenarioFinished):
                scenarios += 1
                failures += list(failures_of(event.recorder))
    assert scenarios > 10
    assert failures == [], json.dumps(failures[:5], indent=1)


def failures_of(recorder):
    """What was sent, what came, and why that is wrong."""
    for case, checks in recorder.checks.items():
        for check in checks:
            if check.failure_info is not None:
                interaction = recorder.interactions.get(case)
                response = interaction and interaction.response
                said = response.content.decode("utf-8", "replace") if response else ""
                if said and response.status_code == 400:
                    message = json.loads(said)["error"]["message"]
                    if message.startswith(BEYOND):
                        continue
                sent = (
                    (interaction.request.body or b"")[:400].decode("utf-8", "replace") if interaction else ""
                )
                yield [recorder.label, str(check.failure_info.failure)[:300], sent, said[:300]]
