"""An exported model equals the trained one, in our loader and in transformers."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tokenizers import Tokenizer

from entropic_jax.models.train import export, forward
from entropic_jax.models.train.trainer import stack
from tests.train.model import TINY


def test_reading_an_export_gives_the_parameters_back(exported: Path, params: dict[str, Any]):
    again, shape, step = export.read(exported)
    assert (shape, step) == (TINY, 7)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_newest_checkpoint_without_the_state_of_the_optimiser(tmp_path: Path, params: dict[str, Any]):
    with ocp.CheckpointManager(tmp_path) as manager:
        for step, factor in ((1, 2.0), (3, 1.0)):
            scaled = jax.tree.map(lambda x, by=factor: x * np.float32(by), params)
            saved = {"average": stack(scaled), "state": {"count": np.zeros((), np.int32)}}
            manager.save(step, args=ocp.args.StandardSave(saved))
    path, step = export.newest(tmp_path)
    assert step == 3
    assert isinstance(path["norm"], np.ndarray)
    jax.tree.map(np.testing.assert_array_equal, path, params)


def test_no_checkpoint_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        export.newest(tmp_path)


def test_another_shape_is_an_error(tmp_path: Path, params: dict[str, Any], tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="num_hidden_layers=3"):
        export.export(params, TINY._replace(num_hidden_layers=3), tokenizer, tmp_path)


def test_config_serves_both_generations_of_transformers(exported: Path):
    config = json.loads((exported / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == TINY.rope_theta
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.standard_promotion
def test_transformers_loads_it_with_the_loss_of_training(
    exported: Path, params: dict[str, Any], tokenizer: Tokenizer, texts: list[str]
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ids = tokenizer.encode(texts[0]).ids
    assert theirs(texts[0])["input_ids"] == ids
    assert theirs.decode(ids, skip_special_tokens=True) == texts[0]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 1
    window = np.array(ids[:1025], np.int32)[None]
    with torch.no_grad():
        expected = float(
            model(torch.tensor(window.astype(np.int64)), labels=torch.tensor(window.astype(int))).loss
        )
    _, nats = forward.loss(params, jnp.array(window), jnp.ones((1, 1024)), TINY)
    assert float(nats) / 1024 == pytest.approx(expected, abs=5e-3)
