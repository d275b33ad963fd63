"""Row controllers of an engine: the laws that its options name."""

from typing import Any

from entropic_jax import models
from entropic_jax.parameter_tables.speculation_names import OFF

from ..options import prefill_options, samplers
from ..options.control_options import SAMPLERS, Control
from .options import EngineOptions, may_prune
from .program_shapes import Shapes
from .row_controllers import RowControllers


def row_controllers_of(
    model: models.Model, options: EngineOptions, shapes: Shapes, calibration: Any
) -> RowControllers:
    """The row controllers of an engine.

    Args:
        model: the model that the engine serves.
        options: name the preset, the method, the sampler and the drafter.
        shapes: what the engine's programs are compiled for.
        calibration: the calibration of the model, None without one.
    """
    sampler, sampler_law = None, None
    if options.preset in SAMPLERS:
        sampler = options.preset
        text = options.clarification
        control = Control(sampler, (("clarification", text),) if text else ())
        sampler_law = samplers.law(control, calibration, model, together=False)
    return RowControllers(
        options.law,
        calibration,
        pruning=may_prune(options, shapes.method),
        entropic_schedule=options.policy == "entropic",
        sampler=sampler,
        sampler_law=sampler_law,
        method=options.method,
        method_laws=prefill_options.method_preset(options).controller,
        branches=shapes.branches,
        drafter=options.drafter,
        always_drafts=options.speculate not in (None, OFF),
    )
