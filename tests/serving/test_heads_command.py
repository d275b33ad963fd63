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
        (["--tokens", "0"], "argument --tokens: must be an integer between 1 and 2147483647; got 0"),
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
