"""Decoder-only language models: Hugging Face directories in, functions of raw arrays out.

    model = models.load("path/to/directory")
    hidden, layers = model.decoder.hidden(model.params, tokens, positions, layers, attend)
    logits = model.decoder.logits(model.params, hidden)

A model does not know how its keys and values are stored, nor that anything controls it: `attend` does.
"""

if __name__ == "models":  # the folder of a checkout, found on the path instead of through the package
    raise ImportError("models is part of entropic_jax: import entropic_jax.models", name=__name__)

from .config import Config, ModelError
from .conversion import convert
from .decoder import FAMILIES, Decoder, Params
from .layers import Attend
from .model import Model, directory_of, initialise, load, save
from .placement import copied, shard
from .rope import RopeScaling
from .tokenizer import Detokenizer, Tokenizer

__all__ = [
    "FAMILIES",
    "Attend",
    "Config",
    "Decoder",
    "Detokenizer",
    "Model",
    "ModelError",
    "Params",
    "RopeScaling",
    "Tokenizer",
    "convert",
    "copied",
    "directory_of",
    "initialise",
    "load",
    "save",
    "shard",
]
