"""`entropic plan`: what it prints, and what it refuses in one line."""

import json
import operator
import re
import signal
import subprocess

import pytest

from entropic_jax.analysis import ahead_of_time, compile_process
from entropic_jax.methods import presets
from entropic_jax.serving.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_a_plan_from_shapes(model, capsys):
    arguments = ["plan", "--model", model, "--topology", "v5e:2x2", "--no-compile", "--max-model-len", "1024"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["source"] == "shapes" and plan["not_compiled"] == "--no-compile"
    assert plan["devices"] == 4 and plan["sequences"] > 32
    assert plan["collectives"]["all-reduce"]["count"] == 5
    assert plan["roofline"]["total"] == pytest.approx(
        sum(plan["roofline"][name] for name in ("weights", "kv_cache", "collectives"))
    )
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "numbers from: shapes (--no-compile)" in lines
    assert any("sequences of 1024 positions fit" in line for line in lines)


@pytest.mark.parametrize(("topology", "preset"), [("v5e:1x1", "meso"), ("v5e:2x2", "off")])
def test_a_plan_is_for_the_preset_that_a_server_has_by_default(model, capsys, monkeypatch, topology, preset):
    chosen, original = [], presets.preset
    record = lambda name, *rest, **named: chosen.append(name) or original(name, *rest, **named)
    monkeypatch.setattr(presets, "preset", record)
    main(["plan", "--model", model, "--topology", topology, "--no-compile", "--max-model-len", "1024"])
    assert chosen == [preset] and "at most" in capsys.readouterr().out


def test_a_compiler_that_crashes_leaves_the_plan_from_shapes(model, capsys, monkeypatch):
    crash = subprocess.CompletedProcess([], -signal.SIGSEGV, "", "")
    monkeypatch.setattr(ahead_of_time, "devices_of", lambda name: [])
    monkeypatch.setattr(compile_process.subprocess, "run", lambda *command, **options: crash)
    assert main(["plan", "--model", model, "--topology", "v5e:2x2", "--max-model-len", "1024"]) == 0
    assert "numbers from: shapes (the compiler ended with SIGSEGV)" in capsys.readouterr().out


def test_a_slice_that_is_too_small_is_not_proposed(tmp_path, capsys):
    config = {**CONFIG, "num_hidden_layers": 20, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", "--model", str(tmp_path), "--topology", "v5e:2x4", "--no-compile"]
    arguments += ["--max-num-seqs", "300", "--max-model-len", "40960", "--decode-context-parallel-size", "1"]
    main(arguments)
    line = next(line for line in capsys.readouterr().out.splitlines() if "sequences of" in line)
    assert "not the 300" in line and "on v5e:2x4" not in line, line


def test_a_plan_counts_all_pages_of_windowed_layers(tmp_path, capsys):
    windowed = {
        **CONFIG,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(windowed))
    arguments = ["plan", "--model", str(tmp_path), "--topology", "v5e:2x2", "--no-compile"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["windowed_layers"] == 2
    assert main(arguments) == 0
    assert "2 layers see a window only; pages before it are kept in all layers" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "GptOssForCausalLM"])
def test_a_plan_of_a_model_for_one_chip(architecture, tmp_path, capsys):
    sizes = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "num_local_experts": 4}
    sizes |= {"n_routed_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    raw = {**CONFIG, **sizes, "architectures": [architecture], "model_type": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    arguments = ["plan", "--model", str(tmp_path), "--no-compile", "--json"]
    assert main([*arguments, "--topology", "v5e:1x1", "--block-size", "128"]) == 0
    numbers = 576 if architecture.startswith("Deepseek") else 4 * 128  # of a position, keys and values each
    heads = 1 if numbers == 576 else 4
    summaries = 4 * (3 * numbers + heads)
    page = json.loads(capsys.readouterr().out)["page_bytes"]
    assert page == 2 * (2 * 128 * numbers * 2 + summaries)
    if numbers == 576:
        with pytest.raises(SystemExit):
            main([*arguments, "--topology", "v5e:2x2"])
        assert "the number of chips must be 1" in capsys.readouterr().err


def test_a_plan_counts_the_copies_of_kv_heads(model, capsys):
    arguments = ["plan", "--model", model, "--no-compile", "--decode-context-parallel-size", "1"]
    assert main([*arguments, "--topology", "v5e:2x2", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--topology", "v5e:2x4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (alone["kv_head_copies"], plan["kv_head_copies"]) == (1, 2)
    assert plan["page_bytes"] == alone["page_bytes"] == 2 * (128 * 2 * 128 * 2 + 4 * (3 * 128 + 1))
    # Embedding, output projection, q, o, gate, up, down over 8 chips; a head of k and v, and norms, on each.
    matrices = 2 * 1024 * 512 + 2 * (2 * 512 * 1024 + 3 * 512 * 1024)
    assert plan["weight_bytes"] == 2 * (matrices // 8 + 2 * 2 * 512 * 128 + 5 * 512)
    assert main([*arguments, "--topology", "v5e:2x4"]) == 0
    copies = plan["pages"] * plan["page_bytes"] / 2**21
    line = f"each KV head is on 2 chips: {copies:.1f} MiB of the KV cache of a chip are copies"
    assert line in capsys.readouterr().out.splitlines()


def test_a_plan_of_kv_heads_that_chips_divide(model, capsys):
    arguments = ["plan", "--model", model, "--no-compile", "--topology", "v5e:2x4"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["kv_head_copies"], plan["page_shards"]) == (1, 2)
    assert plan["page_bytes"] == 128 * 2 * 128 * 2 + 4 * (3 * 128 + 1)  # of two layers, half of each
    matrices = 2 * 1024 * 512 + 2 * (2 * 512 * 1024 + 2 * 512 * 512 + 3 * 512 * 1024)
    assert plan["weight_bytes"] == 2 * (matrices // 8 + 5 * 512)
    # Of a pair of chips: two query heads, a key and a value; two outputs, each with its log-sum-exp.
    logits, decisions = 4 * 1024 * 4, plan["collectives"]["all-gather"]["bytes"] - 2 * 32 * 4 * 128 * 2
    assert plan["collectives"]["all-to-all"] == {"count": 3, "bytes": 2 * 32 * 2 * 129 * 4 + logits}
    assert plan["collectives"]["all-gather"]["count"] == 4 and 0 < decisions < 32 * 4 * 20
    assert main(arguments) == 0
    assert (
        "each KV head is divided over 2 chips, and so are its pages" in capsys.readouterr().out.splitlines()
    )
    with pytest.raises(SystemExit):
        main([*arguments, "--decode-context-parallel-size", "4"])
    assert "--decode-context-parallel-size must divide 2, the devices that" in capsys.readouterr().err


def test_a_vocabulary_of_any_size_has_a_plan(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 2**30}))
    arguments = ["--model", str(tmp_path), "--topology", "v5e:2x4", "--no-compile"]
    assert main(["plan", *arguments]) == 1
    assert "does not fit: not one sequence of 8192 positions" in capsys.readouterr().out


@pytest.mark.slow
def test_a_function_in_a_process_returns_raises_or_crashes():
    assert compile_process.in_a_process(max, [3, 5]) == 5
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        compile_process.in_a_process(operator.truediv, 1, 0)
    with pytest.raises(RuntimeError, match="the compiler ended with SIGSEGV"):
        compile_process.in_a_process(signal.raise_signal, signal.SIGSEGV)


def test_a_model_that_does_not_fit_is_status_1(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**CONFIG, "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 64})
    )
    assert main(["plan", "--model", str(file), "--topology", "v5e:2x2"]) == 1
    assert "does not fit: not one sequence of 8192 positions" in capsys.readouterr().out


def test_a_plan_for_which_fewer_fit_names_a_dtype_and_a_slice(model, capsys):
    sizes = ["--topology", "v5e:1x1", "--no-compile", "--max-model-len", "4096"]
    arguments = ["plan", "--model", model, *sizes, "--max-num-seqs", "2000"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 0 < plan["rows"] <= plan["sequences"] < 2000
    assert main(arguments) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "positions fit" in line]
    (larger,) = plan["fits_on"]
    assert f"not the 2000 of --max-num-seqs; 2000 fit on {larger['topology']}" in line
    for quantization in ([], ["--quantization", "int8"]):
        assert main([*arguments, "--json", *quantization]) == 0
    wide, narrow = map(json.loads, capsys.readouterr().out.splitlines())
    assert 0.49 < narrow["weight_bytes"] / wide["weight_bytes"] < 0.52


def test_a_plan_with_experts(tmp_path, capsys):
    routed = {"num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral = {**CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **routed}
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    arguments = ["plan", "--model", str(tmp_path), "--topology", "v5e:2x2", "--no-compile"]
    assert main([*arguments, "--expert-parallel-size", "2"]) == 0
    assert "4 chips, 2 along tensor, 2 along expert" in capsys.readouterr().out


def test_a_plan_of_several_engines_is_as_many_plans_of_one(model, capsys):
    arguments = ["plan", "--model", model, "--no-compile", "--max-model-len", "1024", "--json"]
    assert main([*arguments, "--topology", "v5e:1x4"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--topology", "v5e:2x4", "--data-parallel-size", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    total = plan.pop("total")
    assert plan == {name: value for name, value in alone.items() if name != "total"}
    # Embedding and output projection; of a layer q, o, k, v, gate, up, down; five norms on every chip.
    matrices = 2 * 1024 * 512 + 2 * (2 * 512 * 1024 + 2 * 512 * 512 + 3 * 512 * 1024)
    assert plan["weight_bytes"] == 2 * (matrices // 4 + 5 * 512)
    assert total["weight_bytes"] == 2 * 2 * (matrices + 4 * 5 * 512)
    page = 2 * (128 * 2 * 128 * 2 + 4 * (3 * 128 + 1))  # of one KV head: two layers, summaries included
    assert plan["page_bytes"] == page and total["kv_cache_bytes"] == 8 * plan["pages"] * page
    assert (total["engines"], total["devices"]) == (2, 8)
    assert total["sequences"] == 2 * (plan["pages"] // 8) and total["tokens"] == 2 * 128 * plan["pages"]
    rates = {str(2 * int(rows)): 2 * rate for rows, rate in alone["tokens_per_second"].items()}
    assert total["tokens_per_second"] == rates and len(rates) > 3


def test_a_plan_of_one_chip_speaks_of_one(model, capsys):
    main(["plan", "--model", model, "--topology", "v5e:1x1", "--no-compile", "--max-model-len", "1024"])
    assert capsys.readouterr().out.splitlines()[0].endswith(" on v5e:1x1: 1 chip, tensor parallel")


@pytest.mark.parametrize("command", ["plan", "serve", "generate", "chat"])
def test_helps_begin_with_what_they_describe(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    texts = capsys.readouterr().out.split("  --")[1:]
    helps = {text.split()[0]: " ".join(text.split("  ")[1:]).strip() for text in texts}
    cut_off = [name for name, text in helps.items() if re.match(r"(of (?!entropix: )|in which )", text)]
    assert len(helps) > 5 and not cut_off


def test_the_text_of_a_plan_of_several_engines(model, capsys):
    arguments = ["plan", "--model", model, "--topology", "v5e:2x4", "--no-compile", "-dp", "4"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 chips, 4 engines with 2 each, tensor parallel" in lines[0]
    assert "4 engines, 8 chips together" in lines
    assert any(line.startswith("of each engine, ") and "sequences of 8192" in line for line in lines)
    together = lines[lines.index("4 engines, 8 chips together") :]
    assert any(line.startswith("    32 rows: at most") for line in together)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--topology", "v5e:2x4", "--data-parallel-size", "3"],
            "--data-parallel-size must divide the number of chips, 8; got 3",
        ),
        (
            ["--topology", "v5e:2x4", "--data-parallel-size", "4", "--expert-parallel-size", "4"],
            "--expert-parallel-size must divide the chips of an engine, 2; got 4",
        ),
        (["--topology", "v9:2x2"], "topology must be one of v4, v5e, v5p, v6e"),
        (
            ["--topology", "v5e:4x4"],
            "--topology v5e:4x4: the number of chips must divide num_key_value_heads, 4, or be a multiple",
        ),
        (["--topology", "v5e:2x2", "--model", "/nowhere"], "/nowhere"),
        (
            ["--topology", "v5e:2x2", "--expert-parallel-size", "3"],
            "--expert-parallel-size must divide the number of chips, 4; got 3",
        ),
        (["--topology", "v5e:2x2", "--expert-parallel-size", "2"], "LlamaForCausalLM, which has no experts"),
    ],
)
def test_what_is_refused(model, capsys, options, message):
    with pytest.raises(SystemExit) as exit_status:
        main(["plan", "--model", model, *options])
    error = capsys.readouterr().err
    assert exit_status.value.code == 2 and message in error and error.count("\n") == 1
