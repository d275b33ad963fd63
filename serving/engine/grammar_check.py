"""Trial compilation of a grammar in a process with limits, since some grammars take forever to compile.

    python -m entropic_jax.serving.engine.grammar_check SECONDS

The grammar is read from standard input. Prints why it is refused; nothing if it is accepted. To decide
whether an intersection of regular expressions is empty is hard, and the limits of `llguidance` do not cover
it.
"""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 1  # of one processor
WALL_SECONDS = 60  # on a machine that is busy
NICE = 10  # so that the server and its engine come first
BYTES = 2 << 30  # of memory
RISKY = ("allOf", "patternProperties", "&", "%json", "~")
SHORT = 4000  # characters, up to which a grammar without risky parts needs no trial


def needs_trial(grammar: str) -> bool:
    """Whether a grammar is long or has risky parts."""
    return len(grammar) > SHORT or any(part in grammar for part in RISKY)


def reason(grammar: str) -> str | None:
    """Why a grammar cannot be compiled, or None. A grammar that needs no trial is not tried."""
    if not needs_trial(grammar):
        return None
    command = [sys.executable, "-m", "entropic_jax.serving.engine.grammar_check", str(SECONDS)]
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            command, input=grammar.encode(), capture_output=True, cwd=root, timeout=WALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        return f"it takes more than {SECONDS} s to compile"
    return done.stdout.decode().strip() or None


def main() -> int:
    """Compile the grammar on standard input."""
    if hasattr(os, "nice"):
        os.nice(NICE)
    try:
        import resource
    except ImportError:  # on Windows the caller's timeout is the only limit
        pass
    else:
        seconds = math.ceil(time.process_time() + int(sys.argv[1]))  # in addition to what the start has taken
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    import llguidance

    message = llguidance.LLMatcher.validate_grammar(sys.stdin.read())
    print("" if message.startswith("WARNING") else message[:300])
    return 0


if __name__ == "__main__":
    sys.exit(main())
