"""The files of a model directory that describe its tokenizer, beside the vocabulary in tokenizer.json.

They may add tokens, and their tokenizer class may replace parts of tokenizer.json. What follows from both is
what transformers 5 makes of the same files.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from .config import (
    LARGEST_JSON,
    LARGEST_SETTINGS,
    ModelError,
    abbreviate,
    is_integer,
    read_json,
    require_file,
)
from .text_growth import check_growth
from .tokenizer_classes import COHERE, QWEN, as_class, class_of, default_tokens

# Fields of tokenizer_config.json that name a token for chat templates.
SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SURROUNDING = ("add_bos_token", "add_eos_token")
OF_MODEL = "model_specific_special_tokens"
EXTRA, OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
NAMES, ADDED = "special_tokens_map.json", "added_tokens.json"  # as transformers wrote until 2023
PROBED = 64  # tokens that are decoded when a tokenizer is read
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Settings = Mapping[str, Any]


def read_backend(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of tokenizer.json and the files next to it, and the settings of tokenizer_config.json.

    What stands around a text is what tokenizer.json adds, as in transformers 5, whatever `add_bos_token` and
    `add_eos_token` say. Raises ModelError.
    """
    file = directory / "tokenizer.json"
    text = read_text(file, LARGEST_JSON)
    with refusing(file):
        backend = tokenizers.Tokenizer.from_str(text)
        check_growth(backend)
        backend.no_truncation()  # neither is used, and either may fail or fill the memory
        backend.no_padding()
    names = {name: value for name, value in read_settings(directory).items() if name not in SURROUNDING}
    present = backend.get_added_tokens_decoder()
    settings = directory / "config.json"
    raw = read_json(settings, LARGEST_SETTINGS) if is_there(settings) else {}
    if (name := class_of(names, raw, text, backend)) is not None:
        names = {**default_tokens(name), **names}
        backend = as_class(backend, name, names)
    with refusing(file):
        backend.encode("A \ufdd0 b")  # some find out that they lack a token for what is unknown
        first = range(min(PROBED, backend.get_vocab_size()))
        for tokens in (*([token] for token in first), list(first)):
            backend.decode(tokens)  # some decoders panic
    backend.add_tokens(added_tokens(directory, names, backend, present))
    backend.add_tokens(stated_again(name, names, present))
    return backend, names


@contextlib.contextmanager
def refusing(file: Path) -> Iterator[None]:
    """Raises ModelError for whatever `tokenizers` raises about tokenizer.json."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except BaseException as error:  # the bindings raise nothing narrower, and panics are no `Exception`
        reason = abbreviate(" ".join(str(error).split()))[1:-1]
        raise ModelError(f"{file} is not readable by tokenizers: {reason}") from None


def stated_again(name: str | None, settings: Settings, present: Mapping[int, AddedToken]) -> list[AddedToken]:
    """The tokens that a class adds a second time, which sets the flags of those that were there.

    Args:
        name: the class, if one has replaced parts of tokenizer.json.
        settings: the settings, which name or list the tokens.
        present: the added tokens of tokenizer.json by id.
    """
    if name not in (QWEN, COHERE):
        return []
    stated = settings.get("added_tokens_decoder")
    known = present.values() if stated is None else map(token_of, stated.values())
    by_text = {token.content: token for token in known}
    named = [settings[kind] for kind in SPECIAL_TOKENS if settings.get(kind) is not None]
    values = [by_text.get(content(value), value) for value in named]
    values += [value for kind, value in settings.items() if is_other(kind) and is_token(value)]
    values += (settings.get(OF_MODEL) or {}).values()
    extra = settings.get(EXTRA, settings.get(OLDER_EXTRA)) or []
    values += extra.values() if isinstance(extra, Mapping) else extra
    if name == QWEN:
        return [AddedToken(token.content, special=True) for token in map(token_of, values)]
    tokens = [token_of(value) for value in values]
    for token in tokens:
        token.special = True
    return tokens


def read_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the tokens of special_tokens_map.json. ModelError for other types."""
    settings = read_checked(directory / "tokenizer_config.json", check_settings, check_tokens)
    if OLDER_EXTRA in settings and not settings.get(EXTRA):
        settings[EXTRA] = settings.pop(OLDER_EXTRA)
    of_model = {n: settings.pop(n) for n in list(settings) if isinstance(settings[n], str) and is_other(n)}
    if isinstance(settings.get(EXTRA), Mapping):
        of_model |= settings.pop(EXTRA)
    if of_model:
        settings[OF_MODEL] = of_model
    named = {} if "added_tokens_decoder" in settings else read_names(directory, settings.get(EXTRA))
    return settings | named


