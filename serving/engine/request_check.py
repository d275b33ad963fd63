"""Checks of a request against its model and the engine's programs, before it is queued."""

from collections.abc import Sequence

from entropic_jax.sampling.constraints import MAX_LOGPROBS

from ..request import RequestError
from ..request.token_ids import check_parameters, check_token_ids
from .interface import EngineRequest
from .state_updates import BIASES, STOPS


def check_request(engine_request: EngineRequest, num_stop_tokens: int, vocabulary: int) -> None:
    """Raise RequestError if the request exceeds a compiled limit or names a token outside the vocabulary.

    Args:
        engine_request: the request to queue.
        num_stop_tokens: tokens that end its text, the model's included.
        vocabulary: tokens of the model.
    """
    request = engine_request.request
    for name, number, most in (
        ("stop_token_ids", num_stop_tokens, STOPS),
        ("logit_bias", len(request.logit_bias), BIASES),
    ):
        if number > most:
            raise RequestError(f"{name} must have at most {most} entries; got {number}", name)
    for name, number in (
        ("logprobs", engine_request.logprobs),
        ("prompt_logprobs", engine_request.prompt_logprobs),
    ):
        if (number or 0) > MAX_LOGPROBS:
            raise RequestError(f"{name} must be at most {MAX_LOGPROBS}; got {number}", name)
    check_parameters(vars(request), vocabulary)


def check_adapter(engine_request: EngineRequest, enabled: bool) -> None:
    """Raise RequestError for a request that names an adapter where none can be loaded."""
    if engine_request.adapter is not None and not enabled:
        name = engine_request.adapter[:200]
        raise RequestError(f"adapter must be None unless enable_lora is on; got {name!r}", "model")


def check_prompt(tokens: Sequence[int], context: int, vocabulary: int) -> None:
    """Raise RequestError for a prompt that is empty, fills the context, or holds an unknown token.

    Args:
        tokens: the tokens of the prompt.
        context: positions of a sequence, at most.
        vocabulary: tokens of the model.
    """
    if not 0 < len(tokens) < context:
        raise RequestError(
            f"prompt must have between 1 and {context - 1} tokens, so that one can be generated; "
            f"got {len(tokens)}",
            "prompt",
        )
    check_token_ids("prompt", tokens, vocabulary)
