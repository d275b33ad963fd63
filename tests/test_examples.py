"""Every example runs as written."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.exhaustive if path.stem == "picture" else (), id=path.stem)
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
def test_example(path, tmp_path, monkeypatch, capsys):
    if "import matplotlib" in path.read_text("utf-8"):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out or list(tmp_path.iterdir())
