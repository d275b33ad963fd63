"""Items of local LongBench (Bai et al. 2023) and InfiniteBench (Zhang et al. 2024) files, and their scores.

Both are JSON lines. LongBench: `input`, `context`, `answers`, `all_classes`, `dataset`, `language`;
InfiniteBench: `id`, `context`, `input`, `answer`, `options`, the task being the name of the file. The wording
of the prompts is our own, so scores compare methods with each other, not with published tables.
"""

import difflib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SHORT, MIDDLE, LONG = 32, 128, 512  # tokens of an answer


class Kind(NamedTuple):
    """A task: its instruction, how its answers are scored, and how long they are."""

    instruction: str
    measure: str
    tokens: int


QUESTION = Kind("Answer the question from the text above, in as few words as possible.", "f1", SHORT)
SUMMARY = Kind("Summarise the text above.", "rouge", LONG)
EXAMPLES = Kind("Go on as in the examples above.", "classes", SHORT)
FIND = Kind("Answer with what the text above says, and nothing else.", "exact", SHORT)
CODE = Kind("", "edit", SHORT)
CHOICE = Kind("Answer with the letter of the right option.", "choice", SHORT)
KINDS: dict[str, Kind] = {
    # LongBench
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), QUESTION
    ),
    **dict.fromkeys(("multifieldqa_zh",), QUESTION._replace(measure="f1_characters")),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), SUMMARY),
    **dict.fromkeys(("vcsum", "dureader"), SUMMARY._replace(measure="rouge_characters", tokens=MIDDLE)),
    **dict.fromkeys(("trec", "lsht"), EXAMPLES),
    "triviaqa": EXAMPLES._replace(measure="f1"),
    "samsum": EXAMPLES._replace(measure="rouge", tokens=MIDDLE),
    "passage_count": Kind("Say how many different passages there are: a number.", "number", SHORT),
    **dict.fromkeys(
        ("passage_retrieval_en", "passage_retrieval_zh"),
        Kind("Say which passage the summary belongs to: its number.", "number", SHORT),
    ),
    **dict.fromkeys(("lcc", "repobench-p"), CODE),
    # InfiniteBench
    **dict.fromkeys(("passkey", "number_string", "kv_retrieval"), FIND),
    **dict.fromkeys(("longbook_qa_eng", "longdialogue_qa_eng"), QUESTION),
    "longbook_qa_chn": QUESTION._replace(measure="f1_characters"),
    "longbook_sum_eng": SUMMARY,
    **dict.fromkeys(("longbook_choice_eng", "code_debug"), CHOICE),
    "code_run": Kind("Answer with the value that the last call returns: a number.", "number", SHORT),
    "math_find": Kind("Answer with the number that is asked for.", "number", SHORT),
    "math_calc": Kind("Write the intermediate results, one after another.", "sequence", LONG),
}


class Item(NamedTuple):
    """One question about a long text."""

    task: str
    context: str
    question: str  # with the instruction and the options
    answers: tuple[str, ...]
    classes: tuple[str, ...]  # of a classification; of a choice, the options

    @property
    def tokens(self) -> int:
        """How many tokens an answer may have."""
        return KINDS[self.task].tokens

    def fitted(self, encode: Callable[[str], list[int]], room: int) -> list[int]:
        """The prompt in at most `room` tokens; of a context that is too long, the middle is left out.

        Raises ValueError where the question alone needs more.
        """
        question = encode(f"\n\n{self.question}" if self.question else "")
        left = room - len(question)
        if left < 1:
            raise ValueError(f"room must be above {len(question)} tokens, those of the question; got {room}")
        context = encode(self.context)
        if len(context) > left:
            context = context[: left // 2] + context[len(context) - (left - left // 2) :]
        return context + question


def read_items(file: Path) -> list[Item]:
    """The items of a file of either kind. Raises ValueError, which names the line, for what is neither."""
    items = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            items.append(read_record(record, file.stem))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}, line {number}: {reason}") from error
    return items


