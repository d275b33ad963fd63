"""The end of the context: the engine and offline generation stop at the same token."""

import dataclasses

import numpy as np
import pytest

from entropic_jax import LLM, SamplingParams, models
from entropic_jax.serving.offline.engine import Engine
from entropic_jax.serving.request import Request, RequestError

LONGEST = 40  # not a multiple of a page


@pytest.mark.exhaustive
def test_texts_end_with_the_context_of_the_model(tmp_path):
    """The last position holds a token, and the token that it predicts is the last of the text."""
    free = models.load()
    config = dataclasses.replace(free.config, max_position_embeddings=LONGEST)
    models.save(dataclasses.replace(free, config=config), tmp_path)
    prompt = np.random.default_rng(0).integers(3, 500, LONGEST + 1).tolist()
    lengths = LONGEST - 9, LONGEST - 2, LONGEST - 1

    def request(length):
        return Request(prompt=prompt[:length], temperature=0.0, max_tokens=9, ignore_eos=True)

    offline, unlimited = Engine(models.load(tmp_path)), Engine(free)
    completions = [*offline.batch([request(n) for n in lengths])]
    assert {completion.finish_reason for completion in completions} == {"length"}
    actual = [completion.token_ids for completion in completions]
    expected = [completion.token_ids for completion in unlimited.batch([request(n) for n in lengths])]
    assert actual == [tokens[: LONGEST + 1 - n] for tokens, n in zip(expected, lengths, strict=True)]
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with LLM(tmp_path, preset="off", max_num_seqs=4) as llm:
        results = llm.generate([{"prompt_token_ids": prompt[:n]} for n in lengths], sampling)
        assert [list(result.outputs[0].token_ids) for result in results] == actual
        assert {result.outputs[0].finish_reason for result in results} == {"length"}
        for length in (LONGEST, LONGEST + 1):
            message = f"prompt must have between 1 and {LONGEST - 1} tokens.*; got {length}"
            with pytest.raises(RequestError, match=message):
                llm.generate([{"prompt_token_ids": prompt[:length]}], sampling)
            with pytest.raises(RequestError, match=message):
                offline.prompt_tokens(request(length))
