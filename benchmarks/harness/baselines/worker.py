"""Worker process of one engine: reads commands from standard input, answers on standard output.

    python -m benchmarks.harness.baselines.worker ENGINE DIRECTORY [--threads 2] [--prepare]

A command and its answer are one line of JSON each; `--prepare` only converts the weights. The interpreter
needs the engine and NumPy, nothing else.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..cores import pin_to_cores
from .drafting_engines import EVERY_ENGINE
from .engines import Engine
from .weights import CONVERSIONS, library_of


def serve(engine_class: Callable[..., Any], precision: str, directory: Path, threads: int) -> None:
    """Answer commands `{"method": name, "arguments": [...]}` from standard input until it ends.

    An argument that is a string names a .npy file. Answers go to the original standard output; whatever the
    libraries print there is diverted to standard error.

    Args:
        engine_class: makes the engine.
        precision: in which it computes.
        directory: holds the weights in every form.
        threads: number of threads of the engine.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        engine: Engine = engine_class(directory, threads, precision)
        answer(version=engine.version)
        for line in sys.stdin:
            command = json.loads(line)
            arguments = [np.load(a) if isinstance(a, str) else a for a in command["arguments"]]
            function = getattr(engine, command["method"])
            gc.collect()
            begin = time.perf_counter()
            tokens = function(*arguments)
            seconds = time.perf_counter() - begin
            listed = None if tokens is None else np.asarray(tokens).tolist()
            counts = {"read": getattr(engine, "tokens_read", 0), "passes": getattr(engine, "passes", None)}
            answer(seconds=seconds, tokens=listed, detail=engine.detail, **counts)
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(1)


def main() -> None:
    """Run one engine, or convert the weights for it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=sorted(EVERY_ENGINE))
    parser.add_argument("directory", type=Path, help="holds huggingface/ and what was converted from it")
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine")
    parser.add_argument("--prepare", action="store_true", help="convert the weights and stop")
    arguments = parser.parse_args()
    engine_class, precision = EVERY_ENGINE[arguments.engine]
    if arguments.prepare:
        CONVERSIONS[library_of(arguments.engine)](arguments.directory, precision)
        return
    pin_to_cores(arguments.threads)
    serve(engine_class, precision, arguments.directory, arguments.threads)


if __name__ == "__main__":
    main()