def read_checked(file: Path, *checks: Callable[[Any], None]) -> dict[str, Any]:
    """The object in a JSON file that the checks accept; {} if there is no file. Raises ModelError.

    Args:
        file: the path of the file.
        *checks: functions that raise ModelError for contents that they refuse.
    """
    values = read_json(file, LARGEST_SETTINGS) if is_there(file) else {}
    try:
        for check in (*checks, check_unicode):
            check(values)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    return values


def check_unicode(value: Any) -> None:
    """Raise ModelError for a string with half of a surrogate pair, anywhere in what a JSON file holds."""
    if isinstance(value, str) and not is_unicode(value):
        raise ModelError(f"strings must be Unicode; got {abbreviate(value)}")
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    for part in value if isinstance(value, list) else ():
        check_unicode(part)


def is_other(name: str) -> bool:
    """Whether a field names a token that only models of some kind have."""
    return name.endswith("_token") and name not in SPECIAL_TOKENS


def read_names(directory: Path, extra: Any) -> dict[str, Any]:
    """The tokens that special_tokens_map.json names, which overrule those of tokenizer_config.json.

    To a list of `extra` tokens, it adds.
    """
    names = read_checked(directory / NAMES, check_names, check_tokens)
    kept = {*SPECIAL_TOKENS, EXTRA, OLDER_EXTRA, *(n for n in names if is_other(n) and is_token(names[n]))}
    names = {name: special(value) for name, value in names.items() if name in kept}
    if isinstance(names.get(EXTRA), list) and isinstance(extra, list):
        names[EXTRA] = [*extra, *names[EXTRA]]
    return names


def special(value: Any) -> Any:
    """A token, or a list of them, as special_tokens_map.json states it: special in any case."""
    if isinstance(value, list):
        return [special(token) for token in value]
    return {**value, "special": True} if isinstance(value, Mapping) and "content" in value else value


def added_tokens(
    directory: Path, settings: Settings, backend: tokenizers.Tokenizer, present: Mapping[int, AddedToken]
) -> list[AddedToken]:
    """The tokens that files beside tokenizer.json state, in the order in which they are added.

    Those that the vocabulary has keep their ids, others follow the last one.

    Args:
        directory: the directory of the model.
        settings: the settings, checked.
        backend: the tokenizer to which they are added.
        present: the added tokens of tokenizer.json by id.
    """
    named = [settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None]
    listed, extra = settings.get(EXTRA), settings.get(EXTRA, settings.get(OLDER_EXTRA)) or []
    listed = [*named, *(listed if isinstance(listed, list) else [])]
    texts = {content(value) for value in listed if isinstance(value, str) or value.get("special")}
    named += [value for name, value in settings.items() if is_other(name) and is_token(value)]
    named += list((settings.get(OF_MODEL) or {}).values())
    if isinstance(extra, Mapping):  # of special_tokens_map.json
        named, extra = [*named, *extra.values()], []
    stated = settings.get("added_tokens_decoder")
    if stated is not None:
        by_id = {int(number): token_of(value) for number, value in stated.items()}
    else:
        by_id = {n: AddedToken(t, special=t in texts, normalized=t not in texts) for t, n in added(directory)}
        by_id |= present
    result = [by_id[number] for number in sorted(by_id)]
    known = {token.content for token in [*result, *backend.get_added_tokens_decoder().values()]}
    new: dict[str, AddedToken] = {}
    for value in [*named, *extra]:
        if content(value) not in known:
            new.setdefault(repr(value), token_of(value))
    result += new.values()
    of_names = set(map(content, named))
    for token in result:
        token.special = token.special or token.content in of_names
    return result


