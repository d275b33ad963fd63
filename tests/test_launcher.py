"""`./run`, with a stand-in for the Python of the environment that records its arguments."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests import conftest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
PATIENCE = 300  # seconds; the machine may be busy

# Behaves like pip for `-m pip install`: says what pip says, and leaves the two commands behind.
STAND_IN = """#!/bin/sh
here=$(dirname "$0")
case "$*" in *"pip install"*) ;; *) exit 0 ;; esac
echo "$*" >> "$here/../installs"
echo "Collecting everything"
sleep "${STAND_IN_DELAY:-0}"
test -z "$STAND_IN_NETWORK_FAILS" || { echo "ERROR: no network"; exit 1; }
echo "Installing collected packages: everything"
sleep "${STAND_IN_INSTALL_DELAY:-0}"
test -z "$STAND_IN_DISK_FULL" || { echo "ERROR: No space left on device"; exit 1; }
for name in entropic pytest; do
    printf '#!/bin/sh\\necho "%s in $PWD:" "$@"\\n' "$name" > "$here/$name"
    chmod +x "$here/$name"
done
"""


@pytest.fixture
def project(tmp_path):
    """A copy of the launcher with its two input files, and a fake virtual environment."""
    root = tmp_path / "a project"
    root.mkdir()
    for name in ("run", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, root / name)
    stand_in(root)
    return root


def stand_in(root: Path) -> None:
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "pyvenv.cfg").touch()
    python = root / ".venv" / "bin" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)


def start(root: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    clean = {name: value for name, value in os.environ.items() if name != "ENTROPIC_VENV"}
    return subprocess.Popen(
        [sys.executable, str(root / "run"), *arguments],
        cwd=root.parent,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background with SIGINT ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def run(root: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(root, *arguments, **environment)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def installs(root: Path) -> list[str]:
    file = root / ".venv" / "installs"
    return file.read_text().splitlines() if file.exists() else []


def test_first_run_installs_and_the_second_hands_over_at_once(project):
    status, out, err = run(project, "generate", "--prompt", "a b")
    assert (status, out) == (0, f"entropic in {project.parent}: generate --prompt a b\n")
    assert "installing the locked dependencies" in err
    (command,) = installs(project)
    assert f"--constraint {project}/requirements.lock --editable {project}" in command
    assert run(project, "models") == (0, f"entropic in {project.parent}: models\n", "")
    assert len(installs(project)) == 1


@pytest.mark.parametrize(
    ("stated", "reaches"),
    [
        ({}, ""),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, "PYTHONPYCACHEPREFIX={}/.venv/bytecode"),
        (
            {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/x"},
            "PYTHONDONTWRITEBYTECODE=1\nPYTHONPYCACHEPREFIX=/x",
        ),
    ],
)
def test_bytecode_that_may_not_lie_beside_the_sources_is_kept_in_the_environment(
    project, monkeypatch, stated, reaches
):
    run(project, "generate")
    command = project / ".venv" / "bin" / "entropic"
    command.write_text("#!/bin/sh\nenv | grep -E '^PYTHON(DONTWRITE|PYCACHE)' | sort\n")
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    assert run(project, "generate", **stated)[1].strip() == reaches.format(project)


def test_tests_need_one_more_extra_and_run_in_the_root(project):
    run(project, "generate")
    status, out, _ = run(project, "test", "-k", "x y")
    options = "-n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder"
    assert (status, out) == (0, f"pytest in {project}: {options} -k x y\n")
    assert installs(project)[-1].endswith(f"--editable {project}[dev,serve]")
    run(project, "generate")
    run(project, "test")
    assert len(installs(project)) == 2


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock"])
def test_a_change_of_what_is_declared_installs_again_what_there_was(project, name):
    run(project, "test")
    with open(project / name, "a") as file:
        file.write("\n")
    run(project, "generate")
    assert [line.split("--editable ")[1] for line in installs(project)] == [f"{project}[dev,serve]"] * 2


def test_a_clone_that_moved_is_installed_again(project):
    run(project, "generate")
    moved = project.parent / "moved"
    project.rename(moved)
    run(moved, "generate")
    assert installs(moved)[-1].endswith(f"--editable {moved}")


def test_a_failed_download_says_why_and_the_next_run_continues(project):
    status, out, err = run(project, "generate", STAND_IN_NETWORK_FAILS="1")
    assert (status, out) == (1, "")
    assert "ERROR: no network" in err
    assert "pip failed with status 1" in err
    assert run(project, "generate")[0] == 0
    assert len(installs(project)) == 2


def test_a_broken_installation_is_made_anew(project, monkeypatch):
    assert run(project, "generate", STAND_IN_DISK_FULL="1")[0] == 1
    assert (project / ".venv" / "entropic_jax.unfinished").exists()
    (project / ".venv" / "half a package").mkdir()
    monkeypatch.delenv("ENTROPIC_VENV", raising=False)
    loader = SourceFileLoader("launcher", str(project / "run"))
    launcher = module_from_spec(spec_from_loader("launcher", loader))
    loader.exec_module(launcher)
    monkeypatch.setattr("venv.create", lambda *_, **__: stand_in(project))
    assert not launcher.ready(set())
    launcher.set_up(set())
    assert launcher.ready(set())
    assert not (project / ".venv" / "half a package").exists()
    assert len(installs(project)) == 1


def test_an_interrupt_is_clean(project):
    process = start(project, "generate", STAND_IN_INSTALL_DELAY="1")
    while not (project / ".venv" / "entropic_jax.unfinished").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert "interrupted; the next run continues" in err
    assert "Traceback" not in err
    assert not (project / ".venv" / "entropic_jax.json").exists()


def test_of_two_first_runs_one_waits_for_the_other(project):
    processes = [start(project, "generate", STAND_IN_DELAY="1") for _ in range(2)]
    results = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [out for out, _ in results] == [f"entropic in {project.parent}: generate\n"] * 2
    assert len(installs(project)) == 1
    assert sum("waiting for it" in err for _, err in results) == 1


def test_the_installer_keeps_the_lock_when_only_the_launcher_is_killed(project):
    process = start(project, "generate", STAND_IN_DELAY="1")
    while not installs(project):
        time.sleep(0.02)
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        stream.close()
    _, _, err = run(project, "generate")
    assert "waiting for it" in err


def test_environment_elsewhere(project, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (project / ".venv").rename(elsewhere)
    status, _, _ = run(project, "generate", ENTROPIC_VENV=str(elsewhere))
    assert status == 0
    assert json.loads((elsewhere / "entropic_jax.json").read_text())["extras"] == []
    assert not (project / ".venv").exists()


def test_a_folder_of_someone_else_is_left_alone(project, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    status, _, err = run(project, "generate", ENTROPIC_VENV=str(precious))
    assert status == 1
    assert f"ENTROPIC_VENV must be a new or empty folder or a virtual environment; got {precious}" in err
    assert [path.name for path in precious.iterdir()] == ["file"]


def test_a_checkout_without_symbolic_links_gets_the_remedy(project):
    (project / "entropic_jax").mkdir()
    (project / "entropic_jax" / "models").write_text("../models")
    status, out, err = run(project, "generate")
    assert (status, out) == (1, "")
    assert "entropic_jax/models must be a symbolic link to ../models" in err
    assert "git config core.symlinks true" in err
    assert installs(project) == []


def test_the_grammar_suits_older_pythons():
    import ast

    source = (ROOT / "run").read_text("utf-8")
    ast.parse(source, feature_version=(3, 7))
    before, _, _ = source.partition("\nROOT = ")
    version_check = before[before.index("if sys.version_info") :]
    imports = "import os, shutil, subprocess, sys"
    code = f"{imports}\nsys.version_info = (3, 9)\nshutil.which = lambda name: None\n{version_check}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python must be 3.11 or newer; got" in done.stderr


class CollectedTest:
    """A test with marks, as pytest collects it."""

    path = Path("tests/spare.py")

    def __init__(self, *marks: str) -> None:
        self.marks = marks

    def get_closest_marker(self, name: str) -> str | None:
        """The mark of that name, if it has one."""
        return name if name in self.marks else None


@pytest.mark.parametrize(
    ("marks", "left"),
    [("", 1), ("slow", 2), ("slow or not slow", 2), ("exhaustive or mutation", 3)],
)
def test_exhaustive_cases_of_slow_tests_are_left_to_their_mark(marks, left):
    """Pytest itself then deselects those without a mark that `-m` names."""
    items = [CollectedTest(), CollectedTest("slow"), CollectedTest("slow", "exhaustive")]
    hook = types.SimpleNamespace(pytest_deselected=lambda items: None)
    option = types.SimpleNamespace(markexpr=marks)
    config = types.SimpleNamespace(args=["tests"], option=option, hook=hook)
    expected = items[:left]
    conftest.pytest_collection_modifyitems(config, items)
    assert items == expected
