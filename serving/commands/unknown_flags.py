"""Errors about unknown flags, with the flag that was probably meant, by vLLM's name or a misspelling."""

import difflib
from collections.abc import Iterable

# Flags of vLLM that have another name here, or need none.
VLLM = {
    "--api-server-count": "there is one server process",
    "--disable-uvicorn-access-log": "--disable-log-requests",
    "--distributed-executor-backend": "there is one process for all devices",
    "--enable-chunked-prefill": "chunked prefill is always on",
    "--enable-reasoning": "--reasoning-parser",
    "--enforce-eager": "--warmup none",
    "--guided-decoding-backend": "the backend is llguidance",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--load-format": "weights are safetensors",
    "--max-seq-len-to-capture": "--max-model-len",
    "--no-enable-chunked-prefill": "chunked prefill is always on",
    "--num-gpu-blocks-override": "--kv-cache-bytes",
    "--num-speculative-tokens": "--speculative-config",
    "--speculative-model": "--speculative-config",
    "--structured-outputs-config": "the backend is llguidance",
    "--swap-space": "preempted requests are recomputed",
    "--tokenizer": "the tokenizer is that of the model's directory",
    "--trust-remote-code": "no code of a model is run",
}
MOST = 8  # flags that are explained


def explained(arguments: Iterable[str], known: Iterable[str]) -> str:
    """The error for arguments that no option takes.

    Args:
        arguments: Not recognised, values among them.
        known: Flags of the command.
    """
    known = list(known)
    words = []
    for argument in list(arguments)[:MOST]:
        flag = argument.partition("=")[0].replace("_", "-")
        hint = VLLM.get(flag, "")
        if not hint and flag.startswith("--") and (close := difflib.get_close_matches(flag, known, 1, 0.75)):
            hint = close[0]
        question = f"did you mean {hint}?" if hint.startswith("--") else hint
        words.append(f"{argument} ({question})" if hint else argument)
    return f"unrecognized arguments: {' '.join(words)}"
