"""Errors about unknown flags, with the flag that was probably meant or why there is none."""

import difflib
from collections.abc import Iterable

# Flags of vLLM, SGLang and `entropic generate` that have another name here, or need none.
OTHER_SERVERS = {
    "--api-server-count": "there is one server process",
    "--async-scheduling": "host and device overlap wherever they do not share processors",
    "--attention-backend": "the kernels are those that `entropic doctor` shows",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--cpu-offload-gb": "all weights are on the device",
    "--cuda-graph-sizes": "programs are compiled for batch buckets: --warmup",
    "--data-parallel-size": "only `entropic generate`, `serve` and `plan` take it",
    "--device": "the device is that of JAX: JAX_PLATFORMS",
    "--disable-cuda-graph": "--warmup none",
    "--disable-fastapi-docs": "there are no pages that load scripts of other hosts",
    "--disable-log-stats": "statistics are read from /metrics only",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--distributed-executor-backend": "there is one process for all devices",
    "--download-dir": "the model is a directory on this machine",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--enable-expert-parallel": "--expert-parallel-size",
    "--enable-log-requests": "requests are logged unless --disable-log-requests is set",
    "--enable-metrics": "metrics are always on: /metrics",
    "--enable-prompt-tokens-details": "cached tokens are always reported",
    "--enable-reasoning": "--reasoning-parser",
    "--enforce-eager": "--warmup none",
    "--fully-sharded-loras": "adapters are not divided over devices",
    "--grammar-backend": "the backend is llguidance",
    "--guided-decoding-backend": "the backend is llguidance",
    "--hf-token": "the model is a directory on this machine",
    "--limit-mm-per-prompt": "models take text only",
    "--load-format": "the format of the weights is that of the files: .safetensors, .bin or .gguf",
    "--log-level": "--uvicorn-log-level",
    "--lora-dtype": "adapters have the dtype of the model",
    "--lora-paths": "--lora-modules",
    "--max-cpu-loras": "every loaded adapter is on the device: --max-loras",
    "--max-loras-per-batch": "--max-loras",
    "--max-num-sequences": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "--max-seq-len-to-capture": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model-path": "--model",
    "--num-gpu-blocks-override": "--kv-cache-bytes",
    "--num-scheduler-steps": "a launch has as many steps as suit the load",
    "--num-speculative-tokens": "--speculative-config",
    "--page-size": "--block-size",
    "--pipeline-parallel-size": "models are divided by --tensor-parallel-size",
    "--random-seed": "--seed",
    "--revision": "the model is a directory on this machine",
    "--rope-scaling": "rotary embeddings are those of config.json",
    "--runner": "every server generates, embeds and scores",
    "--schedule": "--scheduling-policy",
    "--schedule-policy": "--scheduling-policy",
    "--speculative-algorithm": "--speculate",
    "--speculative-model": "--speculative-config",
    "--structured-outputs-config": "the backend is llguidance",
    "--swap-space": "preempted requests are recomputed",
    "--task": "every server generates, embeds and scores",
    "--tokenizer": "the tokenizer is that of the model's directory",
    "--tokenizer-mode": "the tokenizer is that of the model's directory",
    "--tokenizer-path": "the tokenizer is that of the model's directory",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--trust-remote-code": "no code of a model is run",
}
MOST = 8  # flags that are explained


def explained(arguments: Iterable[str], known: Iterable[str]) -> str:
    """The error for arguments that no option takes.

    Args:
        arguments: not recognised, values among them.
        known: flags of the command.
    """
    known = list(known)
    words = []
    for argument in list(arguments)[:MOST]:
        hint = hint_for(argument.partition("=")[0], known)
        words.append(f"{argument} ({hint})" if hint else argument)
    return f"unrecognized arguments: {' '.join(words)}"


def hint_for(flag: str, known: Iterable[str]) -> str:
    """The flag to use in place of an unknown one, or why there is none; "" if that is not known.

    >>> hint_for("--max_num_seq", ["--max-num-seqs"])
    'did you mean --max-num-seqs?'
    >>> hint_for("--swap-space", [])
    'preempted requests are recomputed'
    """
    flag = flag.replace("_", "-")
    hint = OTHER_SERVERS.get(flag, "")
    if not hint and flag.startswith("--"):
        hint = next(iter(difflib.get_close_matches(flag, list(known), 1, 0.75)), "")
    return f"did you mean {hint}?" if hint.startswith("--") else hint
