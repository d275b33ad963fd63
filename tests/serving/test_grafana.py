"""The Grafana dashboard can be imported and queries only metrics that the server exports."""

import json
import re

import pytest

from tests.serving.dashboard_server import FOLDER
from tests.serving.exported_metrics import METRIC, exported_metrics, unmatched_brackets

DASHBOARD = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def overlaps(first: dict, other: dict) -> bool:
    return (
        first["x"] < other["x"] + other["w"]
        and other["x"] < first["x"] + first["w"]
        and first["y"] < other["y"] + other["h"]
        and other["y"] < first["y"] + first["h"]
    )


def test_panels_are_sound():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert not any(overlaps(a, b) for i, a in enumerate(places) for b in places[:i])
    for panel in panels:
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references)
        assert bool(references) == (panel["type"] != "row")
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    referenced = {name for query in QUERIES for name in re.findall(r"\$\{?(\w+)", query)} - {
        "__rate_interval"
    }
    assert referenced <= variables


@pytest.mark.parametrize("query", QUERIES)
def test_brackets_of_queries_match(query):
    assert not unmatched_brackets(query)


def test_every_metric_exists():
    queried = {name for query in QUERIES for name in METRIC.findall(query)}
    assert len(queried) > 20
    assert queried - exported_metrics() == set()
