"""Tokenizer classes that replace parts of tokenizer.json by rules of their own, as in transformers 5.

Such a class takes the vocabulary and the merges of the file, and what stands around a text; normalizer,
pre-tokenizer and decoder are the class's. Which class reads a directory follows from the one that the files
state and from `model_type`.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

LOG = logging.getLogger("entropic_jax.models")
LLAMA, GEMMA, QWEN, COHERE = "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "CohereTokenizer"
GPT, CODEGEN, NEOX = "GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer"
SPACE, END = "▁", "<|endoftext|>"
# How byte-level tokenizers split a text, with what they do to digits in place of %s.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
NAMES = ("unk_token", "bos_token", "eos_token", "pad_token", "cls_token", "sep_token", "mask_token")
# The tokens that a class names where the files do not, in the order of NAMES.
TOKENS: dict[str, tuple[str | None, ...]] = {
    LLAMA: ("<unk>", "<s>", "</s>"),
    GEMMA: ("<unk>", "<bos>", "<eos>", "<pad>", None, None, "<mask>"),
    QWEN: (END, None, END, END),
    COHERE: ("<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>", "<CLS>", "<SEP>", "<MASK_TOKEN>"),
    GPT: (END, END, END),
    CODEGEN: (END, END, END),
    NEOX: (END, END, END, "<|padding|>"),
}
REGISTERED = {  # the class of a model_type, where the files state none
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), GEMMA),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), QWEN),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"), QWEN),
    **dict.fromkeys(("cohere", "cohere2"), COHERE),
    **dict.fromkeys(("phi", "starcoder2"), GPT),
    "olmoe": NEOX,
}
TOKENIZER_JSON_ALONE = {  # values of model_type for which transformers reads no class
    *("mistral", "ministral", "ministral3", "mistral3", "mixtral", "ernie4_5", "ernie4_5_moe", "phi3"),
    *("olmo2", "olmo3", "granite", "granitemoe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "minimax_m2"),
    *("nemotron", "stablelm", "llava", "llava_next"),
}
WHATEVER_IS_STATED = ("qwen2",)  # values of model_type of which the registered class reads all directories
UNKNOWN = {  # other classes that replace parts of a BPE tokenizer.json
    *("CodeLlamaTokenizer", "Qwen3_5Tokenizer", "RobertaTokenizer", "WhisperTokenizer", "CLIPTokenizer"),
    *("DebertaTokenizer", "LayoutLMv3Tokenizer", "OpenAIGPTTokenizer", "NougatTokenizer"),
    *("SeamlessM4TTokenizer", "NllbTokenizer", "Siglip2Tokenizer", "EsmcTokenizer", "HerbertTokenizer"),
}


class Rules(NamedTuple):
    """The parts of a tokenizer that a class states."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    of_sentencepiece: bool = False  # whether what is unknown is spelt in bytes


def rules_of(name: str, settings: Mapping[str, Any]) -> Rules:
    """The rules of a class.

    Args:
        name: the class.
        settings: tokenizer_config.json, whose `add_prefix_space` and `legacy` count.
    """
    stated = settings.get("add_prefix_space")
    prefix = stated is not False if name == LLAMA else bool(stated)
    if name == LLAMA:
        scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        return Rules(None, pre_tokenizers.Metaspace(SPACE, scheme, split=False), spelt(*strip), True)
    if name == GEMMA:
        spaces = pre_tokenizers.Split(" ", "merged_with_previous")
        return Rules(normalizers.Replace(" ", SPACE), spaces, spelt(), True)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=name != QWEN)
    splits = {
        QWEN: [pre_tokenizers.Split(Regex(WORDS % r"\p{N}"), "isolated")],
        COHERE: [pre_tokenizers.Digits(individual_digits=True)],
    }
    before = splits.get(name)
    return Rules(
        None if name in (GPT, CODEGEN) else normalizers.NFC(),
        bytes_of if before is None else pre_tokenizers.Sequence([*before, bytes_of]),
        decoders.ByteLevel(),
    )


def spelt(*after: Any) -> Any:
    """The decoder of vocabularies of SentencePiece, and what follows it."""
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])


def class_of(
    settings: Mapping[str, Any], raw: Mapping[str, Any], text: str, backend: tokenizers.Tokenizer
) -> str | None:
    """The class whose rules replace parts of tokenizer.json; None if what it says stands.

    Args:
        settings: the settings, which may name the class.
        raw: config.json.
        text: tokenizer.json.
        backend: what it describes.
    """
    stated, model_type = settings.get("tokenizer_class") or raw.get("tokenizer_class"), raw.get("model_type")
    model_type = model_type if isinstance(model_type, str) else None
    registered = None if model_type is None else REGISTERED.get(model_type)
    name = stated.removesuffix("Fast") if isinstance(stated, str) and stated else registered
    name = registered if model_type in WHATEVER_IS_STATED else name
    if model_type in TOKENIZER_JSON_ALONE or not isinstance(backend.model, BPE):
        return None
    if name in UNKNOWN:
        LOG.warning("tokenizer.json is read as it is: %s may replace parts of it in transformers", name)
    if name not in TOKENS or (name == LLAMA and '"ByteLevel"' in text):
        return None
    return name


def default_tokens(name: str) -> dict[str, str]:
    """The tokens that a class names where the files do not."""
    return {kind: token for kind, token in zip(NAMES, TOKENS[name], strict=False) if token is not None}


def as_class(backend: tokenizers.Tokenizer, name: str, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The vocabulary of a tokenizer with the rules of a class; it has no added tokens.

    Args:
        backend: what tokenizer.json describes; consumed.
        name: the class.
        settings: the settings, with the tokens of the class.
    """
    model, rules = backend.model, rules_of(name, settings)
    model.fuse_unk = model.byte_fallback = rules.of_sentencepiece
    model.ignore_merges, model.unk_token, model.dropout = False, None, None
    unknown = settings.get("unk_token")
    unknown = unknown.get("content") if isinstance(unknown, Mapping) else unknown
    if name == GEMMA and unknown is not None:
        model.unk_token = unknown
    result = tokenizers.Tokenizer(model)
    result.pre_tokenizer, result.decoder = rules.pre_tokenizer, rules.decoder
    if rules.normalizer is not None:
        result.normalizer = rules.normalizer
    if backend.post_processor is not None and name != NEOX:
        result.post_processor = backend.post_processor
    replaced = [part for part in ("normalizer", "pre_tokenizer") if differ(part, backend, result, name)]
    if replaced:
        LOG.warning(
            "tokenizer.json: the rules of class %s replace its %s, as in transformers 5; with "
            '"tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, they stand',
            name,
            " and ".join(replaced),
        )
    return result


def differ(part: str, before: tokenizers.Tokenizer, after: tokenizers.Tokenizer, name: str) -> bool:
    """Whether a class splits texts otherwise than tokenizer.json says; Llama's, that differs, is the rule.

    Args:
        part: the name of the part.
        before: what tokenizer.json describes.
        after: the tokenizer with the rules of the class.
        name: the class.
    """
    stated, rule = (described(getattr(backend, part)) for backend in (before, after))
    no_spaces_left = name == GEMMA and part == "pre_tokenizer" and stated is None
    return name != LLAMA and not no_spaces_left and stated != rule


def described(part: Any) -> Any:
    """A part of a tokenizer as JSON, without what concerns offsets alone; None if there is no such part."""

    def without_offsets(value: dict[str, Any]) -> dict[str, Any]:
        return {name: inner for name, inner in value.items() if name != "trim_offsets"}

    return None if part is None else json.loads(part.__getstate__(), object_hook=without_offsets)
