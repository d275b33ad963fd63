"""Names of drafters, signals and rules, as the results have them."""

SUFFIX, PRUNED, HEAD = "suffix", "pruned", "head"
DRAFT_ENTROPY, TOP_PROBABILITY, ADAEDL = "draft entropy", "top probability", "AdaEDL"
MATCH, PREVIOUS, POSITION, SHUFFLED = "match length", "previous entropy", "position", "shuffled"
FIXED, LAW, ORACLE = "fixed", "law", "oracle"
COMPILED, EVERY = "compiled", "every"  # sizes of passes: those of the engine, or any number of tokens


def signal_of(drafter: str) -> str:
    """The signal that the shipped law reads of a drafter."""
    return MATCH if drafter == SUFFIX else DRAFT_ENTROPY
