"""One name per module: `entropic_jax.models` and `entropic_jax.serving`, never `models` and `serving`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECOND_NAMES = 'sorted(n for n in sys.modules if n.split(".")[0] in ("models", "serving"))'


def python(*arguments: str, cwd: Path = ROOT, path: str = str(ROOT)) -> str:
    """Standard output of a Python that finds modules in `path` first; the test fails if it does."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture
def decoys(tmp_path) -> Path:
    """A folder with packages named as the folders of the tree, which fail when they are imported."""
    for name in ("models", "serving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the decoy was imported')\n")
    return tmp_path


@pytest.mark.slow
def test_no_file_is_loaded_under_two_names():
    code = f"""if True:
        import collections, importlib, os, pkgutil, sys
        import entropic_jax
        missing = []
        for module in pkgutil.walk_packages(entropic_jax.__path__, "entropic_jax."):
            if not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as error:
                    missing.append(error.name)
        files = [
            os.path.realpath(module.__file__)
            for name, module in sys.modules.items()
            if getattr(module, "__file__", None) and name != "__main__"
        ]
        ours = [file for file in files if file.startswith({str(ROOT)!r} + os.sep)]
        print(len(ours) > 100, [file for file, n in collections.Counter(ours).items() if n > 1])
        print({SECOND_NAMES}, [name for name in missing if name.startswith("entropic_jax")])
    """
    assert python("-W", "ignore", "-c", code) == "True []\n[] []\n"


@pytest.mark.slow
def test_commands_load_no_second_name(decoys):
    code = f"""if True:
        import sys
        from entropic_jax.serving.cli import main
        assert main(["models"]) == 0
        assert main(["generate", "--prompt", "def f(", "--max-tokens", "2", "--preset", "off"]) == 0
        print({SECOND_NAMES})
    """
    assert python("-c", code, cwd=decoys).splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["models", "serving", "models.config", "serving.cli"])
def test_the_folders_at_the_top_name_their_package(name):
    top = name.split(".")[0]
    code = f"""if True:
        import sys
        try:
            import {name}
        except ImportError as error:
            print(error)
        print({SECOND_NAMES})
    """
    assert python("-c", code) == f"{top} is part of entropic_jax: import entropic_jax.{top}\n[]\n"


def test_folders_of_the_same_names_do_no_harm(decoys):
    path = os.pathsep.join([str(decoys), str(ROOT)])
    code = "from entropic_jax import models, serving; print(models.__file__, serving.__file__, sep='\\n')"
    files = [Path(line) for line in python("-c", code, cwd=decoys, path=path).splitlines()]
    assert files == [ROOT / "entropic_jax" / name / "__init__.py" for name in ("models", "serving")]
    command = ("-m", "entropic_jax.serving.server", "--help")
    assert python(*command, cwd=decoys, path=path).startswith("usage: entropic serve")


@pytest.mark.parametrize("module", ["entropic_jax", "entropic_jax.serving.cli"])
def test_the_command_line_runs_as_a_module(module):
    version = python("-m", module, "--version").split()[1]
    assert python("-c", "import entropic_jax; print(entropic_jax.__version__)").split() == [version]


@pytest.mark.parametrize(
    "command",
    [
        ["serving/server.py"],
        ["-m", "entropic_jax.serving.server"],
        ["-c", "import sys; from entropic_jax.serving.cli import main; main(['serve', *sys.argv[1:]])"],
    ],
    ids=["file", "module", "command"],
)
def test_the_server_starts_under_each_of_its_names(command):
    assert python(*command, "--help").startswith("usage: entropic serve")
