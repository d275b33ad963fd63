"""Second start: an engine or a command whose programs are on disk compiles none and gives the same tokens."""

import pytest

from entropic_jax import LLM, SamplingParams
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from tests.serving.test_engine import collect, engine_request, model, prompt  # noqa: F401  (fixture)


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


@pytest.mark.exhaustive
def test_requests_run_while_programs_are_loaded_or_compiled(folder, model):  # noqa: F811
    """The first programs consume the state whose shapes the later ones are compiled for."""

    def run_all():
        options = EngineOptions(max_num_seqs=2, max_model_len=128, block_size=4, compile_workers=1)
        engine = LLMEngine(model, options)
        tokens, number = [], 0
        while not engine.warmup.ended.is_set() or number < 3:
            request = engine_request(f"{number}", prompt(5 + number % 3, number), max_tokens=3, seed=number)
            tokens.append(collect(engine.submit(request))[0])
            assert engine.failure() is None
            number += 1
        compilations = engine.programs.compilations
        engine.close()
        return tokens[:3], compilations

    (first, compilations), (second, again) = run_all(), run_all()
    assert first == second and compilations > 5 and again == 0


@pytest.mark.exhaustive
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
