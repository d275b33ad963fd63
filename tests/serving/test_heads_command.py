import json

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--segment", "500"], "--segment must be a power of two; got 500"),
        (
            ["--out", "heads.txt"],
            "--out must be a .png, .svg or .pdf file in an existing directory; got heads.txt",
        ),
        (["--out", "no/where/heads.png"], "in an existing directory; got "),
        (["--tokens", "0"], "--tokens must be an integer between 1 and 2147483647; got 0"),
    ],
)
def test_what_is_wrong_is_said(entropic, arguments, message):
    status, out, errors = entropic("heads", "--text", "x.txt", "--out", "heads.png", *arguments)
    assert (status, out) == (2, "")
    assert message in errors


@pytest.mark.slow
def test_the_embedded_model_is_drawn(entropic, tmp_path):
    pytest.importorskip("matplotlib")
    text, picture = tmp_path / "text.py", tmp_path / "heads.png"
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 200)
    status, out, errors = entropic("heads", "--text", str(text), "--out", str(picture), "--tokens", "1500")
    assert (status, errors) == (0, "")
    assert out.startswith("12 KV heads: ") and picture.read_bytes().startswith(b"\x89PNG")
    status, _, errors = entropic("heads", "--text", str(text), "--out", str(picture), "--tokens", "300")
    assert status == 2 and "tokens must have more than 512 entries" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out, or --calibrate with --table, must name a file to write; got neither"),
        (["b.txt", "--out", "a.png"], "--text must be one file with --out; got 2"),
        (["--table", "needs.json"], "--table needs --calibrate; got needs.json alone"),
        (
            ["--table", "needs.json", "--calibrate", "--out", "a.png"],
            "--out must not be set with --table, which draws nothing; got a.png",
        ),
        (
            ["--table", "needs.json", "--calibrate", "--segment", "8"],
            "--segment must be at least 16 with --table; got 8",
        ),
        (
            ["--table", "no/where/needs.json", "--calibrate"],
            "--table must be a file in a writable directory; got no/where/needs.json (No such file",
        ),
        (["--table", "needs.json", "--calibrate"], "--text must be a readable file; got a.txt"),
    ],
)
def test_what_a_table_of_needs_cannot_be_made_from_is_said(
    entropic, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, out, errors = entropic("heads", "--text", "a.txt", *arguments)
    assert (status, out) == (2, "")
    assert message in errors


@pytest.mark.slow
def test_needs_are_measured_on_the_files_of_a_folder_in_order(entropic, directory, tmp_path):
    (texts := tmp_path / "texts").mkdir()
    (texts / "b.txt").write_text("the second " * 40)
    (texts / "a").mkdir()
    (texts / "a" / "first.txt").write_text("the first file " * 30)
    (texts / ".hidden").write_text("never " * 500)
    (texts / "c.bin").write_bytes(b"\xff\x00" * 500)
    (joined := tmp_path / "joined.txt").write_text("the first file " * 30 + "the second " * 40)
    tables = []
    for text in (texts, texts, joined):
        output = tmp_path / f"needs{len(tables)}.json"
        status, out, errors = entropic(
            *("heads", "--model", directory, "--text", str(text), "--calibrate", "--table", str(output)),
            *("--segment", "32", "--tokens", "300", "--prefill-budget", "32"),
        )
        assert (status, errors) == (0, "") and "needs of" in out and str(output) in out
        tables.append(output.read_bytes())
    assert tables[0] == tables[1] == tables[2]
    tree = json.loads(tables[0])
    assert (tree["tokens"], tree["segment"], tree["budget"]) == (256, 32, 32)
    assert len(tree["need"]) == tree["layers"]
    (empty := tmp_path / "empty").mkdir()
    status, _, errors = entropic(
        *("heads", "--model", directory, "--text", str(empty), "--calibrate"),
        *("--table", str(tmp_path / "none.json")),
    )
    assert status == 2 and f"--text must be a file, or a folder with text in UTF-8; got {empty}" in errors
