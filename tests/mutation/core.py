"""The modules of the core whose faults must be caught, their tests, and the faults that change no result.

python -m tests.mutation.core [--samples 30] [FILE ...]    prints what is caught, and what is not
"""

import argparse
import tempfile
from pathlib import Path

from . import runner
from .operators import Site, sites

BLOCKS, SCHEDULER = "serving/engine/block_manager.py", "serving/engine/scheduler.py"
TEMPERATURE = "entropic_jax/control/temperature.py"
# The tests that own each module, as arguments of pytest.
TESTS = {
    "entropic_jax/attention/page_selection.py": ("tests/attention/test_page_selection.py",),
    "entropic_jax/control/controller.py": ("tests/control/test_controller.py", "tests/test_step.py"),
    "entropic_jax/control/pruning.py": ("tests/control/test_pruning.py",),
    TEMPERATURE: (
        "tests/control/test_temperature.py",
        "tests/control/test_temperature_bounds.py",
        "tests/control/test_extremes.py",
    ),
    "entropic_jax/loop.py": (
        "tests/attention/test_kept_lists.py",
        "tests/test_step.py",
        "tests/test_loop.py",
        "tests/speculation/test_lossless.py",
    ),
    "entropic_jax/phases/batch.py": ("tests/test_phases.py", "tests/test_step.py", "tests/test_loop.py"),
    "entropic_jax/phases/forward.py": (
        "tests/attention/test_kept_lists.py",
        "tests/test_phases.py",
        "tests/test_step.py",
        "tests/test_loop.py",
    ),
    "entropic_jax/phases/prefill.py": (
        "tests/test_start_check.py",
        "tests/test_phases.py",
        "tests/test_loop.py",
    ),
    "entropic_jax/phases/emission.py": ("tests/test_phases.py", "tests/test_loop.py", "tests/sampling"),
    "entropic_jax/sampling/sampler.py": ("tests/sampling",),
    "entropic_jax/sampling/truncation.py": ("tests/sampling",),
    "entropic_jax/state/cache.py": ("tests/test_cache.py",),
    "entropic_jax/state/row_subset.py": ("tests/test_row_subset.py", "tests/test_step.py"),
    "serving/engine/prefix_cache.py": ("tests/serving/test_block_manager.py",),
    "serving/engine/state_updates.py": (
        "tests/serving/test_state_updates.py",
        "tests/serving/test_block_manager.py",
    ),
    BLOCKS: ("tests/serving/test_block_manager.py",),
    SCHEDULER: ("tests/serving/test_scheduler.py", "tests/serving/test_engine.py"),
}
SAMPLES = 6  # faults of each module that `pytest -m mutation` makes: those of the lowest rank
# Faults that no test can notice, by file, function and change, with the reason.
_EVICTION, _CACHE = "pages > self.num_free_pages", "self.prefix_cache is not None"
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (TEMPERATURE, "_factor", "step > 0 -> (step >= 0)"): "the factor of a step of 0 is 1 in either branch",
    (TEMPERATURE, "DynaTemp.update", "1.0 -> 2.0"): "it stands where the result is not used",
    (BLOCKS, "BlockManager.reserve", "new > 0 -> (new >= 0)"): "reserving nothing changes nothing",
    (BLOCKS, "BlockManager._evict", f"{_EVICTION} -> (pages >= self.num_free_pages)"): "it evicts no page",
    (
        BLOCKS,
        "BlockManager._evict",
        f"{_EVICTION} and {_CACHE} -> (({_EVICTION}) or ({_CACHE}))",
    ): "without a cache, no caller asks for more than the free pages; below 1 page, none is evicted",
}


def sample(file: str, number: int) -> list[Site]:
    """The first faults of a module that change a result, by rank.

    Args:
        file: path in the tree.
        number: of faults at most.
    """
    source = (runner.ROOT / file).read_text("utf-8")
    noticeable = [site for site in sites(source) if change_of(file, site) not in EQUIVALENT]
    return noticeable[:number]


def change_of(file: str, site: Site) -> tuple[str, str, str]:
    """The key of a fault in `EQUIVALENT`."""
    return file, site.function, f"{site.old} -> {site.new}"


def survives(tree: Path, file: str, site: Site) -> bool:
    """Whether the tests of a module pass with a fault.

    Args:
        tree: a copy of the tree.
        file: path in the tree.
        site: the fault.
    """
    source = (tree / file).read_text("utf-8")
    return runner.failure_with(tree, file, site.apply(source), TESTS[file]) is None


def main() -> None:
    """Print the faults of the modules and whether they are caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.core", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(TESTS)} (all)")
    parser.add_argument("--samples", type=int, default=30, help="faults of each (30)")
    options = parser.parse_args()
    if unknown := set(options.files) - set(TESTS):
        parser.error(f"FILE must be one of {', '.join(TESTS)}; got {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        runner.copy_tree(tree)
        for file in options.files or TESTS:
            chosen = sample(file, options.samples)
            num_caught = 0
            for site in chosen:
                caught = not survives(tree, file, site)
                num_caught += caught
                change = f"{site.old} -> {site.new}".replace("\n", " ")
                print(
                    f"{'caught' if caught else 'MISSED'}  {file}:{site.line} {site.function}: {change}",
                    flush=True,
                )
            print(f"{file}: {num_caught} of {len(chosen)} caught", flush=True)


if __name__ == "__main__":
    main()
