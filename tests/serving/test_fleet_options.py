"""Options of `entropic serve` about fleets: what is accepted, and errors before anything is started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entropic_jax.serving.cli import main

ROOT = Path(__file__).resolve().parents[2]


def fails(capsys, *arguments: str) -> str:
    """The line with which a command line is refused."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "2", "--uds", "socket"], "--uds must be absent with --replicas; got socket"),
        (["--replicas", "2", "--lora-dir", "x"], "--lora-dir must be absent with --replicas; got x"),
        (["--replicas", "2", "--profile-dir", "x"], "--profile-dir must be absent with --replicas; got x"),
        (["--replicas", "2", "--files-dir", "x"], "--files-dir must be absent with --replicas; got x"),
        (
            ["--replicas", "2", "--process-id", "1"],
            "--process-id must be absent with --replicas; got 1",
        ),
        (["--replicas", "2", "--distributed"], "--distributed must be absent with --replicas"),
        (
            ["--replicas", "2", "--num-processes", "2", "--enable-sleep-mode"],
            "--enable-sleep-mode must be off with several processes; got on",
        ),
        (["--replicas", "2", "--port", "0"], "--port must be at least 1 with --replicas; got 0"),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas must be at least --replicas, 3; got 2"),
        (["--replica-resources", "[1]"], "--replica-resources must be a JSON object with num_cpus"),
        (["--replica-resources", '{"cpus": 1}'], """got '{"cpus": 1}'"""),
        (["--work-per-replica", "0"], "--work-per-replica"),
        (["--replicas", "2", "--chat-template", "gone.jinja"], "--chat-template"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys, monkeypatch, arguments, said):
    monkeypatch.setitem(sys.modules, "ray", None)  # nothing of it is needed
    assert said in fails(capsys, *arguments)


def test_ray_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "entropic_jax.serving.fleet.launch", raising=False)
    assert "ray is not installed; install the extra: pip install 'entropic_jax[ray]'" in fails(
        capsys, "--replicas", "2"
    )


DESCRIBE = """
import json
from entropic_jax.serving.cli import parsed
from entropic_jax.serving.commands import serve_fleet
from entropic_jax.serving.fleet.deployment import application
arguments = ["--replicas", "2", "--max-replicas", "5", "--work-per-replica", "7"]
arguments += ["--num-processes", "2", "--tensor-parallel-size", "2"]
options = parsed(["serve", *arguments])
bound = application(
    options, serve_fleet.fleet_settings(options), serve_fleet.frontend_of, serve_fleet.follow_process_0
)
deployment = bound._bound_deployment.init_args[0]._bound_deployment
configuration = deployment._deployment_config
scaling = configuration.autoscaling_config
print(json.dumps([
    scaling.min_replicas,
    scaling.max_replicas,
    scaling.policy.get_policy().__name__,
    scaling.policy.policy_kwargs,
    configuration.request_router_config.get_request_router_class().__name__,
    configuration.graceful_shutdown_timeout_s,
    deployment._replica_config.placement_group_bundles,
]))
"""


@pytest.mark.slow
def test_the_application_describes_the_options():
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout.splitlines()[-1])
    assert described == [2, 5, "SecondsOfWork", {"target": 7.0}, "PrefixRouter", 30.0, [{"CPU": 1}] * 2]


@pytest.mark.slow
def test_serve_run_finds_the_application():
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    code = "from entropic_jax.serving.ray_app import app; print(app._bound_deployment.name)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ENTROPIC_SERVE_ARGUMENTS": "--replicas 3"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["ingress"], done.stderr
