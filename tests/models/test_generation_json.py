"""generation_config.json: what is refused at load is what the sampling parameters do not accept."""

import json

import pytest

from entropic_jax.models import Config, ModelError
from entropic_jax.models.generation_json import SAMPLING, read_generation
from entropic_jax.parameter_tables.sampling_params import IN_GENERATION_CONFIG, PARAMETERS
from entropic_jax.parameter_tables.table import ParameterError

CONFIG = Config("LlamaForCausalLM", 61, 16, 24, 2, 4, 2)
VALUES = [
    "hot",
    True,
    [],
    -2,
    -1,
    -0.5,
    0,
    0.5,
    1,
    1.0,
    1.5,
    2,
    1000,
    1001,
    2**31,
    float("nan"),
    float("inf"),
]


def is_accepted(name, value):
    try:
        PARAMETERS[name].accepts.check(name, value)
    except ParameterError:
        return False
    return True


@pytest.mark.parametrize("name", IN_GENERATION_CONFIG)
def test_values_are_those_of_the_sampling_parameters(name, tmp_path):
    assert tuple(SAMPLING) == IN_GENERATION_CONFIG
    file = tmp_path / "generation_config.json"
    for value in VALUES:
        file.write_text(json.dumps({name: value}))
        if is_accepted(name, value):
            assert read_generation(file, CONFIG) == {name: value}
            continue
        with pytest.raises(ModelError, match=rf"generation_config\.json: {name} must be (a|an) "):
            read_generation(file, CONFIG)
        file.write_text(json.dumps({name: value, "do_sample": False}))
        assert read_generation(file, CONFIG)["do_sample"] is False
