"""The tables of long prompts say when they have no power."""

from benchmarks.long_context import report
from benchmarks.long_context.measure import CASES
from benchmarks.long_context.workload import TASKS


def cell(method: str, right: dict[str, int], questions: int) -> dict:
    answers = [
        {"task": task, "asked": "first", "right": i < count, "surprisal": 0.1}
        for task, count in right.items()
        for i in range(questions)
    ]
    return {"study": "quality", "method": method, "answers": answers}


def test_a_small_cell_and_a_task_that_dense_cannot_do_are_named():
    cells = {"a": cell("dense", {"needle": 50, "words": 3}, 60), "b": cell("snapkv", {"needle": 1}, 9)}
    power, weak = report.power({"cells": cells})
    assert "9 questions" in power and "fewer than the 100" in power
    assert "less than 80%" in weak and "words" in weak and "needle" not in weak
    assert report.power({"cells": {"a": cell("dense", {"needle": 90}, 100)}}) == [
        "Power: 100 questions asked first in the smallest cell."
    ]
    assert report.power({"cells": {}}) == []


def test_the_default_has_power():
    assert report.QUESTIONS <= CASES and CASES % len(TASKS) == 0
