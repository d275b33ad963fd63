"""Fill in the middle: the prompt for the text between a prefix and a suffix, in the format of the model."""

from collections.abc import Mapping
from typing import NamedTuple

from entropic_jax import models

from . import RequestError

ANCHOR = "☺"  # before a text that is continued, so that no space is added to its beginning


class Format(NamedTuple):
    """The special tokens of a format: prefix and suffix follow theirs, and the text in the middle comes last.

    Tokenizers that have `begin`, `suffix` and `middle` use the format.
    """

    models: str  # that are trained with it
    begin: str  # before the prefix
    suffix: str  # before the suffix
    middle: str  # behind it
    ends: tuple[str, ...]  # tokens that end the text in the middle, beside the model's own stop tokens
    glued: bool = False  # whether the suffix continues a text: the tokenizer would add a space to it


FORMATS: Mapping[str, Format] = {
    "pipes": Format(
        "Qwen2.5-Coder, CodeGemma",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    "starcoder": Format(
        "StarCoder, StarCoder2, Granite Code",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    "deepseek": Format(
        "DeepSeek-Coder",
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
        ("<｜end▁of▁sentence｜>", "<|EOT|>"),
    ),
    "codellama": Format("CodeLlama", "▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), True),
}
"""Sources: the model cards of these models, and Rozière et al. 2023 (arXiv 2308.12950) for the last."""


class Infilling(NamedTuple):
    """A format with the token ids of a tokenizer."""

    tokenizer: models.Tokenizer
    format: Format
    begin: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    def prompt(self, prefix: list[int], suffix: str, special: bool) -> list[int]:
        """The tokens of a prompt, behind which the model writes what stands between prefix and suffix.

        Args:
            prefix: tokens before the gap, without special tokens around them.
            suffix: text after the gap.
            special: whether the prompt begins with what the model expects at the beginning of a text (BOS).
        """
        return [
            *(self._beginning() if special else ()),
            self.begin,
            *prefix,
            self.suffix,
            *self._continued(suffix),
            self.middle,
        ]

    def _beginning(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        bare, full = (self.tokenizer.encode("a", special) for special in (False, True))
        first = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:first]

    def _continued(self, text: str) -> list[int]:
        """The tokens of a text that stands behind another one."""
        if not self.format.glued:
            return self.tokenizer.encode(text, special=False)
        anchored = self.tokenizer.encode(ANCHOR + text, special=False)
        return anchored[len(self.tokenizer.encode(ANCHOR, special=False)) :]


def infilling_of(tokenizer: models.Tokenizer) -> Infilling | None:
    """The format of the special tokens that a tokenizer has; None if it has those of no format."""
    number = tokenizer.backend.token_to_id
    for form in FORMATS.values():
        ids = [number(token) for token in (form.begin, form.suffix, form.middle)]
        if None not in ids:
            begin, suffix, middle = (i for i in ids if i is not None)
            ends = tuple(i for token in form.ends if (i := number(token)) is not None)
            return Infilling(tokenizer, form, begin, suffix, middle, ends)
    return None


def check(infilling: Infilling | None) -> Infilling:
    """The format of a model. RequestError if it has none."""
    if infilling is None:
        trained = "; ".join(form.models for form in FORMATS.values())
        raise RequestError(
            "suffix must be null for a model without fill-in-the-middle tokens, as those of "
            f"{trained}; got a text",
            "suffix",
        )
    return infilling
