"""Trial of a grammar in a process with limits, since some grammars take forever to compile, or all memory.

    python -m entropic_jax.serving.engine.grammar_check SECONDS

The grammar is read from standard input. To decide whether an intersection of regular expressions is empty is
hard, as are multiples of a number, and the limits of `llguidance` cover neither. A grammar that compiles is
played: it takes some hundred bytes that it allows, since masks of an ambiguous grammar take the longer the
longer the text is.
"""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import llguidance

from .cheap_grammars import is_cheap

SECONDS = 1  # of one processor, to compile
SECONDS_PLAYED = 2  # of one processor, for all masks of the bytes played
BYTES_PLAYED = 400
WALL_SECONDS = 20  # for all of it, on a machine that is busy
NICE = 19  # so that the server and its engine come first
BYTES = 512 << 20  # of memory
CHEAP_BYTES = 1 << 20  # of memory, taken to be the size of a grammar that needs no trial
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


TOKEN = re.compile(r'("(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*)|<[^<>\s]+>')  # or a literal


class Trial(NamedTuple):
    """The result of a trial."""

    reason: str | None = None  # why the grammar is refused
    part: int | None = None  # the place of the schema that is refused, among those of the grammar
    size: int = CHEAP_BYTES  # bytes of memory that compiling it takes


def needs_trial(grammar: str) -> bool:
    """Whether a grammar is not known to be cheap to compile."""
    return not is_cheap(grammar)


def trial(grammar: str) -> Trial:
    """Try a grammar, unless it needs no trial."""
    if not needs_trial(grammar):
        return Trial()
    command = [sys.executable, "-m", "entropic_jax.serving.engine.grammar_check", str(SECONDS)]
    root = Path(__file__).resolve().parents[2]
    try:
        output = subprocess.run(
            command, input=grammar.encode(), capture_output=True, cwd=root, timeout=WALL_SECONDS
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    lines = output.decode().splitlines()
    if not lines:
        return Trial(f"it takes more than {SECONDS} s or {BYTES >> 20} MiB to compile")
    compiled = Trial(*json.loads(lines[0]))
    if compiled.reason is not None or len(lines) > 1:
        return compiled
    return compiled._replace(
        reason=f"the masks of {BYTES_PLAYED} bytes take more than {SECONDS_PLAYED} s to compute"
    )


def refused_part(grammar: str) -> int | None:
    """The place, among the schemas of a grammar, of the first that is refused alone; None if none is."""
    if not grammar.lstrip().startswith("{"):
        return None
    schemas = [part for part in json.loads(grammar)["grammars"] if part.get("json_schema") is not None]
    for place, part in enumerate(schemas):
        if is_error(llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [part]}))):
            return place
    return None


def is_error(message: str) -> bool:
    """Whether a message of `validate_grammar` says that a grammar is refused."""
    return bool(message) and not message.startswith("WARNING")


def compiled(grammar: str) -> llguidance.LLMatcher:
    """A grammar compiled for bytes; they stand for its special tokens, too, which cost the same."""
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), without_tokens(grammar), log_level=0, limits=LIMITS
    )
    assert isinstance(matcher, llguidance.LLMatcher)
    return matcher


def without_tokens(grammar: str) -> str:
    """A grammar with a byte in place of each special token, which Lark's form writes in angle brackets."""
    if not grammar.lstrip().startswith("{"):
        return TOKEN.sub(lambda match: match[1] or "<[1]>", grammar)
    described = json.loads(grammar)
    for part in described["grammars"]:
        if part.get("lark_grammar") is not None:
            part["lark_grammar"] = without_tokens(part["lark_grammar"])
    return json.dumps(described)


def play(matcher: llguidance.LLMatcher) -> bool:
    """Whether the masks of a text of random bytes, as far as it goes, are computed within the limit."""
    choose, end = random.Random(0).choice, time.process_time() + SECONDS_PLAYED
    for _ in range(BYTES_PLAYED):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if matcher.is_error() or not allowed:  # it fails, as it will in the text, or has come to its end
            break
        matcher.consume_token(choose(allowed))
        if time.process_time() > end:
            return False
    return True


def peak_bytes() -> int:
    """The most memory that this process has had; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(peak[1]) << 10 if peak else 0


def main() -> int:
    """Try the grammar on standard input."""
    if hasattr(os, "nice"):
        os.nice(max(0, NICE - os.nice(0)))  # the thread that begins a trial may be so already
    try:
        import resource
    except ImportError:  # on Windows the caller's timeout is the only limit
        resource = None
    used = math.ceil(time.process_time() + int(sys.argv[1]))  # in addition to what the start has taken
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (used, used + SECONDS_PLAYED + 1))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    grammar, before = sys.stdin.read(), peak_bytes()
    message = llguidance.LLMatcher.validate_grammar(grammar)
    matcher = None if is_error(message) else compiled(grammar)
    if matcher is None or matcher.is_error():
        print(
            json.dumps([(message if matcher is None else matcher.get_error())[:300], refused_part(grammar)])
        )
        return 0
    print(json.dumps([None, None, CHEAP_BYTES + peak_bytes() - before]), flush=True)
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS_PLAYED + 1,) * 2)
    if play(matcher):
        print("played")
    return 0


if __name__ == "__main__":
    sys.exit(main())