def read_record(record: dict[str, Any], stem: str) -> Item:
    """One line: LongBench has `answers`, InfiniteBench `answer`."""
    task = str(record.get("dataset") or stem).removesuffix("_e")
    if task not in KINDS:
        raise ValueError(f"task must be one of {', '.join(sorted(KINDS))}; got {task!r}")
    kind = KINDS[task]
    if "answers" in record:
        answers, options = record["answers"], record.get("all_classes") or ()
    else:
        answers, options = record["answer"], record.get("options") or ()
    answers = tuple(str(x) for x in (answers if isinstance(answers, list) else [answers]))
    if not answers:
        raise ValueError("answers must hold at least one; got none")
    parts = [kind.instruction, record["input"]]
    if kind.measure == "choice":
        letters = string.ascii_uppercase[: len(options)]
        parts += [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
    if kind.measure != "edit":
        parts.append("Answer:")
    question = "\n".join(part for part in parts if part)
    return Item(task, record["context"], question, answers, tuple(map(str, options)))


def words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    plain = "".join(" " if c in string.punctuation else c for c in text.lower())
    return [w for w in plain.split() if w not in ("a", "an", "the")]


def characters(text: str) -> list[str]:
    return [c for c in text.lower() if c.isalnum()]


def f1(answer: list[str], expected: list[str]) -> float:
    """Harmonic mean of precision and recall over a bag of words."""
    common = sum((Counter(answer) & Counter(expected)).values())
    return 2 * common / (len(answer) + len(expected)) if common else 0.0


def rouge(answer: list[str], expected: list[str]) -> float:
    """ROUGE-L: the F-measure of the longest common subsequence."""
    row = [0] * (len(expected) + 1)
    for a in answer:
        before = 0
        for j, b in enumerate(expected):
            before, row[j + 1] = row[j + 1], before + 1 if a == b else max(row[j], row[j + 1])
    return 2 * row[-1] / (len(answer) + len(expected)) if row[-1] else 0.0


def number(answer: str, expected: str) -> float:
    """Whether the first number in the answer is the expected one."""
    first, right = (re.search(r"-?\d+(\.\d+)?", text.replace(",", "")) for text in (answer, expected))
    return float(bool(first and right) and float(first[0]) == float(right[0]))  # type: ignore[index]


def classes(answer: str, expected: str, known: Sequence[str]) -> float:
    """1 / number of classes named, if the right one is among them; parts of longer ones do not count."""
    named = [c for c in known if c in answer]
    named = [c for c in named if not any(c != other and c in other for other in named)]
    return 1 / len(named) if expected in named else 0.0


def choice(answer: str, expected: str, options: Sequence[str]) -> float:
    """Whether the first letter that stands alone, or else the text, is that of the right option."""
    letters = string.ascii_uppercase[: len(options)]
    right = letters[options.index(expected)] if expected in options else expected
    first = re.search(rf"\b([{letters}])\b", answer) if letters else None
    return float(first[1] == right if first else expected.lower() in answer.lower())


def sequence(answer: str, expected: str) -> float:
    """The share of the expected numbers that come before the first wrong one."""
    theirs, ours = (re.findall(r"-?\d+", text) for text in (expected, answer))
    same = 0
    while same < min(len(theirs), len(ours)) and theirs[same] == ours[same]:
        same += 1
    return same / len(theirs) if theirs else 0.0


def score(item: Item, answer: str) -> float:
    """How good an answer is, in [0, 1]: against the best of the item's answers."""
    measure = KINDS[item.task].measure
    if measure in ("classes", "f1") and item.task in ("trec", "lsht", "triviaqa"):
        answer = answer.strip().partition("\n")[
            0
        ]  # after its answer, a model goes on with examples of its own
    if measure == "edit":  # of the first line that is code
        lines = [x for x in answer.splitlines() if x.strip() and not x.strip().startswith(("#", "//", "```"))]
        answer = lines[0].strip() if lines else ""
    if measure == "sequence":
        return sequence(answer, " ".join(item.answers))
    return max(_score(measure, item, answer, expected) for expected in item.answers)


def _score(measure: str, item: Item, answer: str, expected: str) -> float:
    split = characters if measure.endswith("characters") else words
    if measure.startswith("f1"):
        return f1(split(answer), split(expected))
    if measure.startswith("rouge"):
        return rouge(split(answer), split(expected))
    if measure == "classes":
        return classes(answer, expected, item.classes)
    if measure == "choice":
        return choice(answer, expected, item.classes)
    if measure == "number":
        return number(answer, expected)
    if measure == "edit":
        return difflib.SequenceMatcher(None, answer, expected.strip()).ratio()
    return float(expected.strip() in answer)
