"""The evaluation report and the model card, from a simulated training folder."""

import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from entropic_jax.models.train import card, corpus, evaluate, history, recall, scoring
from tests.train.model import TINY

LOG = """step,tokens,length,bits_per_byte,gradient_norm,tokens_per_second
1,16384,1024,3.6,1.0,4096
2,32768,1024,3.5,1.0,8192
7,114688,8192,3.4,1.0,2048
8,131072,8192,3.3,1.0,2048
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A work folder with two held-out packages and a made-up training log."""
    folder = tmp_path_factory.mktemp("work")
    long = [("\n".join(texts[i:] + texts[:i]) * 2)[:40_000] for i in range(4)]
    documents = [
        {"package": name, "path": f"{name}/{i}.py", "text": text}
        for name, chosen in (("one", long), ("two", [*texts, "tiny = 'é'\n"]))
        for i, text in enumerate(chosen)
    ]
    (folder / "held_out.json").write_text(json.dumps(documents))
    packages = [
        {"name": n, "version": "1.0", "licence": "MIT", "bytes": 2_500_000, "held_out": held}
        for n, held in (("big|package", False), ("one", True), ("two", True))
    ]
    (folder / "packages.json").write_text(json.dumps(packages))
    (folder / "log.csv").write_text(LOG)
    np.save(folder / "starts.npy", np.arange(3))
    np.save(folder / "training.npy", np.zeros(1_200_000, np.uint16))
    return folder


def test_held_out_files_are_those_of_8_to_64_kilobytes(work: Path, tokenizer: Tokenizer):
    files = evaluate.held_out(work, tokenizer, seed=0)
    assert files
    for file in files:
        size = len(file.text.encode())
        assert 8_000 <= size <= 64_000
        assert file.sizes.sum() == size
        assert (file.tokens[0], file.tokens[-1]) == (0, 1)
    again = evaluate.held_out(work, tokenizer, seed=0)
    assert [f.path for f in again] == [f.path for f in files]


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_compression_counts_every_token_and_what_xz_writes(
    work: Path, tokenizer: Tokenizer, params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scoring, "LENGTHS", (1024,))
    monkeypatch.setattr(scoring, "DEVICE_TOKENS", 1024)
    monkeypatch.setattr(evaluate, "CONTEXTS", (256, 1024))
    scorer = scoring.Scorer(params, TINY)
    file = evaluate.held_out(work, tokenizer, seed=0)[0]
    report = evaluate.compression(scorer, [file], lambda done, total: None)
    parts = [scorer([file.tokens[:1025]])[0].nats]  # then by half the context, until the end of the file
    for start in range(512, len(file.tokens) - 513, 512):
        parts.append(scorer([file.tokens[start : start + 1025]])[0].nats[512:])
    parts = np.concatenate(parts)
    assert len(parts) == len(file.tokens) - 1
    bits = parts.astype(float).sum() / np.log(2)
    assert report["model_bits_per_byte"] == pytest.approx(bits / report["bytes"], rel=1e-5)
    packed = lzma.compress(file.text.encode(), preset=9 | lzma.PRESET_EXTREME)
    assert report["xz_bits_per_byte"] == 8 * len(packed) / report["bytes"]
    if command := shutil.which("xz"):
        (tmp_path / "file").write_text(file.text, "utf-8")
        subprocess.run([command, "-9e", "file"], cwd=tmp_path, check=True)
        assert len(packed) == (tmp_path / "file.xz").stat().st_size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.standard_promotion
def test_evaluation_and_card(
    work: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scoring, "LENGTHS", (256, 1024))
    monkeypatch.setattr(scoring, "DEVICE_TOKENS", 4096)
    monkeypatch.setattr(evaluate, "CONTEXTS", (256, 1024))
    monkeypatch.setattr(evaluate, "CONTINUATION", 8)
    monkeypatch.setattr(recall, "DISTANCES", (128,))
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    command = f"evaluate --model {model} --work {work} --out {model}/evaluation.json"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--files", "3", "--long-files", "2", "--cases", "2"])
    evaluate.main()
    assert "below xz -9e" in capsys.readouterr().out
    report = json.loads((model / "evaluation.json").read_text())
    assert (report["step"], report["tokens"]) == (7, 114688)
    assert report["compression"]["files"] == sum(r["files"] for r in report["compression"]["by_package"]) == 3
    assert [row["context"] for row in report["context"]] == [256, 1024]
    assert len({row["bytes"] for row in report["context"]}) == 1
    assert {len(rows) for rows in report["recall"].values()} == {1}
    assert len(report["samples"]) == 3
    assert (model / "recall.png").stat().st_size > 1000 < (model / "context.png").stat().st_size

    (work / history.RUN).write_text(
        json.dumps({"command": "python -m entropic_jax.models.train --seed 5", "before": []})
    )
    (model / history.FILE).write_text(json.dumps(history.round_history(work, 7)))
    text = card.card(work, model)
    assert "| big\\|package | 1.0 | MIT | 2.5 |" in text
    assert "python -m entropic_jax.models.train --seed 5" in text
    assert f"*Measured {report['date']}, at commit `{report['commit']}`.*" in text
    words = " ".join(text.split())
    stages = history.rounds(model)[0]["stages"]
    assert max(stage["steps"] for stage in stages) <= 7  # what was exported, though the log goes on
    for stage in stages:
        assert f"{stage['steps']} steps on windows of {stage['length']:,} tokens" in words
    assert "3 files and 1.2 million tokens" in text
    for sample in report["samples"]:
        assert sample["prompt"] in text


def test_the_notice_names_every_package_that_was_trained_on(work: Path):
    packages = json.loads((work / "packages.json").read_text())
    text = card.notice(packages)
    assert "big|package 1.0: MIT\n" in text
    assert "one 1.0" not in text
    shipped = (Path(card.__file__).parents[1] / "embedded" / "NOTICE").read_text()
    names = {corpus.project_name(line.split(" ")[0]) for line in shipped.split("\n\n", 1)[1].splitlines()}
    assert names - {"python"} == {corpus.project_name(r) for r in corpus.TRAINING_PACKAGES}
