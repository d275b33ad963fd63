"""Adapted model: a model with slots for LoRA adapters, which rows of a batch may use."""

import dataclasses
from typing import Any

import jax

from entropic_jax import models
from entropic_jax.models import lora
from entropic_jax.parameter_tables.table import ParameterError


@dataclasses.dataclass(frozen=True, eq=False)
class ModelWithAdapters(models.Model):
    """A model with slots for adapters; its `params` are of both."""

    target: models.Model | None = None  # the model alone

    @property
    def decoder(self) -> Any:
        """The decoder with adapters."""
        assert self.target is not None, "`with_adapters` sets it"
        return lora.LoraDecoder(self.target.decoder)


def with_adapters(model: models.Model, slots: int, rank: int) -> ModelWithAdapters:
    """A model with empty slots.

    Args:
        model: on one device.
        slots: number of adapters that there is room for.
        rank: largest rank of an adapter.

    Raises:
        ParameterError: The model has no linear layer that adapters may update; a ValueError.
    """
    if not lora.targets(model.config):
        raise ParameterError(
            f"enable_lora must be off for {model.config.architecture}, which has no layer of "
            f"{', '.join(lora.BLOCKS)}; got True",
            "enable_lora",
        )
    adapters = lora.empty_adapters(model.config, slots, rank, model.activation_dtype)
    fields: dict[str, Any] = {f.name: getattr(model, f.name) for f in dataclasses.fields(models.Model)}
    fields["params"] = lora.LoraParams(model.params, jax.block_until_ready(adapters))
    return ModelWithAdapters(**fields, target=model)
