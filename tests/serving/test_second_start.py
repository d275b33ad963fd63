"""Second start: an engine or a command whose programs are on disk compiles none and gives the same tokens."""

import pytest

from entropic_jax import LLM, SamplingParams


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ENTROPIC_PROGRAM_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_an_engine(folder, directory):
    def run():
        with LLM(directory, max_model_len=128, max_num_seqs=1, seed=0, preset="meso") as llm:
            (result,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.7, max_tokens=12, seed=3))
            return result.outputs[0].token_ids, llm._engine.programs.compilations

    (first, compilations), (second, again) = run(), run()
    assert first == second and compilations > 0 and again == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.rglob("*.program"))


@pytest.mark.slow
def test_the_generate_command(folder, directory, entropic):
    command = (
        "generate",
        "--model",
        directory,
        "--prompt",
        "abc",
        "--max-tokens",
        "6",
        "--seed",
        "1",
        "--json",
    )
    first = entropic(*command)
    programs = set(folder.rglob("*.program"))
    times = {file: file.stat().st_mtime_ns for file in programs}
    assert programs and entropic(*command)[:1] == first[:1] == (0,)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.program")} == times
