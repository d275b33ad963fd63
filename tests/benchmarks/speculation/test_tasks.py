"""Tasks of the benchmark of speculation: edits, answers that are imposed and that drafters do not see."""

import ast
import json
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.paths import ROOT
from benchmarks.harness.tables import markdown
from benchmarks.speculation import measure as decoding
from benchmarks.speculation.tasks import edits, measure, report, schemas
from benchmarks.speculation.tasks.imposed import Unaware, impose, unaware
from benchmarks.speculation.workload import loops
from entropic_jax.serving.options import draft_model
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.speculation import (
    Cascade,
    HeadDrafter,
    PrunedDrafter,
    Speculator,
    SuffixDrafter,
    speculator,
)
from entropic_jax.speculation.draft_length import DraftLength
from tests.speculation.test_head import head_of
from tests.tiny import model, prompts

LAW = DraftLength(jnp.ones(2, jnp.float32), widths=(1, 4))  # drafts are free


def functions(code: str) -> list[ast.FunctionDef]:
    """The function that code consists of, as a syntax tree."""
    (node,) = ast.parse(textwrap.dedent(code)).body
    assert isinstance(node, ast.FunctionDef)
    return [node]


def test_a_renamed_function_differs_in_one_name():
    for number, edit in zip(range(100), edits.renamings(), strict=False):
        old, new = re.findall("`(.+?)`", edit.instruction)
        renamed = edit.answer.replace(new, old)
        assert renamed == edit.code != edit.answer, number
        assert edit.answer.count(new) >= edits.OCCURRENCES
        ((node,), (before,)) = functions(edit.answer), functions(edit.code)
        bound = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        bound |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        assert old not in bound and new in bound and node.name == before.name


def test_hints_are_all_that_is_added():
    for _, edit in zip(range(100), edits.hintings(), strict=False):
        ((bare,), (hinted,)) = functions(edit.code), functions(edit.answer)
        assert edits.is_bare(edit.code)
        added = [x.annotation for x in edits.arguments(hinted) if x.annotation is not None]
        assert len(added) + (hinted.returns is not None) >= edits.HINTS
        for argument in edits.arguments(hinted):
            argument.annotation = None
        hinted.returns = None
        assert ast.dump(bare) == ast.dump(hinted)


def test_a_table_has_the_same_rows_in_another_order():
    tables = [*edits.reorderings()]
    assert len(tables) > 20
    for edit in tables:
        before, after = edit.code.splitlines(), edit.answer.splitlines()
        assert before[:2] == after[:2] == edits.HEADER.splitlines()
        assert len(after) == 2 + edits.ROWS and sorted(before[2:]) == sorted(after[2:])
        names = [line.split(" | ")[0] for line in after[2:]]
        assert names == sorted(names) and before != after


@pytest.mark.parametrize("kind", edits.KINDS)
def test_tasks_fill_their_context_and_do_not_loop(kind):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    short, long = (edits.tasks(kind, EMBEDDED / "tokenizer.json", context, 3) for context in (512, 2048))
    assert len(short) == 3 and [task.answer for task in short] == [task.answer for task in long]
    for task, other in zip(short, long, strict=True):
        assert len(task.prompt) == 512 and len(other.prompt) == 2048
        assert other.prompt[-400:] == task.prompt[-400:]
        assert edits.ANSWER[0] <= len(task.answer) <= edits.ANSWER[1] and not loops(task.answer)
        request = tokenizer.decode(task.prompt, skip_special_tokens=False)
        answer = tokenizer.decode(task.answer, skip_special_tokens=False)
        assert "# Task: " in request and request.endswith("# After the change:\n\n")
        assert answer.strip() not in request


def drafters() -> dict[str, Any]:
    """Drafters of the tiny model with a head, which stop at nothing."""
    suffix = SuffixDrafter(speculator(1).drafter.acceptance, 3)
    always: dict[str, Any] = dict(stop_below=jnp.float32(0), most_tokens=3)
    head = HeadDrafter(jnp.array([0.9]), jnp.zeros(0), **always)
    pruned = PrunedDrafter(jnp.array([0.9]), jnp.zeros(0), shortest_context=0, **always)
    return {"suffix": suffix, "head": head, "pruned": pruned, "cascade": Cascade((suffix, head))}