def added(directory: Path) -> Iterable[tuple[str, int]]:
    """The tokens and ids of added_tokens.json; none if there is no such file. Raises ModelError."""
    file = directory / ADDED
    if not is_there(file):
        return ()
    tokens = read_json(file, LARGEST_SETTINGS)
    for token, number in tokens.items():
        if not is_unicode(token) or not is_integer(number) or number < 0:
            raise ModelError(f"{file}: {abbreviate(token)} must have an id; got {abbreviate(number)}")
    return tokens.items()


def content(token: Any) -> str:
    """The text of a token that is stated as a string or as an object."""
    return token["content"] if isinstance(token, Mapping) else token


def token_of(token: Any) -> AddedToken:
    """A token that is stated as a string or as an object, or that is one."""
    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(content(token), **{flag: token[flag] for flag in FLAGS if token.get(flag) is not None})


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a file of at most so many bytes. Raises ModelError for what is larger, or not UTF-8."""
    size = require_file(path).stat().st_size
    if size > max_bytes:
        raise ModelError(f"{path} must be at most {max_bytes} bytes; got {size}")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} must be UTF-8: {error}") from None
    except OSError as error:
        raise ModelError(f"{path} must be a file that can be read: {error.strerror}") from None


def is_there(path: Path) -> bool:
    """Whether the directory lists a file, which may be a link to nothing."""
    return os.path.lexists(path)


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates, which UTF-8 cannot encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_token(value: Any) -> bool:
    """Whether a value states a token: a string, or an object with its content and flags."""
    flags, text = True, value
    if isinstance(value, Mapping):
        text, flags = value.get("content"), all(isinstance(value.get(flag), bool | None) for flag in FLAGS)
    return flags and isinstance(text, str) and is_unicode(text)


def check_names(settings: Settings) -> None:
    """Raises ModelError unless the fields that name a token have the right types."""
    for name in SPECIAL_TOKENS:
        value = settings.get(name)
        if value is not None and not is_token(value):
            raise ModelError(
                f"{name} must be null, a string, or an object with content; got {abbreviate(value)}"
            )


def check_tokens(settings: Settings) -> None:
    """Raises ModelError unless the fields that list tokens have the right types."""
    for name in (EXTRA, OLDER_EXTRA):
        value = settings.get(name)
        values = list(value.values()) if isinstance(value, Mapping) else value
        if value is not None and not (isinstance(values, list) and all(map(is_token, values))):
            raise ModelError(f"{name} must be null or a list of tokens; got {abbreviate(value)}")
    stated = settings.get(OF_MODEL) or {}
    if not isinstance(stated, Mapping) or not all(map(is_token, stated.values())):
        raise ModelError(f"{OF_MODEL} must be null or an object of tokens; got {abbreviate(stated)}")
    stated = settings.get("added_tokens_decoder", {})
    numbered = isinstance(stated, Mapping) and all(n.isdecimal() and len(n) < 12 for n in stated)
    if not numbered or not all(isinstance(t, Mapping) and is_token(t) for t in stated.values()):
        raise ModelError(f"added_tokens_decoder must be an object of ids to tokens; got {abbreviate(stated)}")


def check_settings(settings: Settings) -> None:
    """Raises ModelError unless the fields of tokenizer_config.json that are used have the right types."""
    check_names(settings)
    for name in (*SURROUNDING, "split_special_tokens"):
        if not isinstance(settings.get(name), bool | None):
            raise ModelError(f"{name} must be null, true or false; got {abbreviate(settings[name])}")
    template = settings.get("chat_template")
    named = isinstance(template, list) and all(
        isinstance(t, Mapping) and all(isinstance(t.get(key), str) for key in ("name", "template"))
        for t in template
    )
    if template is not None and not isinstance(template, str) and not named:
        raise ModelError(
            "chat_template must be null, a string, or a list of objects with name and template; "
            f"got {abbreviate(template)}"
        )
