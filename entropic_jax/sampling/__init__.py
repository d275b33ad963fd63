"""Sampling, per row: parameters, logits processors, constraints, truncation and the draw itself."""

from ..state import History, Sampling
from ..state.sampling_parameters import parameters
from .processors import adjusts, history, latest_of, penalise, record, with_prompts
from .sampler import gumbel, sample
from .truncation import truncate

__all__ = [
    "History",
    "Sampling",
    "adjusts",
    "gumbel",
    "history",
    "latest_of",
    "parameters",
    "penalise",
    "record",
    "sample",
    "truncate",
    "with_prompts",
]
