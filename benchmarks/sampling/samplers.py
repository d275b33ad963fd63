"""Samplers that the benchmark compares, and how each continues a batch of prompts."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.calibration import Calibration, load_calibration
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.control.temperature import Mirostat
from entropic_jax.methods import entropix, entropix_search
from entropic_jax.methods.dslider import DSlider
from entropic_jax.methods.entropix_branches import SearchPlan
from entropic_jax.methods.entropix_released import AsReleased
from entropic_jax.methods.presets import Gains, Preset, preset
from entropic_jax.state import RUNNING

LAUNCH = 64  # steps


class Sampler(NamedTuple):
    """A sampler: its control laws, its sampling parameters, and its plan of branches, if it has one."""

    preset: Preset
    sampling: dict[str, Any]
    plan: SearchPlan | None = None


def calibrated_gains(calibration: Calibration) -> Gains:
    """The gains that a calibration sets."""
    return Gains(
        target_entropy=calibration.target_entropy,
        low_entropy=calibration.low_entropy,
        high_entropy=calibration.high_entropy,
        prior=AR1(calibration.mean, calibration.scale, calibration.correlation),
    )


def samplers(calibration: Calibration, model: models.Model) -> dict[str, Sampler]:
    """The samplers compared. Published methods have their papers' constants for the smallest model."""
    gains = calibrated_gains(calibration)
    off = preset("off")
    law = lambda controller: Preset(chain(controller), None, None)
    row_wise = entropix.calibrated(calibration)
    return {
        "greedy": Sampler(off, dict(temperature=0.0)),
        "T 1": Sampler(off, {}),
        "T 0.7, top-p 0.9": Sampler(off, dict(temperature=0.7, top_p=0.9)),
        "min-p 0.1": Sampler(off, dict(min_p=0.1)),
        "top-nσ 1": Sampler(off, dict(top_n_sigma=1.0)),
        "ε-cutoff 0.0006": Sampler(off, dict(epsilon_cutoff=6e-4)),
        "η-cutoff 0.002": Sampler(off, dict(eta_cutoff=2e-3)),
        "top-H 0.4": Sampler(off, dict(top_h=0.4)),
        "DRY 0.8": Sampler(off, dict(dry_multiplier=0.8)),
        "XTC 0.5, 0.1": Sampler(off, dict(xtc_probability=0.5, xtc_threshold=0.1)),
        "Mirostat 2": Sampler(law(Mirostat(target_entropy=calibration.target_entropy)), {}),
        "micro": Sampler(preset("micro", None, gains), {}),
        "micro, T ≤ 1.2": Sampler(preset("micro", None, gains.replace(highest_temperature=1.2)), {}),
        "full-lossy": Sampler(preset("full-lossy", None, gains), {}),
        "Entropix as released": Sampler(law(AsReleased()), {}),
        "Entropix, row by row": Sampler(law(row_wise), {}),
        "Entropix": Sampler(law(row_wise), {}, SearchPlan()),
        "dslider": Sampler(law(DSlider(vocabulary=model.decoder.shape.vocabulary)), {}),
    }


class Batch(NamedTuple):
    """The texts of one batch, and what they cost."""

    texts: list[list[int]]
    seconds: float  # wall-clock time, prefill included
    computed: int  # tokens, those of discarded branches included
    roofline: float  # seconds of the ledger


class SamplerBenchmark:
    """A model, and the samplers that run on it."""

    def __init__(self, folder: Path, context: int) -> None:
        self.model = models.load(folder, "float32")
        assert self.model.tokenizer is not None
        self.tokenizer = self.model.tokenizer
        self.context = min(context, self.model.config.max_position_embeddings)
        self.calibration = load_calibration(folder)
        self.samplers = samplers(self.calibration, self.model)
        self.warm: set[Any] = set()

    def run(self, name: str, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> Batch:
        """Continue prompts under a sampler, after a warm-up where the shape is new.

        Args:
            name: the name of the sampler.
            prompts: token ids of each row.
            tokens: to generate at most.
            seed: the seed of the noise.
        """
        shape = (name, len(prompts), max(1, max(map(len, prompts)) - 1).bit_length())
        if shape not in self.warm:
            self.warm.add(shape)
            self._run(self.samplers[name], prompts, 2, seed)
        return self._run(self.samplers[name], prompts, tokens, seed)

    def _run(self, sampler: Sampler, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> Batch:
        began = time.perf_counter()
        m, k = self.model, sampler.plan.branches if sampler.plan else 1
        page_policy = sampler.preset.page_policy
        pool = allocate(
            m.decoder.shape,
            len(prompts) * k,
            self.context,
            # Branches share what they have in common; they need room for a few pages of their own.
            pages=len(prompts) * (-(-self.context // 64) + 2 * (k - 1)) if k > 1 else None,
            page_size=page_policy.page_size if page_policy else 64,
        )
        arguments = dict(
            key=jax.random.key(seed),
            max_tokens=tokens,
            sample=parameters(len(prompts) * k, **sampler.sampling),
            belief_temperature=self.calibration.temperature,
        )
        law = sampler.preset.controller
        if sampler.plan is None:
            state = start(m.decoder, m.params, law, pool, prompts, page_policy=page_policy, **arguments)
            texts: list[list[int]] = [[] for _ in prompts]
            while (np.asarray(state.status) == RUNNING).any():
                state, trace = generate(m.decoder, m.params, law, state, LAUNCH, capacity=LAUNCH)
                host = jax.device_get(trace)
                for row, text in enumerate(texts):
                    text += host.token[host.emitted[:, row], row].tolist()
            computed = sum(map(len, texts))
        else:
            search = entropix_search.start(m.decoder, m.params, law, pool, prompts, sampler.plan, **arguments)
            while (np.asarray(search.state.status) == RUNNING).any():
                search = entropix_search.generate(
                    m.decoder, m.params, law, search, 8 * LAUNCH, plan=sampler.plan
                )
            texts = [t.token.tolist() for t in entropix_search.traces(search, sampler.plan)]
            state = search.state
            computed = sum(map(len, texts)) + int(np.asarray(search.counts.discarded).sum())
        seconds = time.perf_counter() - began
        return Batch(texts, seconds, computed, float(np.asarray(state.ledger.seconds).sum()))
