"""Draw the entropy of every attention head over a text.

The picture is a heat map: KV heads by layer from top to bottom, segments of the text from left to right. In
EntropyInfer's prefill, rigid heads, which attend to few positions throughout, share one budget; the budget of
a dynamic head follows its entropy.

With --calibrate and --table, measure instead how much of a text each KV head has to read, and store the
table of needs by which a budget can be shared over layers and KV heads.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options.option_types import Several, positive
from ..request import RequestError
from . import model_options
from .text_input import check_writable, read_text, read_texts, unwritable

if TYPE_CHECKING:
    from entropic_jax.methods.heads import HeadProfile

SEGMENT, RIGID, BASE, TOLERANCE = 512, 0.84, 2048, 0.01
NEED_TOKENS, NEED_BUDGET, MIN_SEGMENT = 32768, 512, 16  # of a table of head needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `entropic heads`."""
    model_options.add_model(parser)
    parser.add_argument(
        "--text",
        nargs="+",
        action=Several,
        required=True,
        metavar="PATH",
        help="text to read; - is standard input; with --table also several files, or folders, whose files "
        "are read in the order of their paths",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="picture to write: .png, .svg or .pdf")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="with --calibrate, table of head needs to write, as JSON",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="INT",
        help=f"read at most this many (default: the model's context; with --table: {NEED_TOKENS})",
    )
    parser.add_argument(
        "--segment",
        type=positive,
        default=SEGMENT,
        metavar="INT",
        help=f"tokens of a segment, a power of two (default: {SEGMENT})",
    )
    parser.add_argument(
        "--rigid-below",
        type=float,
        default=RIGID,
        metavar="FLOAT",
        help="a head is rigid if its entropy, relative to the largest possible value, stays below this "
        f"(default: {RIGID})",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="with --out: find that threshold for this model, the highest at which rigid heads, at base "
        f"budget, leave at most {TOLERANCE:.0%}% of their attention unread; with --table: measure head "
        "needs",
    )
    parser.add_argument(
        "--prefill-budget",
        type=positive,
        metavar="INT",
        help="the base budget, in tokens, for --calibrate; with --table, the mean of all heads "
        f"(default: {BASE}; with --table: {NEED_BUDGET})",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, draw, and return the exit status."""
    if options.segment & (options.segment - 1):
        raise RequestError(f"--segment must be a power of two; got {options.segment}")
    if options.table is not None:
        return _calibrate_needs(options)
    if options.out is None:
        raise RequestError("--out, or --calibrate with --table, must name a file to write; got neither")
    if len(options.text) > 1:
        raise RequestError(f"--text must be one file with --out; got {len(options.text)}")
    options.text, options.prefill_budget = options.text[0], options.prefill_budget or BASE
    if options.out.suffix not in (".png", ".svg", ".pdf") or not options.out.parent.is_dir():
        raise RequestError(
            f"--out must be a .png, .svg or .pdf file in an existing directory; got {options.out}"
        )
    try:
        import matplotlib
    except ImportError:
        raise RequestError("heads needs matplotlib: pip install matplotlib") from None
    import numpy as np

    matplotlib.use("agg")
    profile, length = _measure(options)
    if options.calibrate:
        from entropic_jax.methods.heads import HeadProfile, rigid_threshold

        assert profile.unread is not None
        # The first layer is read densely.
        sparse, unread = (
            HeadProfile(profile.entropy[1:], profile.rigid[1:], profile.unread[1:]),
            profile.unread[1:],
        )
        threshold = rigid_threshold(sparse, TOLERANCE)
        profile = profile._replace(rigid=np.nanmax(profile.entropy, -1) < threshold)
        low, unread = profile.rigid[1:], np.nanmean(unread, -1)
        print(
            f"rigid below {threshold:.2f}: with {options.prefill_budget} tokens, rigid heads leave "
            f"{unread[low].mean() if low.any() else 0:.2%} unread, dynamic ones "
            f"{unread[~low].mean() if not low.all() else 0:.2%}"
        )
    draw(profile, options.segment, options.out, f"{options.model.name}, {length} tokens")
    rigid = int(profile.rigid.sum())
    print(
        f"{profile.rigid.size} KV heads: {rigid} rigid, {profile.rigid.size - rigid} dynamic; {options.out}"
    )
    return 0


def _calibrate_needs(options: argparse.Namespace) -> int:
    """Measure the table of head needs, write it, and return the exit status."""
    from entropic_jax.methods.head_needs import save_head_needs
    from entropic_jax.methods.need_calibration import LONGEST, head_needs, ranked_profiles

    if not options.calibrate:
        raise RequestError(f"--table needs --calibrate; got {options.table} alone")
    if options.out is not None:
        raise RequestError(f"--out must not be set with --table, which draws nothing; got {options.out}")
    if options.segment < MIN_SEGMENT:
        raise RequestError(f"--segment must be at least {MIN_SEGMENT} with --table; got {options.segment}")
    check_writable(options.table, "--table")
    texts = read_texts(options.text, "--text")
    model, tokenizer = model_options.load_model(options)
    tokens: list[int] = []
    limit, longest = options.tokens or NEED_TOKENS, min(LONGEST, model.config.longest_context)
    for text in texts:
        tokens += tokenizer.encode(text)
        if len(tokens) >= limit:
            break
    try:
        profiles = ranked_profiles(model.decoder, model.params, tokens[:limit], options.segment, longest)
    except ValueError as error:
        raise RequestError(f"--text {' '.join(options.text)}: {error}") from error
    budget = options.prefill_budget or NEED_BUDGET
    needs = head_needs(model.decoder.shape, profiles, budget, options.segment)
    try:
        save_head_needs(needs, options.table)
    except OSError as error:
        raise unwritable(options.table, "--table", error) from None
    flat = [value for row in needs.need[needs.dense_layers :] for value in row]
    print(
        f"{len(flat)} KV heads, {needs.tokens} tokens: needs of {min(flat):g} to {max(flat):g} tokens at "
        f"{needs.budget} a head; {options.table}"
    )
    return 0


def _measure(options: argparse.Namespace) -> "tuple[HeadProfile, int]":
    from entropic_jax.methods.entropy_prefill import EntropyPrefill
    from entropic_jax.methods.heads import profile_heads

    text = read_text(options.text, "--text")
    model, tokenizer = model_options.load_model(options)
    context = model.config.longest_context
    tokens = tokenizer.encode(text)[: min(options.tokens or context, context)]
    policy = EntropyPrefill(
        segment=options.segment, rigid_below=options.rigid_below, base=options.prefill_budget
    )
    try:
        profile = profile_heads(model.decoder, model.params, tokens, policy, unread=options.calibrate)
        return profile, len(tokens)
    except ValueError as error:
        raise RequestError(f"--text {options.text}: {error}") from error


def draw(profile: "HeadProfile", segment: int, file: Path, title: str) -> Any:
    """Draw the entropy of all heads as a heat map, and write it; returns the figure.

    Args:
        profile: the profile to draw.
        segment: tokens of a segment.
        file: to write, a PNG or what Matplotlib makes of the ending.
        title: the title of the figure.
    """
    import matplotlib.pyplot as plt

    layers, heads, segments = profile.entropy.shape
    grid = profile.entropy.reshape(layers * heads, segments)
    height = min(14.0, 1.6 + 0.22 * layers * heads)
    figure, axes = plt.subplots(figsize=(min(12.0, 4.5 + 0.12 * segments), height), layout="constrained")
    colours = plt.get_cmap("viridis").with_extremes(bad="#dddddd")
    shown = axes.imshow(grid, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    axes.set(title=title, xlabel=f"segment of {segment} tokens", ylabel="layer, KV heads within")
    axes.set_yticks([heads * i + (heads - 1) / 2 for i in range(layers)], [str(i) for i in range(layers)])
    for i in range(1, layers):
        axes.axhline(heads * i - 0.5, color="white", lw=1.5)
    right = axes.get_xlim()[1]
    for kind, marker, colour in ((True, "s", "#c03030"), (False, "o", "#3060c0")):
        place = [i for i, rigid in enumerate(profile.rigid.reshape(-1)) if rigid == kind]
        label = f"{'rigid' if kind else 'dynamic'} ({len(place)})"
        axes.plot(
            [right + 0.02 * segments] * len(place),
            place,
            marker,
            color=colour,
            ms=5,
            clip_on=False,
            label=label,
        )
    axes.set_xlim(-0.5, right)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, frameon=False)
    figure.colorbar(shown, ax=axes, label="entropy over blocks ÷ ln(number of blocks)", pad=0.06)
    figure.savefig(file, dpi=150)
    plt.close(figure)
    return figure
