"""--config: options from a YAML file."""

import argparse

import pytest

from entropic_jax.serving.cli import parser
from entropic_jax.serving.commands import serve_setup
from entropic_jax.serving.commands.config_file import use_config
from entropic_jax.serving.options.option_types import Several

YAML = """\
model: some/model
max_num_seqs: 16            # underscores are dashes
preset: off                 # a name, not a boolean
warmup: none
port: 8001
served-model-name: [one, two]
api-key: 007
enable-prefix-caching: no
disable-log-requests: true
gpu-memory-utilization: 0.5
allowed-origins: ["https://example.org"]
speculative-config: {num_speculative_tokens: 3}
"""


def parsed(tmp_path, text, *arguments):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    top = parser()
    use_config(top.parse_args(["serve"]).subparser, str(path))
    return top.parse_args(["serve", *arguments])


def test_flags_come_from_the_file_and_the_command_line_wins(tmp_path):
    options = parsed(tmp_path, YAML, "--port", "9000", "--served-model-name", "three", "--preset", "micro")
    assert (str(options.model), options.max_num_seqs, options.warmup) == ("some/model", 16, "none")
    assert (options.port, options.served_model_name, options.preset) == (9000, ["three"], "micro")
    assert options.api_key == ["007"] and options.enable_prefix_caching is False
    assert options.disable_log_requests and options.gpu_memory_utilization == 0.5
    assert options.speculative_config == '{"num_speculative_tokens": 3}'
    settings = serve_setup.settings_of(options)
    assert settings.allowed_origins == ("https://example.org",) and settings.api_keys == ("007",)
    negated = parsed(tmp_path, "no-enable-log-requests: yes\nno-enable-prefix-caching: true")
    assert negated.disable_log_requests and not negated.enable_prefix_caching
    plain = parsed(tmp_path, YAML)
    assert (plain.preset, plain.served_model_name) == ("off", ["one", "two"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seq: 4", "serve.yaml has no flag max-num-seq (did you mean max-num-seqs?)"),
        ("max-num-sequences: 4", "has no flag max-num-sequences (did you mean max-num-seqs?)"),
        (
            "load-format: gguf",
            "(the format of the weights is that of the files: .safetensors, .bin or .gguf)",
        ),
        ("swap-space: 4", "serve.yaml has no flag swap-space (preempted requests are recomputed)"),
        ("config: x", "serve.yaml has no flag config"),
        ("port: many", "serve.yaml: port must be an integer between 0 and 65535; got many"),
        (
            "tensor-parallel-size: x",
            "serve.yaml: tensor-parallel-size must be an integer between 1 and 2147483647; got x",
        ),
        ("warmup: soon", "serve.yaml: warmup must be one of none, min, full; got soon"),
        ("batch-invariant: 3", "serve.yaml: batch-invariant must be true or false; got 3"),
        ("port: [1, 2]", "serve.yaml: port must be a single value; got [1, 2]"),
        ("api-key: {a: b}", 'serve.yaml: api-key must be a single value; got {"a": "b"}'),
        ("port: 4\n--port: 5", "serve.yaml must state port once; got port and --port"),
        ("- port", "--config must be a YAML file of flags and their values; got"),
        ("port: [", "--config must be a YAML file; got"),
        ("port: 4\nport: 5", "serve.yaml must state port once; got it 2 times"),
        ("port: 2024-13-45", "--config must be a YAML file; got"),
        ("port: 0b_", "--config must be a YAML file; got"),
        (f"port: {'9' * 5000}", "--config must be a YAML file; got"),
        (f"port: {'[' * 5000}", "--config must be a YAML file; got"),
        ("speculative-config: {a: 2024-01-01}", "speculative-config must"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, entropic, text, said):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    status, _, errors = entropic("serve", "--config", str(path))
    assert status == 2 and said in errors.splitlines()[-1], errors


def test_a_file_that_is_not_there(entropic):
    status, _, errors = entropic("serve", "--config", "nowhere.yaml")
    assert status == 2 and "--config must be a readable file; got nowhere.yaml (No such file" in errors


def test_flags_of_other_servers_are_understood():
    flags = "--kv-cache-memory-bytes 1000 --disable-uvicorn-access-log -tp 2".split()
    options = parser().parse_args(["serve", *flags])
    assert (options.kv_cache_bytes, options.tensor_parallel_size) == (
        1000,
        2,
    ) and options.disable_log_requests


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--mem-fraction-static", "did you mean --gpu-memory-utilization?"),
        ("--max-cpu-loras", "every loaded adapter is on the device: --max-loras"),
        ("--tp", "did you mean --tensor-parallel-size?"),
        ("--enable-expert-parallel", "did you mean --expert-parallel-size?"),
        ("--enable-log-requests", "requests are logged unless --disable-log-requests is set"),
    ],
)
def test_flags_of_other_servers_are_explained(entropic, flag, said):
    _, _, errors = entropic("serve", flag, "1")
    assert f"{flag} ({said})" in errors


LISTS = {
    "--api-key": ("a", "b"),
    "--served-model-name": ("a", "b"),
    "--allowed-hosts": ("a", "b"),
    "--lora-modules": ("a=x", "b=y"),
    "--allowed-origins": ("https://a.org", "https://b.org"),
}


@pytest.mark.parametrize("flag", LISTS)
def test_an_option_with_several_values_may_be_repeated(tmp_path, flag):
    first, second = LISTS[flag]
    name = flag[2:].replace("-", "_")
    values = getattr(parser().parse_args(["serve", flag, first, flag, second]), name)
    from_file = getattr(parsed(tmp_path, f"{flag[2:]}: {first}", flag, second), name)
    assert len(values) == 2 and list(from_file) == [values[1]]  # the command line replaces the file's


def test_every_option_with_several_values_may_be_repeated():
    (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        for action in command._actions:
            assert action.nargs != "+" or isinstance(action, Several), (name, action.option_strings)
