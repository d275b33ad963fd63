"""Complete samplers by name: Entropix, as calibrated and as released, and dslider."""

from typing import TYPE_CHECKING

from entropic_jax import models
from entropic_jax.methods import entropix
from entropic_jax.methods.dslider import DSlider
from entropic_jax.methods.entropix_released import AsReleased

from ..request import RequestError
from .control_options import Control, check_sampler

if TYPE_CHECKING:
    from entropic_jax.calibration import Calibration


def law(
    control: Control, calibration: "Calibration | None", model: models.Model, together: bool = True
) -> entropix.Entropix | AsReleased | DSlider:
    """The law of what `control.preset` names. RequestError where it cannot be.

    Args:
        control: names the sampler and its options.
        calibration: the model's calibration, or None.
        model: whose vocabulary and tokenizer the laws need.
        together: whether the rows of a batch decide as one, as in the released code; see `AsReleased`.
    """
    check_sampler(control)
    if control.method != "dense":
        message = f"method must be dense with the preset {control.preset}; got {control.method!r}"
        raise RequestError(message, "method")
    if control.preset == "dslider":
        return DSlider(vocabulary=model.decoder.shape.vocabulary)
    if control.preset == "entropix-as-released":
        return AsReleased(together=together)
    if calibration is None:
        raise RequestError(
            "preset must not be entropix for a model without calibration.json, which holds its thresholds "
            "(`entropic calibrate` writes it); got 'entropix'",
            "preset",
        )
    clarification, tokenizer = dict(control.gains).get("clarification", ""), model.tokenizer
    tokens = tuple(tokenizer.encode(clarification, special=False)) if clarification and tokenizer else ()
    return entropix.calibrated(calibration, clarification=tokens)
