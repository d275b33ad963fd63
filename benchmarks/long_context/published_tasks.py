"""Items of local LongBench, LongBench v2, InfiniteBench and RULER files, and their scores.

JSON lines, or one JSON array. LongBench (Bai et al. 2023): `input`, `context`, `answers`, `all_classes`,
`dataset`, `language`. LongBench v2 (Bai et al. 2024): `question`, `choice_A` … `choice_D`, `answer` (a
letter), `context`. InfiniteBench (Zhang et al. 2024): `id`, `context`, `input`, `answer`, `options`, the task
being the name of the file. RULER (Hsieh et al. 2024), as its scripts write them: `input`, the whole prompt;
`outputs`; the task is the name of the file, or of its folder where the file is called `validation` or `test`.
The wording of the prompts is our own but for RULER, so scores compare methods with each other, not with
published tables.
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
ALL, ANY = Kind("", "all", MIDDLE), Kind("", "any", SHORT)  # RULER's prompts hold their instructions
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
    # RULER
    **{f"niah_{kind}_{i}": ALL for kind in ("single", "multikey") for i in (1, 2, 3)},
    **dict.fromkeys(("niah_multivalue", "niah_multiquery", "cwe"), ALL),
    "vt": ALL._replace(tokens=SHORT),
    "fwe": ALL._replace(tokens=64),
    **dict.fromkeys(("qa_1", "qa_2"), ANY),
    "longbench_v2": CHOICE,
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


SPLITS = ("validation", "test", "train", "data")  # names of files that do not name a task


def read_items(file: Path) -> list[Item]:
    """The items of a file of any of these kinds.

    Raises ValueError, which names the line or the entry, for what is none. Lines end at line feeds alone: a
    JSON string may hold U+2028, U+0085 and other separators as they are.
    """
    text = file.read_text("utf-8")
    task = file.parent.name if file.stem in SPLITS else file.stem
    if text.lstrip().startswith("["):
        try:
            parts: list[Any] = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file}: not readable JSON: {error}") from error
        place = "entry"
    else:
        parts, place = text.split("\n"), "line"
    items = []
    for number, part in enumerate(parts, 1):
        if isinstance(part, str) and not part.strip():
            continue
        try:
            record = json.loads(part) if isinstance(part, str) else part
            if not isinstance(record, dict):
                raise TypeError(f"an item must be a JSON object; got {json.dumps(record)[:60]}")
            items.append(read_record(record, task))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}, {place} {number}: {reason}") from error
    return items


def read_record(record: dict[str, Any], stem: str) -> Item:
    """One item: LongBench has `answers`, InfiniteBench `answer`, RULER `outputs`, LongBench v2 `choice_A`."""
    if "choice_A" in record:
        return read_choices(record)
    task = str(record.get("dataset") or stem).removesuffix("_e")
    if task not in KINDS:
        raise ValueError(f"task must be one of {', '.join(sorted(KINDS))}; got {task!r}")
    kind = KINDS[task]
    if kind.measure in ("all", "any"):
        return read_ruler(record, task)
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


def read_choices(record: dict[str, Any]) -> Item:
    """An item of LongBench v2."""
    options = tuple(str(record[f"choice_{letter}"]) for letter in "ABCD")
    if record["answer"] not in tuple("ABCD"):
        raise ValueError(f"answer must be A, B, C or D; got {record['answer']!r}")
    lines = [f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True)]
    question = "\n".join([CHOICE.instruction, record["question"], *lines, "Answer:"])
    return Item("longbench_v2", record["context"], question, (record["answer"],), options)


def read_ruler(record: dict[str, Any], task: str) -> Item:
    """An item of RULER, whose `input` ends with the question, and with `answer_prefix` where it is apart."""
    answers = tuple(map(str, record["outputs"]))
    if not answers:
        raise ValueError("outputs must hold at least one; got none")
    return Item(task, record["input"] + record.get("answer_prefix", ""), "", answers, ())


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
    if measure == "all":  # RULER's string_match_all; `any` is its string_match_part
        return sum(x.lower() in answer.lower() for x in item.answers) / len(item.answers)
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
    if measure == "any":
        return float(expected.lower() in answer.lower())
    return float(expected.strip() in answer)
