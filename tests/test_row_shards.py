"""Row shards: devices that sample their own rows give the tokens of one, and exchange little."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .compilation import virtual_devices
from .row_shard_programs import ROWS, VOCABULARY

# Meshes, by number of devices, and what runs on them (`tests.row_shard_programs`).
RUNS = [(2, "drafted"), (2, "shared"), (4, "constrained"), (4, "controlled")]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What `tests.row_shard_programs` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.row_shard_programs"],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "XLA_FLAGS": virtual_devices(4)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "run"), RUNS)
def test_rows_get_the_tokens_of_one_device(report, devices, run):
    alone, mesh = report["1"][run], report[str(devices)][run]
    for name in ("emitted", "token", "from_draft", "num_drafted"):
        assert mesh[name] == alone[name], name
    for name in ("entropy", "tempered_entropy", "surprisal", "temperature", "entropic_time", "cost"):
        np.testing.assert_allclose(mesh[name], alone[name], atol=5e-3, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(mesh["entropies"], alone["entropies"], atol=2e-2)
    for ours, theirs in zip(mesh["likeliest"], alone["likeliest"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "run"), RUNS)
def test_all_devices_end_with_the_same_state(report, devices, run):
    assert report[str(devices)][run]["differing"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "run"), [x for x in RUNS if x[1] != "shared"])
def test_logits_go_to_the_devices_of_their_rows_and_to_no_other(report, devices, run):
    exchanged = report[str(devices)][run]["collectives"]
    operations = Counter(operation for operation, *_ in exchanged)
    emissions = 2 if run == "drafted" else 1  # that of a draft step, and that of a pass
    assert operations["all-to-all"] == emissions and operations["all-gather"] == 2 * emissions
    largest = {name: max(size for kind, _, size in exchanged if kind == name) for name in operations}
    rows = -(-ROWS // devices)
    assert largest["all-to-all"] == rows * VOCABULARY * 4
    assert largest["all-gather"] <= rows * devices * 32 * 4 < ROWS * VOCABULARY * 4


@pytest.mark.slow
def test_laws_that_share_state_have_the_logits_of_all_rows(report):
    exchanged = report["2"]["shared"]["collectives"]
    assert [(kind, size) for kind, _, size in exchanged if kind != "all-reduce"] == [
        ("all-gather", ROWS * VOCABULARY * 4)
    ]


@pytest.mark.slow
def test_prompts_are_scored_with_the_whole_vocabulary(report):
    for ours, theirs in zip(report["2"]["scored"]["scores"], report["1"]["scored"]["scores"], strict=True):
        assert np.ptp(theirs) > 1
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_gradients_pass_through_the_exchanges(report):
    alone, mesh = report["1"]["replayed"], report["2"]["replayed"]
    assert abs(alone["gain"]) > 0.1 and np.abs(alone["kernel"]).max() > 0.1
    np.testing.assert_allclose(mesh["gain"], alone["gain"], rtol=1e-4)
    np.testing.assert_allclose(mesh["kernel"], alone["kernel"], atol=1e-3)


@pytest.mark.slow
def test_the_runs_compare_something(report):
    alone = report["1"]
    emitted = {run: np.asarray(alone[run]["emitted"]) for run in alone if "emitted" in alone[run]}
    kept = np.asarray(alone["controlled"]["kept_fraction"])[emitted["controlled"]]
    assert kept.min() < 0.9 and 4 * 10 <= emitted["controlled"].sum() < 5 * 12
    assert np.asarray(alone["drafted"]["from_draft"]).sum() > 20
    tokens = np.asarray(alone["constrained"]["token"])
    assert set(tokens[:, 5][emitted["constrained"][:, 5]] % 8) <= {0, 1, 2, 3}
    assert (tokens[:, 4] == 11).all() and len(set(tokens[:, 1].tolist())) > 4
    assert np.ptp(alone["shared"]["temperature"], 0)[1:].min() > 0.1
