"""Draft model: a second directory, whose model, or draft head, drafts tokens for the one that is served."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from entropic_jax import models
from entropic_jax.models import draft_head, draft_head_files
from entropic_jax.parameter_tables.speculation_names import AUTO, is_draft_head, is_draft_model
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.speculation import DraftingDecoder, DraftingParams, HeadedDecoder

from .adapted_model import ModelWithAdapters

NAME = "speculate"


@dataclasses.dataclass(frozen=True, eq=False)
class ModelWithDraft(models.Model):
    """A model whose passes also write the keys and values of a draft model; its `params` are of both."""

    draft: models.Model | None = None
    target: models.Model | None = None  # the model alone

    @property
    def decoder(self) -> Any:
        """The decoder of both models."""
        assert self.draft is not None and self.target is not None, "`with_draft` sets both"
        context = self.draft.config.longest_context
        return DraftingDecoder(self.target.decoder, self.draft.decoder, context)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelWithHead(models.Model):
    """A model with a draft head; its `params` are of both."""

    head: draft_head.DraftHead | None = None
    weights: models.Params | None = None  # of the head
    target: models.Model | None = None  # the model alone

    @property
    def decoder(self) -> Any:
        """The decoder of both models."""
        assert self.head is not None and self.target is not None, "`with_head` sets both"
        return HeadedDecoder(self.target.decoder, self.head)


def load(
    model: models.Model,
    speculate: str | None,
    dtype: str,
    quantization: str | None = None,
    path: str | Path | None = None,
    joins: bool = True,
) -> models.Model:
    """The model with the draft model or head that `speculate` names; the model itself where it names none.

    Args:
        model: the model to serve.
        speculate: the name of a drafter, or a directory.
        dtype: the dtype of a draft model, as of the model; a head has that of the model's activations.
        quantization: the quantization of its weights, a value of `--quantization`; None keeps their dtype.
        path: directory of the model, whose folder `draft_head` the name "head" means, and with "auto" drafts
            too where there is one; None for the model that ships.
        joins: whether a head may join the drafter "auto": not beside adapters, nor on several devices.

    Raises:
        ValueError: Where the directory cannot be used, or its model has other tokens.
        OSError: Where a file cannot be read.
    """
    folder = models.directory_of(path) / draft_head_files.FOLDER
    if speculate == AUTO and (not joins or not draft_head_files.is_draft_head(folder)):
        return model
    if speculate == AUTO or (speculate is not None and is_draft_head(speculate)):
        directory = Path(speculate) if is_draft_model(speculate) else folder
        return with_head(model, *draft_head_files.load(directory, model.decoder, model.activation_dtype))
    if speculate is None or not is_draft_model(speculate):
        return model
    stacked = None if model.stacked else False
    draft = models.load(
        Path(speculate), dtype, quantization=quantization, blocked=model.blocked, stacked=stacked
    )
    return with_draft(model, draft)


def with_draft(model: models.Model, draft: models.Model) -> ModelWithDraft:
    """A model with another that drafts for it.

    Args:
        model: whose tokens are generated; on one device.
        draft: with the same tokens. Its vocabulary may be padded to another size.

    Raises:
        ParameterError: Where tokens differ; a ValueError.
    """
    _check_tokens(model, draft)
    fields: dict[str, Any] = {f.name: getattr(model, f.name) for f in dataclasses.fields(models.Model)}
    fields["params"] = DraftingParams(model.params, draft.params)
    return ModelWithDraft(**fields, draft=draft, target=model)


def with_head(model: models.Model, head: draft_head.DraftHead, weights: models.Params) -> ModelWithHead:
    """A model with a head that drafts for it.

    Args:
        model: whose tokens are generated; on one device.
        head: the functions of the head.
        weights: the parameters of the head.
    """
    fields: dict[str, Any] = {f.name: getattr(model, f.name) for f in dataclasses.fields(models.Model)}
    fields["params"] = DraftingParams(model.params, draft_head.runnable(head, model.params, weights))
    return ModelWithHead(**fields, head=head, weights=weights, target=model)


def copied(model: models.Model, device: jax.Device, mesh: Mesh | None) -> models.Model:
    """The model, with the one that drafts for it, on other devices.

    Args:
        model: the model to copy.
        device: where the copy will be, unless there is a mesh.
        mesh: a mesh of as many devices as that of the model, None for one device.
    """
    if isinstance(model, ModelWithDraft) and model.draft is not None and model.target is not None:
        return with_draft(copied(model.target, device, mesh), copied(model.draft, device, mesh))
    if isinstance(model, ModelWithHead) and model.head is not None and model.target is not None:
        weights = jax.device_put(model.weights, device)
        return with_head(copied(model.target, device, mesh), model.head, weights)
    return models.copied(model, device if mesh is None else mesh)


def target_of(model: models.Model) -> models.Model:
    """The model whose tokens are generated, without the one that drafts for it, and without adapters."""
    wrapped = isinstance(model, ModelWithDraft | ModelWithHead | ModelWithAdapters)
    return model.target or model if wrapped else model


def _check_tokens(model: models.Model, draft: models.Model) -> None:
    """Raise ParameterError unless every token that both models know has the same number in both."""
    if model.tokenizer is None or draft.tokenizer is None:
        raise ParameterError(f"{NAME} must be a directory with tokenizer.json; got one without", NAME)
    known, drafted = (m.tokenizer.backend.get_vocab() for m in (model, draft) if m.tokenizer is not None)
    smaller, larger = sorted((known, drafted), key=len)
    for token, number in sorted(smaller.items(), key=lambda item: item[1]):
        if larger.get(token) != number:
            raise ParameterError(
                f"{NAME} must be the directory of a model with the same tokenizer; got one in which "
                f"{token!r} is token {drafted.get(token)}, not {known.get(token)}",
                NAME,
            )
