"""The schedule of a training run: windows and batches that grow, a learning rate that falls at the end.

Most tokens are read in short windows, where a step is fast; the full context comes last. Small batches come
first, where a gradient needs few tokens to be worth a step. The learning rate is constant until the last
fifth of the tokens (Hägele et al., arXiv 2405.18392), so that a run may be lengthened until then.
"""

from typing import NamedTuple

import optax

WARM_UP = 100  # steps
DECAY_SHARE = 0.2  # of the tokens, the last ones
AVERAGE = 25.0  # how many times shorter than the run so far the average of the weights is


class Stage(NamedTuple):
    """Consecutive steps that are alike."""

    length: int  # targets of a window
    batch_tokens: int  # targets of a step
    share: float  # of the tokens of the run
    task_share: float  # share of windows of generated documents


STAGES = (
    Stage(256, 4096, 0.06, 0.08),
    Stage(512, 8192, 0.36, 0.08),
    Stage(1024, 16384, 0.48, 0.08),
    Stage(2048, 16384, 0.06, 0.6),
    Stage(8192, 16384, 0.04, 0.6),
)


CONTINUED = (
    Stage(512, 8192, 0.32, 0.08),
    Stage(1024, 16384, 0.55, 0.08),
    Stage(2048, 16384, 0.08, 0.6),
    Stage(8192, 16384, 0.05, 0.6),
)  # of a model that has been trained before: no tiny batches


def one_stage(length: int, task_share: float) -> tuple[Stage, ...]:
    """A run whose windows are all of one length, with the batches of the longest short stage.

    Args:
        length: targets of a window.
        task_share: share of windows of generated documents, in [0, 1].
    """
    return (STAGES[2]._replace(length=length, share=1.0, task_share=task_share),)


class Schedule:
    """The steps of a run.

    Args:
        tokens: targets of the whole run, about.
        stages: in their order; their shares add up to 1.
    """

    def __init__(self, tokens: float, stages: tuple[Stage, ...] = STAGES) -> None:
        self.stages = stages
        self.counts = [round(tokens * stage.share / stage.batch_tokens) for stage in stages]
        self.steps = sum(self.counts)
        if not all(self.counts):
            raise ValueError(f"tokens must be enough for a step of each stage; got {tokens:g}")

    def stage(self, step: int) -> Stage:
        """The stage of a step; the last one for a step past the end."""
        for stage, count in zip(self.stages, self.counts, strict=True):
            if step < count:
                return stage
            step -= count
        return self.stages[-1]

    def tokens(self, step: int) -> int:
        """Targets of the steps before `step`."""
        total = 0
        for stage, count in zip(self.stages, self.counts, strict=True):
            total += min(count, max(0, step)) * stage.batch_tokens
            step -= count
        return total

    @property
    def decay_from(self) -> int:
        """The first step of the falling learning rate."""
        limit = (1 - DECAY_SHARE) * self.tokens(self.steps)
        return next(step for step in range(self.steps) if self.tokens(step + 1) > limit)

    def learning_rate(self, highest: float) -> optax.Schedule:
        """A short warm-up, the highest rate, and a linear fall to zero."""
        decay_from = max(WARM_UP, self.decay_from)
        schedules = [
            optax.linear_schedule(0.0, highest, WARM_UP),
            optax.constant_schedule(highest),
            optax.linear_schedule(highest, 0.0, max(1, self.steps - decay_from)),
        ]
        return optax.join_schedules(schedules, [WARM_UP, decay_from])

    def average_weight(self, step: int) -> float:
        """Share of a step's weights in the average of the weights (Shamir & Zhang, arXiv 1212.1824, §4).

        The average reaches back over the same part of the run, 4 %, at every step.
        """
        return min(1.0, AVERAGE * self.stage(step).batch_tokens / self.tokens(step + 1))

    def windows(self, step: int, micro_tokens: int, devices: int) -> tuple[int, int]:
        """Windows of a step, a multiple of the devices, and the passes that they are split into.

        Args:
            step: number of the step.
            micro_tokens: targets of a pass on each device, at least one window.
            devices: the number of devices that share a pass.
        """
        stage = self.stage(step)
        rows = max(1, micro_tokens // stage.length) * devices  # of a pass
        passes = max(1, round(stage.batch_tokens / stage.length / rows))
        if stage.batch_tokens < rows * stage.length:
            rows = -(-stage.batch_tokens // stage.length // devices) * devices or devices
        return passes * rows, passes
