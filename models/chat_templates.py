"""Chat templates, which come with a model and are not trusted: they may compute without end.

They are rendered by a process of its own (`template_worker`), in Jinja's immutable sandbox and within limits
of processor time, memory and length.
"""

import atexit
import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import ModelError
from .template_worker import receive, send
from .tokenizer_files import read_text

SECONDS = 5  # of processor time for a conversation
PATIENCE = 30.0  # seconds that it may take on a busy machine, or in a process that something has stopped
MEMORY = 1 << 30  # bytes of the process
MOST_CHARACTERS = 1 << 24  # of a conversation as text
SCRIPT = Path(__file__).with_name("template_worker.py")
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates that are chosen by themselves
LARGEST_TEMPLATE = 4_000_000  # bytes
FILE, FOLDER, SUFFIX = "chat_template.jinja", "additional_chat_templates", ".jinja"


def read_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a model directory by name, as in transformers 5. Raises ModelError.

    FILE and the files in FOLDER take the place of all templates in the settings.

    Args:
        directory: the model directory.
        settings: its tokenizer_config.json, as `tokenizer.check_settings` accepts it.
    """
    files = {DEFAULT: directory / FILE} if os.path.lexists(directory / FILE) else {}
    if (directory / FOLDER).is_dir():
        listed = sorted((directory / FOLDER).glob(f"*{SUFFIX}"))
        files |= {path.name.removesuffix(SUFFIX): path for path in listed}
    if files:
        return {name: read_text(path, LARGEST_TEMPLATE) for name, path in files.items()}
    stated = settings.get("chat_template")
    if isinstance(stated, list):
        return {template["name"]: template["template"] for template in stated}
    return {} if stated is None else {DEFAULT: stated}


class TemplateProcess:
    """The process that renders templates. It starts with the first, and after one that has ended it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.parent = 0  # process that started it, for others have copies of this object

    def ask(self, template: str, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """The reply of `template_worker.reply`; `exceeded` where it exceeds the limits.

        Args:
            template: in Jinja.
            variables: its variables; None only compiles it.
        """
        try:
            stated = None if variables is None else dict(variables)
            request = pickle.dumps((template, stated, MOST_CHARACTERS))
        except Exception as error:  # an object of a caller can refuse in any way
            return {"error": str(error)}
        with self.lock:
            process = self.running()
            assert process.stdin is not None and process.stdout is not None
            data = None
            watchdog = threading.Timer(PATIENCE, process.kill)  # which ends `receive`
            watchdog.daemon = True
            watchdog.start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    send(process.stdin, request)
                    data = receive(process.stdout)
            except BaseException:  # an interrupt: the rest of this answer must not become the next one's
                self.stop()
                raise
            finally:
                watchdog.cancel()
            if data is None:
                self.stop()
                return {"exceeded": True}
            return json.loads(data)

    def running(self) -> subprocess.Popen[bytes]:
        """The process, which is started if it does not run."""
        if self.process is None or self.parent != os.getpid() or self.process.poll() is not None:
            command = [sys.executable, "-I", str(SCRIPT), str(SECONDS), str(MEMORY)]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
            )
            self.parent = os.getpid()
        return self.process

    def stop(self) -> None:
        """End the process."""
        if self.process is not None and self.parent == os.getpid():
            self.process.kill()
            self.process.communicate()
        self.process = None


PROCESS = TemplateProcess()
atexit.register(PROCESS.stop)


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a conversation. Raises ModelError where the template fails or exceeds the limits.

    Args:
        template: in Jinja.
        variables: its variables.
    """
    result = PROCESS.ask(template, variables)
    if result.get("exceeded"):
        raise ModelError(limits("chat_template"))
    if "error" in result:
        raise ModelError(f"the chat template rejects the messages: {result['error']}")
    return result["text"]


def check(template: str, name: str) -> None:
    """Raise ModelError for text that is no Jinja template.

    Args:
        template: the text.
        name: the name of the argument, for the message.
    """
    result = PROCESS.ask(template, None)
    if result.get("exceeded"):
        raise ModelError(limits(name))
    if "error" in result:
        place = f" in line {result['line']}" if "line" in result else ""
        raise ModelError(f"{name} must be a Jinja template; got an error{place}: {result['error']}")


def limits(name: str) -> str:
    """The message for a template that exceeds the limits."""
    return f"{name} must need at most {SECONDS} s and {MEMORY >> 20} MiB; got one that needs more"
