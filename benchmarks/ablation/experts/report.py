"""Tables of the benchmark of expert policies."""

from typing import Any

import numpy as np

from ...harness.provenance import stamp
from ...harness.tables import Table

MEASURED_CODE = (
    "entropic_jax/methods/expert_selection.py",
    "entropic_jax/phases/expert_reader.py",
    "entropic_jax/state/ledger.py",
    "models/decoder.py",
    "models/experts.py",
    "benchmarks/ablation/experts/gains.py",
    "benchmarks/ablation/experts/measure.py",
)
RESAMPLES, TAILS = 2000, (0.025, 0.975)
LAW = "expected reduction"
SETTINGS = {"fixed": "experts", "top-p": "p"}  # of other policies: the price in nats


class Curve:
    """Experts read and bits per byte of a policy's settings, in resamples of the files.

    Args:
        rows: the settings, as measured.
        sizes: bytes of the files.
        draws: how often each resample has each file, `[resamples, files]`; the first has every file once.
    """

    def __init__(self, rows: list[dict[str, Any]], sizes: np.ndarray, draws: np.ndarray) -> None:
        nats, experts = (np.array([row[name] for row in rows]) for name in ("nats", "experts"))
        self.bits = draws @ nats.T / (draws @ sizes)[:, None] / np.log(2)
        self.experts = draws @ experts.T / draws.sum(1, keepdims=True)

    def at(self, experts: np.ndarray) -> np.ndarray:
        """Bits per byte at numbers of experts `[resamples]`, on straight lines between settings; else NaN."""
        values = []
        for number, x, y in zip(experts, self.experts, self.bits, strict=True):
            order = np.argsort(x, kind="stable")
            values.append(np.interp(number, x[order], y[order], left=np.nan, right=np.nan))
        return np.array(values)


def curves(results: dict[str, Any]) -> dict[str, Curve]:
    """The curve of every policy, all with the same resamples."""
    sizes = np.array(results["bytes"], float)
    files = len(sizes)
    drawn = np.random.default_rng(0).multinomial(files, np.full(files, 1 / files), RESAMPLES)
    draws = np.concatenate([np.ones((1, files)), drawn])
    return {name: Curve(rows, sizes, draws) for name, rows in results["policies"].items()}


def with_interval(values: np.ndarray, digits: int, sign: str = "") -> str:
    """The value of all files, which is the first, and its 95 % interval over resamples."""
    if np.isnan(values[0]):
        return "–"
    ends = np.nanquantile(values[1:], TAILS)
    return f"{values[0]:{sign}.{digits}f} ({ends[0]:{sign}.{digits}f} to {ends[1]:{sign}.{digits}f})"


def policy_rows(results: dict[str, Any], of: dict[str, Curve]) -> list[list[str]]:
    """Every policy and setting: experts read, FLOPs, bits per byte."""
    most = results["policies"]["fixed"][-1]
    body = []
    for name, rows in results["policies"].items():
        for number, row in enumerate(rows):
            bits, every = of[name].bits[:, number], of["fixed"].bits[:, -1]
            setting = f"{SETTINGS.get(name, 'price')} {row['setting']}"
            flops = 100 * sum(row["flops"]) / sum(most["flops"])
            body.append(
                [
                    name,
                    setting,
                    f"{np.mean(row['experts']):.3f}",
                    f"{flops:.1f}",
                    f"{bits[0]:.4f}",
                    with_interval(100 * (bits / every - 1), 2, "+"),
                ]
            )
    return body


def comparison_rows(of: dict[str, Curve], others: list[str]) -> list[list[str]]:
    """The law beside each other policy at as many experts read: bits per byte of the law ÷ theirs − 1, %."""
    law, body = of[LAW], []
    for number in np.argsort(law.experts[0]):
        experts, bits = law.experts[:, number], law.bits[:, number]
        cells = [with_interval(100 * (bits / of[name].at(experts) - 1), 2, "+") for name in others]
        body.append([f"{experts[0]:.3f}", *cells])
    return body


def tables(results: dict[str, Any]) -> list[Table]:
    """Bits per byte by policy, the law beside the others at equal experts read, and what predicts a gain."""
    of = curves(results)
    others = [name for name in of if name != LAW]
    names = [name.removeprefix(f"{LAW}, ") for name in others]
    correlations = [
        [name, *(f"{values[key]:+.2f}" for key in ("entropy", "|entropy|", "loss"))]
        for name, values in results["correlations"].items()
    ]
    return [
        (
            "Bits per byte of held-out text",
            ["policy", "setting", "experts read", "FLOPs, %", "bits per byte", "÷ all − 1, % (95 %)"],
            policy_rows(results, of),
        ),
        (
            "The law at equal experts read: bits per byte ÷ those of the other − 1, % (95 %)",
            ["experts read", *names],
            comparison_rows(of, others),
        ),
        (
            "Correlation with what a token's second expert brings, mean over layers",
            ["predictor", "reduction of entropy", "its size", "reduction of loss"],
            correlations,
        ),
    ]


NOTES = """
Every file is replayed token by token in the decode loop, from its first token, so that a policy sees the
entropies that the model has under the policy. Experts read: mean over tokens and layers. FLOPs: by the
ledger, beside those with all experts that the router chooses; attention and the output projection are the
same.

Expected reduction: one more expert is read while a regression expects it to lower the entropy of the
output by more than the price. It knows the router's probabilities and the entropy of the token before;
that of the token itself is known only after its experts have been read. Router alone: the regression
without that entropy. Both are fitted on files of other packages.

Controls. Numbers exchanged: every token reads as many experts, layer by layer, as the law read for
another token. Entropy exchanged: the law sees the entropy of another token, and the router's
probabilities of its own.

Other policies at as many experts: on the straight line between their settings. Intervals: bootstrap over
files, paired.
"""


def notes(results: dict[str, Any]) -> list[str]:
    """Conditions."""
    model, files = results["model"], results["files"]
    command = "; ".join(entry["command"] for entry in results["training"])
    subject = (
        f"{results['cpu']}. A mixture of {model['experts']} experts of width {model['inner']}, of which a "
        f"token reads at most {model['most']}; {model['layers']} layers of width {model['hidden']}; float32"
        + (f"; trained by `{command}`" if command else "")
        + f". {len(files)} held-out files, the first {results['tokens']} tokens of each."
    )
    gain = [f"{value:.4f}" for value in results["mean_gain"]["loss"]]
    brought = (
        f"Mean reduction of the loss by a further expert of one layer, in nats, by rank: {', '.join(gain)}."
    )
    return [subject, *(" ".join(part.split()) for part in NOTES.strip().split("\n\n")), brought]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)
