"""Compile a grammar from standard input, in a process that may be ended: some take for ever to be refused.

    python -m entropic_jax.serving.http.grammar_check SECONDS

Whether an intersection of expressions is empty is a hard question, and `llguidance` asks it without a limit
that holds. Prints why a grammar is refused; nothing if it is not.
"""

import subprocess
import sys
from pathlib import Path

SECONDS = 1  # of one processor
BYTES = 2 << 30  # of memory
RISKS = ("allOf", "patternProperties", "&", "%json", "~")
SHORT = 4000  # characters, up to which a grammar without risks is compiled at once


def reason(grammar: str) -> str | None:
    """Why a grammar is too complex, or None if it is not; what has no risks in it is not tried."""
    if len(grammar) <= SHORT and not any(risk in grammar for risk in RISKS):
        return None
    command = [sys.executable, "-m", "entropic_jax.serving.http.grammar_check", str(SECONDS)]
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            command, input=grammar.encode(), capture_output=True, cwd=root, timeout=10 * SECONDS
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        return f"it takes more than {SECONDS} s to compile"
    return done.stdout.decode().strip() or None


def main() -> int:
    """Compile what is on standard input."""
    try:
        import resource
    except ImportError:  # not on Windows, where the caller's patience is the limit
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    import llguidance

    said = llguidance.LLMatcher.validate_grammar(sys.stdin.read())
    print("" if said.startswith("WARNING") else said[:300])
    return 0


if __name__ == "__main__":
    sys.exit(main())
