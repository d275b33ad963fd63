"""Renders chat templates, in a process of its own whose time and memory are limited.

`chat_templates` starts it as a script, so that it imports nothing but Jinja. A request is a pickled object,
and a reply one of JSON; both follow their length in bytes.
"""

import datetime
import functools
import json
import pickle
import sys
from typing import IO, Any

try:
    import resource
except ImportError:  # Windows: neither time nor memory is limited
    resource = None

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = 8  # bytes of the length of a message


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the model's text for training; renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


@functools.lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """A chat template in jinja's immutable sandbox, with the helpers that templates expect."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = as_json
    strftime_now = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(
        template, globals={"raise_exception": refuse, "strftime_now": strftime_now}
    )


def reply(template: str, variables: dict[str, Any] | None, most_characters: int) -> dict[str, Any]:
    """The text of a conversation, or the error; a syntax error of the template names its line.

    Args:
        template: in Jinja.
        variables: its variables; None only compiles it.
        most_characters: the longest text.
    """
    try:
        program = compiled(template)
        parts = () if variables is None else program.generate(variables)
        texts, size = [], 0
        for part in parts:
            texts.append(part)
            size += len(part)
            if size > most_characters:
                return {"error": f"it must make at most {most_characters} characters of them"}
        return {"text": "".join(texts)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": str(error.message), "line": error.lineno}
    except MemoryError:
        return {"exceeded": True}
    except Exception as error:  # a template is a program: it can fail in any way
        return {"error": str(error)}


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream."""
    header = stream.read(LENGTH)
    size = int.from_bytes(header, "little")
    data = stream.read(size) if len(header) == LENGTH else b""
    return data if len(header) == LENGTH and len(data) == size else None


def send(stream: IO[bytes], data: bytes) -> None:
    """Write a message."""
    stream.write(len(data).to_bytes(LENGTH, "little") + data)
    stream.flush()


def main(seconds: int, memory: int) -> None:
    """Answer requests until standard input ends.

    Args:
        seconds: the processor time that a request may take.
        memory: the bytes that the process may have.
    """
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (request := receive(sys.stdin.buffer)) is not None:
        limit_time(seconds)
        try:
            result = reply(*pickle.loads(request))
        except Exception as error:
            result = {"error": str(error)}
        send(sys.stdout.buffer, json.dumps(result).encode())


def limit_time(seconds: int) -> None:
    """Limit the processor time of this process to what it has taken so far, and `seconds` more."""
    if resource is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