@pytest.mark.exhaustive
def test_the_text_is_the_one_imposed_and_drafters_do_not_see_it():
    subject = draft_model.with_head(model(), *head_of())
    prompt, new = prompts(40, 12)
    answer = [*new[:6], *prompt[5:20], *new[6:], 95]
    wrapped = {name: unaware(Speculator(drafter, LAW)) for name, drafter in drafters().items()}
    arms = {"off": None, "cascade": wrapped["cascade"], "pruned": wrapped["pruned"]}
    arms["seen"] = Speculator(drafters()["pruned"], LAW)  # drafts with the imposed model itself
    imposed = impose(subject, prompt, answer)
    results = decoding.compare(imposed, prompt, len(answer), 1.3, arms, 0, answer)["arms"]
    for name, result in results.items():
        assert result["equal"] == result["tokens"] == len(answer), name
        assert result["passes"] + result["accepted"] == len(answer), name
    assert results["off"]["passes"] == len(answer) and results["off"]["drafted"] == 0
    assert results["cascade"]["accepted"] >= 8, "half of the answer is copied"
    assert results["seen"]["accepted"] == results["seen"]["drafted"] > 10
    pruned = results["pruned"]  # random weights do not write this answer
    assert pruned["drafted"] > 10 and pruned["accepted"] < 0.4 * pruned["drafted"]


def test_an_unaware_drafter_stands_for_the_drafter_itself():
    for drafter in drafters().values():
        wrapped = Unaware(drafter)
        assert wrapped.most_tokens == drafter.most_tokens
        assert wrapped.drafters == getattr(drafter, "drafters", (drafter,))
    assert unaware(None) is None


def arm(seconds: float, equal: int, drafted: int = 0, accepted: int = 0) -> dict[str, Any]:
    counts = {"drafted": drafted, "accepted": accepted, "passes": 100 - accepted}
    return {"seconds": seconds, "equal": equal, "tokens": 100, **counts}


def edit_entry(kind: str, number: int, seconds: float, equal: int = 100) -> dict[str, Any]:
    arms = {"off": arm(1.0, 100), "auto": arm(seconds, equal, 90, 75)}
    place = {"kind": kind, "context": 512, "temperature": 0.7, "task": number, "answer": 100}
    return {**place, "loops": False, "arms": arms}


def cell(name: str, rows: int, tokens: int) -> dict[str, Any]:
    counts = {"tokens": 3 * tokens, "passes": 2 * tokens, "drafted": 2 * tokens, "accepted": tokens}
    rounds = {"off": [[tokens, 0.1]] * 3, "auto": [[tokens, 0.05], [tokens, 0.1], [tokens, 0.2]]}
    sums = {"texts": 3, "equal": 3, "ended": 2, "counts": {"off": counts, "auto": counts}}
    return {"kind": "tool call", "task": name, "rows": rows, "rounds": rounds, **sums}


