"""Generated documents whose questions have their answers far above, which rewards the use of long context.

A document is real source code with *facts* scattered through it and, later, *questions* that repeat the
head of a fact and must be completed with its tail. Every fact and question is valid Python. The first line
of a document is `HEADER`, which no other text has, so that a model can tell these documents from source.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

WORDS = """amber anchor apple arrow autumn badger bamboo banner barley basket beacon beaver bishop blanket
blossom bottle bramble breeze bridge bronze bubble bucket butter button cabin cactus camel candle canyon
carbon carpet castle cedar cellar cherry circle citrus clover cobalt coffee comet copper coral cotton
cradle crater cricket crystal cypress daisy dancer desert diamond dolphin donkey dragon eagle ember engine
falcon feather ferret fiddle flame flower forest fossil fountain fox galaxy garden garlic ginger glacier
goblet granite grape guitar hammer harbor hazel helmet heron hollow honey hunter indigo island ivory jacket
jaguar jasmine jungle juniper kettle kitten ladder lagoon lantern laurel lemon leopard lily linen lizard
locket lotus magnet maple marble meadow melon mirror monkey mosaic mountain muffin nectar needle nickel
north oak ocean olive onion opal orange orchid otter oyster paddle palace panda parrot pebble pepper
piano pigeon pillow planet plum pocket pony poppy prairie pumpkin quartz quiver rabbit radish raven ribbon
river robin rocket rose ruby saddle saffron salmon sandal satin scarlet shadow shell silver smoke sparrow
spider spring spruce squirrel stable star storm sugar summer sunset swallow temple thistle thunder tiger
timber tomato topaz trumpet tulip tunnel turtle umbrella valley vanilla velvet village violet violin
walnut walrus water whale wheat whisper willow window winter wizard wolf yellow zebra zephyr""".split()

HEADER = "# exercise: recall the facts stated above\n"
ANSWER_WEIGHT, CHANCE_WEIGHT = 4.0, 0.1
FAR_SHARE = 0.6  # share of documents with the facts near the top and the questions near the end


class Fact(NamedTuple):
    """Text to state once, and a question that ends where its answer starts."""

    statement: str
    question: str
    answer: str


class Piece(NamedTuple):
    """A stretch of text with its weight in the loss."""

    text: str
    weight: float  # of the loss on its tokens


def _name(rng: np.random.Generator) -> str:
    return "_".join(rng.choice(WORDS, 2))


def key_value(rng: np.random.Generator) -> Fact:
    """An entry of a table, and the assertion that recalls it."""
    key, value = _name(rng), rng.choice(WORDS)
    return Fact(f'table["{key}"] = "{value}"\n', f'assert table["{key}"] == "', f'{value}"\n')


def needle(rng: np.random.Generator) -> Fact:
    """A number in a comment, and the same comment that recalls it."""
    key, value = " ".join(rng.choice(WORDS, 2)), int(rng.integers(100, 1000))
    head = f"# The secret number of the {key} is "
    return Fact(f"{head}{value}.\n", head, f"{value}.\n")


def variable(rng: np.random.Generator) -> Fact:
    """A value that has passed through one to three names; the answer goes back through all of them."""
    names = [_name(rng) for _ in range(rng.integers(1, 4))]
    value = rng.choice(WORDS)
    lines = [f'{names[0]} = "{value}"\n'] + [f"{b} = {a}\n" for a, b in itertools.pairwise(names)]
    trace = [*names[-2::-1], f'"{value}"\n']
    return Fact("".join(lines), f"assert {names[-1]} == ", " == ".join(trace))


def definition(rng: np.random.Generator) -> Fact:
    """A short function, and its repetition."""
    name, (a, b, c) = _name(rng), rng.choice(WORDS, 3)
    operator, number = rng.choice(list("+-*")), int(rng.integers(2, 100))
    head, body = f"def {name}(", f"{a}, {b}):\n    return {c}({a} {operator} {number}, {b})\n"
    return Fact(f"{head}{body}\n\n", f"\n\n# as above\n{head}", f"{body}\n\n")


KINDS: dict[str, Callable[[np.random.Generator], Fact]] = {
    "key_value": key_value,
    "needle": needle,
    "variable": variable,
    "definition": definition,
}


def document(rng: np.random.Generator, filler: str, characters: int) -> list[Piece]:
    """Pieces of a document: the header, filler, facts, and questions after them.

    Args:
        rng: the random generator of facts and places.
        filler: text of at least `characters` characters.
        characters: approximate length of the document after its header.
    """
    kinds = list(KINDS) if rng.random() < 0.3 else [rng.choice(list(KINDS))]
    dense = rng.random() < 0.35
    most = max(2.0, characters / (90 if dense else 400))
    count = int(np.exp(rng.uniform(np.log(max(2, most / 12)), np.log(most))))
    edge = 0.25 * rng.random() ** 3 if rng.random() < FAR_SHARE else None
    events: list[tuple[float, list[Piece]]] = []
    for _ in range(count):
        fact = KINDS[rng.choice(kinds)](rng)
        place = rng.uniform(0, edge or 0.85)
        events.append((place, [Piece(fact.statement, CHANCE_WEIGHT)]))
        for _ in range(rng.integers(1, 3)):
            question = [Piece(fact.question, CHANCE_WEIGHT), Piece(fact.answer, ANSWER_WEIGHT)]
            events.append((rng.uniform(1 - edge if edge else place, 1), question))
    events.sort(key=lambda event: event[0])
    spent = sum(len(p.text) for _, pieces in events for p in pieces)
    lines = filler[: max(0, characters - spent)].splitlines(keepends=True)
    result = [Piece(HEADER, CHANCE_WEIGHT)]
    done = 0
    for place, pieces in events:
        upto = int(place * len(lines))
        result.append(Piece("".join(lines[done:upto]), 1.0))
        result += pieces
        done = upto
    result.append(Piece("".join(lines[done:]), 1.0))
    return [piece for piece in result if piece.text]
