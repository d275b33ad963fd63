"""Chat templates that compute or allocate without end, and the process that renders them."""

import os
import signal
import threading

import pytest

from entropic_jax.models import ModelError, chat_templates
from entropic_jax.models.chat_templates import PROCESS, check, render

TWICE = "{% set ns.x = ns.x ~ ns.x %}"
ENDLESS = {
    "a product": "{{ 'x' * 10**10 }}",
    "a power": "{{ 10**(10**9) }}",
    "a filter": "{{ 'x' | center(10000000000) }}",
    "a method": "{{ 'x'.ljust(10000000000) }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": f"{{% set ns = namespace(x='x') %}}{TWICE * 40}{{{{ ns.x }}}}",
    "lists of lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a | string | length }}",
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A process with less time and memory."""
    monkeypatch.setattr(chat_templates, "SECONDS", 1)
    monkeypatch.setattr(chat_templates, "MEMORY", 1 << 28)
    PROCESS.stop()
    yield
    PROCESS.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_are_errors_of_one_line(name):
    process = PROCESS.running()
    with pytest.raises(ModelError, match=r"^chat_template must need at most 1 s and 256 MiB") as caught:
        render(ENDLESS[name], {})
    assert "\n" not in str(caught.value)
    if name == "loops":  # which the limit of the processor time ends, before the patience is over
        assert process.returncode == -signal.SIGXCPU
    assert render("{{ x }}", {"x": 1}) == "1"


def test_long_ranges_are_refused():
    with pytest.raises(ModelError, match="Range too big"):
        render("{% for i in range(10**12) %}{% endfor %}", {})


def test_long_texts_are_refused():
    with pytest.raises(ModelError, match="at most 16777216 characters"):
        render("{% for i in range(99999) %}{{ x }}{% endfor %}", {"x": "x" * 1000})


def test_what_the_system_ends_is_started_again():
    assert render("a", {}) == "a"
    os.kill(PROCESS.process.pid, signal.SIGKILL)
    PROCESS.process.wait()
    assert render("b", {}) == "b"


def test_a_stopped_process_is_ended_and_started_again(monkeypatch):
    assert render("a", {}) == "a"
    monkeypatch.setattr(chat_templates, "PATIENCE", 0.5)
    process, late = PROCESS.process, threading.Event()
    end = threading.Timer(30, lambda: (late.set(), process.kill()))  # should nothing else end it
    os.kill(process.pid, signal.SIGSTOP)
    end.start()
    with pytest.raises(ModelError, match=r"^chat_template must need at most 1 s"):
        render("b", {})
    end.cancel()
    assert not late.is_set() and process.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert render("c", {}) == "c"


def test_a_syntax_error_names_the_argument_and_the_line():
    check("{{ x }}", "--chat-template")
    with pytest.raises(ModelError, match="--chat-template must be a Jinja template; got an error in line 2"):
        check("a\n{% if %}", "--chat-template")


def test_constants_are_not_computed_here():
    """Jinja computes them when it compiles a template."""
    with pytest.raises(ModelError, match="--chat-template must need at most"):
        check("{{ 7**99999999 % 2 }}", "--chat-template")


def test_objects_that_only_this_process_knows_are_refused():
    class Local:
        pass

    with pytest.raises(ModelError, match=r"rejects the messages: .*Local"):
        render("a", {"x": Local()})


def test_an_interrupt_leaves_no_answer_behind(monkeypatch):
    """The next template gets its own answer, not the one that was interrupted."""

    def interrupt(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_templates, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render("first", {})
    assert render("second", {}) == "second"


def test_one_template_at_a_time_is_rendered(monkeypatch):
    """The lock is held from the request to its answer, or two threads could get each other's."""
    locked = []
    send, receive = chat_templates.send, chat_templates.receive

    def watched(function):
        return lambda *arguments: (locked.append(PROCESS.lock.locked()), function(*arguments))[1]

    monkeypatch.setattr(chat_templates, "send", watched(send))
    monkeypatch.setattr(chat_templates, "receive", watched(receive))
    assert render("a", {}) == "a"
    assert locked == [True, True] and not PROCESS.lock.locked()


def test_the_process_of_another_process_is_left_alone():
    """After a fork, both have a copy of the object."""
    first = PROCESS.running()
    try:
        PROCESS.parent = os.getppid()
        assert render("a", {}) == "a" and PROCESS.process is not first
        PROCESS.stop()
        PROCESS.process, PROCESS.parent = first, os.getppid()
        PROCESS.stop()
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
