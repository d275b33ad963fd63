import io
import os
import sys

import pytest
from rich.color import Color
from rich.console import Console

from entropic_jax.serving.commands.terminal import (
    SCALE,
    Screen,
    legend,
    show,
    tint,
    visible,
)
from entropic_jax.serving.request.transcript import Token


def console(**options):
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=90,
        height=20,
        highlight=False,
        **{"color_system": "truecolor", **options},
    )


def tokens(*pairs, reason="stop"):
    last = len(pairs) - 1
    return [
        Token(i, text, {"entropy": entropy, "entropic_time": 0.5 * i}, reason if i == last else None)
        for i, (text, entropy) in enumerate(pairs)
    ]


def luminance(color):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in color)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colour", [colour for _, colour, _ in SCALE[1:]])
def test_colours_are_readable_on_black_and_on_white(colour):
    light = luminance(Color.parse(colour).get_truecolor())
    assert 1.05 / (light + 0.05) >= 4.5
    assert (light + 0.05) / 0.05 >= 4.5


@pytest.mark.parametrize("system", ["truecolor", "256", "standard"])
def test_every_step_of_the_scale_looks_different(system):
    out = console(color_system=system)
    screen = Screen(out)
    for entropy in (0.0, 0.3, 1.0, 2.0, 3.0, 9.0):
        out.print("x", style=tint(entropy, screen.sixteen), end="")
    drawn = out.file.getvalue().split("x")[:-1]
    assert len(set(drawn)) == len(SCALE)


def test_scale_rises_and_covers_everything():
    limits = [limit for limit, _, _ in SCALE]
    assert limits == sorted(limits)
    assert tint(0.0).color == Color.default()
    assert tint(0.25) != tint(0.2499)
    assert tint(1e9) == tint(float("nan")) == tint(4.0)


def test_text_is_tinted_and_the_figures_stand_below():
    out = console()
    reason = show("def f", tokens(("(", 0.0), ("x", 2.0), (")", 5.0)), out, "seed 1")
    drawn = out.file.getvalue()
    assert reason == "stop"
    assert "38;2;149;112;0mx" in drawn
    assert "38;2;224;0;148m)" in drawn
    final = drawn[drawn.rindex("def f") :]
    assert "3 tokens" in final
    assert "entropy 5.00, mean 2.33 · entropic time 1.0 nats" in final
    assert "seed 1" in final
    assert "entropy in nats" in final


def test_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = console()
    show("", tokens(("x", 2.0)), out)
    drawn = out.file.getvalue()
    assert "38;2" not in drawn
    assert "entropy in nats" not in drawn
    assert "1 tokens" in drawn


def test_the_end_by_limit_is_said():
    out = console()
    assert show("", tokens(("x", 2.0), reason="length"), out) == "length"
    assert "ended at max_tokens" in out.file.getvalue()


def test_finished_lines_are_written_once():
    out = console()
    show("", tokens(*((f"line{i}\n", 1.0) for i in range(30))), out)
    assert out.file.getvalue().count("line7") == 1


def test_a_line_longer_than_the_screen_is_let_go_in_parts():
    screen = Screen(console())
    for _ in range(200):
        screen.write("0123456789")
    assert len(screen.line.plain) <= 90 * 14
    assert screen.console.file.getvalue().count("0123456789" * 9) == (2000 - len(screen.line.plain)) // 90


def test_a_long_prompt_is_shown_by_its_end():
    out = console()
    show("\n".join(f"row{i}" for i in range(20)), tokens(("x", 0.0)), out)
    drawn = out.file.getvalue()
    assert "row11\x1b" not in drawn
    assert "row12" in drawn
    assert "12 lines above" in drawn


def test_control_characters_cannot_steer_the_terminal():
    assert visible("a\x1b[2J\r\n\tb\x7f\x9b") == "a␛[2J␍\n\tb␡␡"
    out = console()
    show("", tokens(("\x1b]0;title\x07[bold]", 0.0)), out)
    assert "␛]0;title␇[bold]" in out.file.getvalue()


def test_legend_names_every_limit():
    assert legend().plain == "entropy in nats  ■ < 0.25 ■ < 0.75 ■ < 1.5 ■ < 2.5 ■ < 4 ■ and above"


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals are POSIX")
@pytest.mark.parametrize(("term", "coloured"), [("xterm-256color", True), ("dumb", False)])
def test_generate_in_a_terminal(script, monkeypatch, term, coloured):
    import pty

    from entropic_jax.serving.cli import main

    script("one", "\n", "two")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    leader, follower = pty.openpty()
    with monkeypatch.context() as patch, os.fdopen(follower, "w") as terminal:
        patch.setattr(sys, "stdout", terminal)
        assert main(["generate", "--prompt", "x"]) == 0
        terminal.write("END")
        terminal.flush()
        written = ""
        while not written.endswith("END"):
            written += os.read(leader, 10_000).decode()
    os.close(leader)
    assert ("tokens/s" in written) == coloured
    assert ("\x1b[" in written) == coloured
    assert "two" in written
