"""Row shards: devices that sample their own rows give the tokens of one, and exchange little."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .compilation import virtual_devices
from .marks import exhaustive
from .row_shard_programs import ROWS, VOCABULARY

# Meshes, by number of devices, and what runs on them (`tests.row_shard_programs`).
IN_CI, OTHERS = ("drafted", "constrained", "replayed", "scored"), ("shared", "controlled")
BY_ROWS = [(2, "drafted"), (4, "constrained"), *exhaustive((4, "controlled"))]
RUNS = [*BY_ROWS, *exhaustive((2, "shared"))]  # the last has a law that needs the logits of all rows


@cache
def report_of(names: tuple[str, ...]) -> dict[str, Any]:
    """What `tests.row_shard_programs` prints of some cases."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.row_shard_programs", *names],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "XLA_FLAGS": virtual_devices(4)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def report(devices: int, run: str) -> dict[str, Any]:
    """What a case does on so many devices."""
    return report_of(IN_CI if run in IN_CI else OTHERS)[str(devices)][run]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "run"), RUNS)
def test_rows_get_the_tokens_of_one_device(devices, run):
    alone, mesh = report(1, run), report(devices, run)
    for name in ("emitted", "token", "from_draft", "num_drafted"):
        assert mesh[name] == alone[name], name
    for name in ("entropy", "tempered_entropy", "surprisal", "temperature", "entropic_time", "cost"):
        np.testing.assert_allclose(mesh[name], alone[name], atol=5e-3, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(mesh["entropies"], alone["entropies"], atol=2e-2)
    for ours, theirs in zip(mesh["likeliest"], alone["likeliest"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "run"), RUNS)
def test_all_devices_end_with_the_same_state(devices, run):
    assert report(devices, run)["differing"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "run"), BY_ROWS)
def test_logits_go_to_the_devices_of_their_rows_and_to_no_other(devices, run):
    exchanged = report(devices, run)["collectives"]
    operations = Counter(operation for operation, *_ in exchanged)
    emissions = 2 if run == "drafted" else 1  # that of a draft step, and that of a pass
    assert operations["all-to-all"] == emissions and operations["all-gather"] == 2 * emissions
    largest = {name: max(size for kind, _, size in exchanged if kind == name) for name in operations}
    rows = -(-ROWS // devices)
    assert largest["all-to-all"] == rows * VOCABULARY * 4
    assert largest["all-gather"] <= rows * devices * 32 * 4 < ROWS * VOCABULARY * 4


@pytest.mark.exhaustive
def test_laws_that_share_state_have_the_logits_of_all_rows():
    exchanged = report(2, "shared")["collectives"]
    assert [(kind, size) for kind, _, size in exchanged if kind != "all-reduce"] == [
        ("all-gather", ROWS * VOCABULARY * 4)
    ]


@pytest.mark.slow
def test_prompts_are_scored_with_the_whole_vocabulary():
    for ours, theirs in zip(report(2, "scored")["scores"], report(1, "scored")["scores"], strict=True):
        assert np.ptp(theirs) > 1
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_gradients_pass_through_the_exchanges():
    alone, mesh = report(1, "replayed"), report(2, "replayed")
    assert abs(alone["gain"]) > 0.1 and np.abs(alone["kernel"]).max() > 0.1
    np.testing.assert_allclose(mesh["gain"], alone["gain"], rtol=1e-4)
    np.testing.assert_allclose(mesh["kernel"], alone["kernel"], atol=1e-3)


@pytest.mark.slow
def test_the_runs_compare_something():
    assert np.asarray(report(1, "drafted")["from_draft"]).sum() > 20
    constrained = report(1, "constrained")
    tokens, emitted = np.asarray(constrained["token"]), np.asarray(constrained["emitted"])
    assert set(tokens[:, 5][emitted[:, 5]] % 8) <= {0, 1, 2, 3}
    assert (tokens[:, 4] == 11).all() and len(set(tokens[:, 1].tolist())) > 4


@pytest.mark.exhaustive
def test_the_other_runs_compare_something():
    controlled = report(1, "controlled")
    emitted = np.asarray(controlled["emitted"])
    assert np.asarray(controlled["kept_fraction"])[emitted].min() < 0.9
    assert 4 * 10 <= emitted.sum() < 5 * 12
    assert np.ptp(report(1, "shared")["temperature"], 0)[1:].min() > 0.1
