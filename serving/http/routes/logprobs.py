"""Log-probabilities in the forms of the completions and chat endpoints."""

from collections.abc import Callable, Sequence
from typing import Any

from ...engine.interface import PromptToken
from ...request.transcript import Alternative, Token
from ..served_model import ServedModel
from .rendering import measured, number

Name = Callable[[int], str]


def naming(model: ServedModel, as_ids: bool | None) -> Name:
    """A function that names tokens: by their text, or as "token_id:17"."""
    return (lambda token: f"token_id:{token}") if as_ids else model.token_text


def of_completion(
    prompt: Sequence[PromptToken], tokens: Sequence[Token], most: int, offset: int, name: Name
) -> dict[str, Any]:
    """The four lists of completions, with each token's measures.

    Args:
        prompt: tokens of an echoed prompt; empty without echo.
        tokens: tokens generated since the last chunk.
        most: alternatives listed per token at most, in addition to the token itself.
        offset: characters of the text before the first of these tokens.
        name: names a token, as `naming` returns it.
    """
    offsets, position = [], offset
    for text in [*(token.text for token in prompt), *(token.text for token in tokens)]:
        offsets.append(position)
        position += len(text)
    entries = [*prompt, *tokens]
    nothing: list[None] = [None] * len(prompt)
    return {
        "text_offset": offsets,
        "token_logprobs": [number(token.logprob) for token in entries],
        "tokens": [name(token.id) for token in entries],
        "top_logprobs": [
            None if token.logprob is None else listed(token.id, token.logprob, token.top, most, name)
            for token in entries
        ],
        **{
            measure: nothing + measured(tokens, measure)
            for measure in ("entropy", "temperature", "kept_fraction", "surprisal")
        },
    }


def listed(
    token: int, logprob: float, top: Sequence[Alternative], most: int, name: Name
) -> dict[str, float | None]:
    """The likeliest tokens and the one that came, by name.

    Different tokens may have the same name, as parts of characters do. The most probable of them counts, so
    that the largest value belongs to the most probable token.

    Args:
        token: id of the token that came.
        logprob: its natural log-probability.
        top: the likeliest tokens, in order.
        most: alternatives listed at most, in addition to the token itself.
        name: names a token, as `naming` returns it.
    """
    logprobs: dict[str, float | None] = {}
    for alternative in [*top[:most], Alternative(token, logprob)]:
        logprobs.setdefault(name(alternative.id), number(alternative.logprob))
    return logprobs


def of_chat(tokens: Sequence[Token], most: int, name: Name) -> dict[str, Any]:
    """One entry a token.

    Args:
        tokens: tokens generated since the last chunk.
        most: alternatives listed per token at most.
        name: names a token, as `naming` returns it.
    """

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = name(token)
        value = number(logprob)
        # Some clients require a number, so −∞ becomes a very low one.
        return {"token": text, "logprob": -9999.0 if value is None else value, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **entry(token.id, token.logprob),
                "top_logprobs": [entry(*alternative) for alternative in token.top[:most]],
                **{
                    measure: number(token.metrics.get(measure))
                    for measure in ("entropy", "temperature", "kept_fraction", "surprisal")
                },
            }
            for token in tokens
        ]
    }


def of_prompt(prompt: Sequence[PromptToken], most: int, name: Name) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` of vLLM: for each token of the prompt but the first, the candidates by id.

    Args:
        prompt: tokens of the prompt, in order.
        most: alternatives listed per token at most, in addition to the token itself.
        name: names a token, as `naming` returns it.
    """
    rows: list[dict[str, Any] | None] = []
    for token in prompt:
        if token.logprob is None:
            rows.append(None)
            continue
        ranks = {alternative.id: rank for rank, alternative in enumerate(token.top, 1)}
        entries = {alternative.id: alternative.logprob for alternative in token.top[:most]}
        entries.setdefault(token.id, token.logprob)
        rows.append(
            {
                str(token_id): {
                    "logprob": number(value),
                    "rank": ranks.get(token_id),
                    "decoded_token": name(token_id),
                }
                for token_id, value in entries.items()
            }
        )
    return rows
