"""`entropic ablate` on a model with random weights."""

import io
import json

import pytest

TEXT = "def f(x):\n    return x + 1\n" * 20


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text").write_text(TEXT)
    return str(tmp_path / "text")


@pytest.mark.slow
def test_presets_are_compared(entropic, directory, text):
    arguments = (
        "--model",
        directory,
        "--text",
        text,
        "--contexts",
        "64",
        "--seeds",
        "2",
        "--presets",
        "full-lossy",
    )
    status, out, err = entropic("ablate", *arguments, "--studies", "quality,speed", "--json")
    assert status == 0, err
    results = json.loads(out)
    presets = {study: {r["preset"] for r in rows} for study, rows in results.items()}
    assert presets.pop("quality") == {"off", "meso-lossy"}  # what reads differently under teacher forcing
    assert presets == {"speed": {"off", "full-lossy"}}
    assert {r["seed"] for r in results["quality"]} == {0, 1}

    status, out, err = entropic("ablate", *arguments, "--studies", "quality")
    assert status == 0 and "Quality under teacher forcing" in out and "Free generation" not in out


def test_a_narrow_terminal_gets_several_tables():
    from rich.console import Console

    from entropic_jax.serving.commands.ablate import _tables

    head, line = ["context", "preset", *(f"column {i}" for i in range(6))], ["512", "full", *"123456"]
    for width, number in ((200, 1), (60, 2), (10, 6)):
        console = Console(width=width, file=io.StringIO())
        tables = _tables(("Title", head, [line]), console)
        shown = [[column.header for column in table.columns] for table in tables]
        assert len(tables) == number and [name for names in shown for name in names[2:]] == head[2:]
        assert all(names[:2] == head[:2] for names in shown)
        assert [table.title for table in tables] == ["Title"] + [None] * (number - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--contexts", "4000"), "--contexts must be between 16 and 128 for this model and text; got 4000"),
        (("--contexts", "some"), "must be integers, comma-separated; got some"),
        (("--studies", "sped"), "must be one or more of quality,speed,writing,load; got sped"),
        (("--seeds", "0"), "--seeds must be an integer of at least 1; got 0"),
        (("--text", "nowhere"), "--text must be a readable file; got nowhere (No such file or directory)"),
    ],
)
def test_what_is_wrong_is_said(entropic, directory, text, change, message):
    status, _, err = entropic("ablate", "--model", directory, "--text", text, *change)
    assert status == 2 and message in err and err.count("\n") == 1
