"""`entropic completion`: valid scripts that complete; the error without shtab names the extra."""

import subprocess
import sys

import pytest

from entropic_jax.serving.cli import COMMANDS, main
from entropic_jax.serving.commands.completion import SHELLS

COMPLETE = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_shtab_entropic entropic "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}" 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    pytest.importorskip("shtab", reason="the extra `completion` is not installed")
    path = tmp_path_factory.mktemp("completion") / "entropic"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("",), {*COMMANDS}),
        (("ser",), {"serve"}),
        (("serve", "--max-num-s"), {"--max-num-seqs"}),
        (("serve", "--warmup", ""), {"none", "min", "full"}),
        (("generate", "--preset", "mi"), {"micro"}),
        (("completion", ""), {*SHELLS}),
    ],
)
def test_bash_completes_commands_options_and_values(script, words, expected):
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", script, "entropic", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {*done.stdout.split()} == expected


def test_bash_completes_paths(script, tmp_path):
    (tmp_path / "serve.yaml").touch()
    words = ("entropic", "serve", "--config", "ser")
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", script, *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["serve.yaml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(script, shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS) and "max-num-seqs" in text


def test_without_the_package_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as caught:
        main(["completion", "bash"])
    assert caught.value.code == 2
    assert "completion needs shtab, which is not installed; install the extra" in capsys.readouterr().err