def test_tables_are_made_of_stored_results():
    results = {
        "date": "2026-01-01",
        "commit": "0123abc",
        "cpu": "A Processor",
        "threads": 2,
        "jax": "0.1",
        "model": "embedded",
        "dtype": "float32",
        "xla_threads": "1",
        "edits": [
            edit_entry("rename", 0, 0.5),
            edit_entry("rename", 1, 0.25),
            edit_entry("reorder", 0, 1.0, 99),
        ],
        "structured": [cell("a", 1, 10), cell("b", 1, 30), cell("mixed", 8, 20)],
    }
    results = json.loads(json.dumps(results))
    (_, head, edited), (_, header, structured) = report.tables(results)
    assert all(len(row) == len(head) for row in edited) and all(len(row) == len(header) for row in structured)
    assert [row[3:] for row in edited] == [
        ["off", "1.00 (1.00–1.00)", "1.00", "–", "100", "2 of 2"],
        ["auto", "3.00 (2.00–4.00)", "4.00", "0.83", "100", "2 of 2"],
        ["off", "1.00 (1.00–1.00)", "1.00", "–", "100", "1 of 1"],
        ["auto", "1.00 (1.00–1.00)", "4.00", "0.83", "100", "0 of 1"],
    ]
    assert [row[1:5] for row in structured] == [
        ["a", "1", "100", "1.00 (0.50–2.00)"],
        ["b", "1", "300", "1.00 (0.50–2.00)"],
        ["all", "1", "200", "1.00 (0.50–2.00)"],
        ["mixed", "8", "200", "1.00 (0.50–2.00)"],
    ]
    assert structured[2][5:] == ["1.50", "0.50", "20", "6 of 6", "4 of 6"]
    text = markdown(report.tables(results), report.notes(results), report.stamps(results))
    assert text.count("*Measured 2026-01-01") == 2 and "is imposed" in text and "Drafters do not see" in text
    ((title, *_),) = report.tables({"edits": results["edits"], "dtype": "bfloat16"})
    assert title.endswith("the answer imposed, bfloat16"), "a part that was not measured has no table"


@pytest.mark.exhaustive
def test_a_quick_run_ends_well(tmp_path, shallow):
    """Both parts, through the command; the stored results print the same tables."""
    command = [sys.executable, "-m", "benchmarks.speculation.tasks"]

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    file = tmp_path / "tasks.json"
    common = ("--model", str(shallow), "--output", str(file))
    assert "Edits of given code" in run("--quick", "--rows", "2", *common)
    assert "JSON by schema" in run("--show", str(file))
    results = json.loads(file.read_text("utf-8"))
    assert {entry["kind"] for entry in results["edits"]} == {*edits.KINDS}
    for entry in results["edits"]:
        assert {*entry["arms"]} == {"off", "suffix", "auto"}
        assert all(arm["equal"] == arm["tokens"] == entry["answer"] for arm in entry["arms"].values())
    assert [(entry["kind"], entry["rows"]) for entry in results["structured"]] == [
        (kind, 2) for kind in schemas.KINDS
    ]
    for entry in results["structured"]:
        assert entry["equal"] == entry["texts"] > 0
        assert 0 <= entry["ended"] <= entry["texts"]  # a short text may come to its limit
        assert np.ravel(entry["rounds"]["auto"]).min() > 0


def test_strings_without_bounds_have_the_schemas_of_the_others():
    tasks = schemas.structured_tasks()
    of_kind = {kind: {task.name: task for task in tasks if task.kind == kind} for kind in schemas.KINDS}
    bounded, unbounded = of_kind[schemas.SCHEMA], of_kind[schemas.UNBOUNDED]
    assert [*bounded] == [*unbounded] and len(of_kind[schemas.TOOL]) == len(schemas.TOOLS)
    for name, task in bounded.items():
        assert '"maxLength"' in json.dumps(task.body) and "maxLength" not in json.dumps(unbounded[name].body)
        assert schemas.unbounded(task.body["response_format"]) == unbounded[name].body["response_format"]


def test_a_part_measured_alone_leaves_the_other_with_its_own_date():
    stored = {"date": "2026-01-01", "commit": "a", "cpu": "x", "edits": [1], "structured": [2]}
    first = {"date": "2026-02-02", "commit": "b", "cpu": "x", "structured": [3]}
    first["runs"] = {"structured": {"date": "2026-02-02", "commit": "b"}}
    results = measure.with_stored_parts(first, stored)
    assert (results["edits"], results["structured"], results["date"]) == ([1], [3], "2026-02-02")
    dates = {part: run["date"] for part, run in results["runs"].items()}
    assert dates == {"edits": "2026-01-01", "structured": "2026-02-02"}
    again = {**first, "date": "2026-03-03", "runs": {"structured": {"date": "2026-03-03", "commit": "c"}}}
    runs = measure.with_stored_parts(again, results)["runs"]
    assert [runs[part]["date"] for part in ("edits", "structured")] == ["2026-01-01", "2026-03-03"]
