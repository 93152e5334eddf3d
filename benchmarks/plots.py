"""Pictures of a device's results: time, memory and errors, and of a pretrained model's runs.

They need matplotlib.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator
from pandas import Series

from benchmarks import text
from benchmarks.providers import PROVIDERS
from benchmarks.providers.base import is_ours
from benchmarks.results import Group, Row
from benchmarks.shapes import REAL, WORKS
from benchmarks.tables import BARE, QUOTED, competes, in_order
from benchmarks.test_accuracy import BANDS

_WORK = "dapo"  # the work in the plots
_OUTPUTS = ("loss", "dhidden", "dweight")
_LEAST_MIB = 1.0  # a logarithm needs more than 0
# the same colors in every picture: ours is blue, and former providers are gray
_COLOURS: dict[str, Any] = defaultdict(lambda: "#888888")
_PLOTTED = [name for name in PROVIDERS if name == BARE or competes(name)]
_COLOURS |= zip(_PLOTTED, matplotlib.colormaps["tab20"].colors, strict=False)
_COLOURS |= {BARE: "#111111", "ours": "#0050d8", "ours-input": "#2f9bff"}
_STYLE = {
    "figure.constrained_layout.use": True, "figure.titlesize": 11, "figure.titleweight": "bold",
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.labelsize": 8, "savefig.dpi": 100,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 6.5, "legend.framealpha": 0.5,
}  # fmt: skip
_SMOOTHED = 5  # steps
_PANELS = {
    "whole model": {"ours": "grpo_trainer", "trl": "TRL", "trl-our-head": "TRL with our head"},
    "LoRA": {"ours-lora": "grpo_trainer", "trl-lora": "TRL"},
    "vLLM in bf16": {"ours-vllm": "corrected", "ours-vllm-uncorrected": "not corrected"},
}
_HEADS = {
    "vllm, eager": "trainer in bf16, logits rounded",
    "vllm, ours": "trainer in bf16, our head",
    "vllm, fp32": "trainer in fp32",
}
_OURS, _THEIRS, _BOTH = "#0050d8", "#d1620a", "#2a9d57"
# whose errors are compared: Liger's head gives its log-probabilities, its loss the gradients
_ROUNDING = {
    "ours": "grpo-kernels", "trl": "TRL", "liger-head": "Liger", "liger": "Liger",
    "compile": "torch.compile", "eager": "eager PyTorch",
    "eager-fp32": "eager PyTorch with an fp32 head",
}  # fmt: skip
_ERRORS = {  # as they are stored by band, and the title of a panel
    "logp": "Log-probability: absolute error, nats",
    "rows of dhidden": "Gradient of a token: relative error",
}
# equal curves are all visible: a dashed line lies on a solid one, a dotted line on both
_LINES = {
    "grpo_trainer": (_OURS, "-"), "TRL": (_THEIRS, "--"), "TRL with our head": (_BOTH, ":"),
    "corrected": (_OURS, "-"), "not corrected": (_THEIRS, "--"),
}  # fmt: skip


def save_plots(groups: Sequence[Group], folder: Path) -> None:
    """Draw all pictures, and delete pictures that no longer have a result."""
    wanted = in_order(x for x in groups if x.benchmark == "heads" and x.facts["work"] == _WORK)
    for name, (title, draw) in PLOTS.items():
        with plt.rc_context(_STYLE):
            if figure := draw(wanted) if wanted else None:
                where = wanted[0].environment["device"]
                figure.suptitle(f"{title}: {WORKS[_WORK].title} ({where})")
            _save(figure, folder / f"{name}.png")
    for name, (_, draw) in PICTURES.items():
        with plt.rc_context({"savefig.dpi": 110}):
            if figure := draw(groups):
                figure.tight_layout()
            _save(figure, folder / f"{name}.png")


def _save(figure: Any, path: Path) -> None:
    if not figure:
        path.unlink(missing_ok=True)
        return
    # without the version and the date the same results give the same file
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def _over_tokens(
    unit: str, value: Callable[[Group, Row], float | None], groups: Sequence[Group]
) -> Any:
    """Draw a panel per head and dtype: a curve for each provider, or bars if there is one T."""
    panels: dict[str, dict[str, dict[int, float]]] = {}  # by title, provider and T
    for group in groups:
        isa = group.environment.get("isa")  # of a CPU
        facts = (group.facts["model"], group.facts["dtype"], isa)
        title = ", ".join(filter(None, facts))
        for row in group.rows:
            if row.runs and (found := value(group, row)) is not None:
                curves = panels.setdefault(title, {})
                curves.setdefault(row.provider, {})[group.facts["tokens"]] = found
    if not panels:
        return None
    figure, axes = _panels(-(-len(panels) // 2), min(2, len(panels)), 5.5, 4.0)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        axis.set_title(title)
        tokens = {size for curve in curves.values() for size in curve}
        if len(tokens) == 1:
            found = {name: max(curve.values()) for name, curve in curves.items()}
            _bars(axis, dict(sorted(found.items(), key=lambda item: item[1])), text.digits)
            axis.set_xlabel(f"{unit}, T = {max(tokens)}")
            continue
        for name, curve in curves.items():
            strong, style = name in QUOTED, ":" if is_ours(name) else "-"
            axis.plot(
                list(curve), list(curve.values()), label=name, color=_COLOURS[name],
                marker="o" if strong else ".", linewidth=2.8 if strong else 1.2,
                linestyle="--" if name == BARE else "-" if strong else style,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sorted(tokens))
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter("{x:g}")
            scale.set_minor_locator(NullLocator())
        axis.set(xlabel="T, tokens", ylabel=unit)
        axis.grid(linewidth=0.4, alpha=0.5)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _mib(row: Row) -> float | None:
    return None if row.extra_bytes is None else max(row.extra_bytes / 2**20, _LEAST_MIB)


def _accuracy(groups: Sequence[Group]) -> Any:
    """Draw a row of panels per dtype, one per output, for the largest case that most have."""
    chosen: dict[str, Group] = {}
    for group in sorted(groups, key=lambda group: len(_errors(group, "loss"))):
        chosen[group.facts["dtype"]] = group  # the largest is the last
    figure, axes = _panels(len(chosen), len(_OUTPUTS), 3.2, 3.8)
    for line, (dtype, group) in zip(axes, sorted(chosen.items(), reverse=True), strict=True):
        for axis, output in zip(line, _OUTPUTS, strict=True):
            errors, facts = _errors(group, output), group.facts
            _bars(axis, errors, text.error)
            axis.set_xscale("symlog", linthresh=min([x for x in errors.values() if x] or [1.0]))
            axis.set(xticks=[], title=f"{output}, {dtype}")
            axis.set_xlabel(f"{facts['model']}, T = {facts['tokens']}; {group.about}", fontsize=6.5)
    return figure


def _errors(group: Group, output: str) -> dict[str, float]:
    """Return errors by provider, ours first, without wrong results."""
    found = {row.provider: row.errors[output] for row in group.rows if row.runs and row.errors}
    return dict(sorted(found.items(), key=lambda item: not is_ours(item[0])))


def _bars(axis: Any, values: dict[str, float], write: Callable[[float], str]) -> None:
    """Draw horizontal bars, the first on top, with a number at the end of each."""
    drawn = axis.barh(list(values), list(values.values()), color=[_COLOURS[x] for x in values])
    axis.bar_label(drawn, [write(value) for value in values.values()], padding=3, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.25)


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    size = columns * width, rows * height + 0.4
    return plt.subplots(rows, columns, figsize=size, squeeze=False)


def _rewards(groups: Sequence[Group]) -> Any:
    """Draw a line for each seed."""
    runs = [group for group in groups if group.benchmark == "curves"]
    curves = {
        title: {label: _curves(runs, name) for name, label in names.items()}
        for title, names in _PANELS.items()
    }
    panels = {title: found for title, found in curves.items() if any(found.values())}
    if not panels:
        return None
    size = 4.6 * len(panels), 3.2
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for axis, (title, found) in zip(axes[0], panels.items(), strict=True):
        for label, seeds in found.items():
            color, style = _LINES[label]
            for number, rewards in enumerate(seeds):
                name = "_" if number else f"{label}, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
                steps = range(1, 1 + len(rewards))
                axis.plot(steps, rewards, style, color=color, label=name)  # _: not in the legend
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel(f"reward, mean of {_SMOOTHED} steps")
    return figure


def _curves(groups: Sequence[Group], name: str) -> list[Series]:
    """Return the smoothed rewards of a trainer, by seed; at both ends over fewer steps."""
    rows = [row for group in groups for row in group.rows if row.provider == name and row.runs]
    rewards = [Series(row.info["rewards"]) for row in rows]
    return [x.rolling(_SMOOTHED, center=True, min_periods=1).mean() for x in rewards]


def _mismatch(groups: Sequence[Group]) -> Any:
    """Draw mean and 99th percentile of the difference by probability, for each head."""
    rows = [row for group in groups if group.benchmark == "mismatch" for row in group.rows]
    found = {
        label: row.info["by_probability"]
        for name, label in _HEADS.items()
        for row in rows
        if row.runs and row.provider == name
    }
    if not found:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.2), squeeze=False)
    for axis, place, title in zip(axes[0], (0, 1), ("mean", "99th percentile"), strict=True):
        for number, (label, bands) in enumerate(found.items()):
            names = [band for band in BANDS if band in bands]
            places = [index + 0.28 * (number - 1) for index in range(len(names))]
            heights = [bands[band][place] for band in names]
            axis.bar(places, heights, 0.26, label=label, color=(_THEIRS, _OURS, _BOTH)[number])
            axis.set_xticks(range(len(names)), names)
        axis.set_title(f"|log p of vLLM - log p of the trainer|, {title}", fontsize=10, loc="left")
        axis.set_ylabel("nats")
        axis.grid(alpha=0.3, axis="y")
        axis.legend(fontsize=8)
    return figure


def _ratios(groups: Sequence[Group]) -> Any:
    """Draw the median errors of heads in bf16 on real text, by the token's probability."""
    real = [
        group
        for group in groups
        if group.benchmark == "accuracy"
        and (group.facts["dtype"], group.facts.get("inputs")) == ("bf16", REAL)
    ]
    found = {
        title: bars
        for name, title in _ERRORS.items()
        for group in real
        if (bars := _by_library(group, name))
    }
    if not found:
        return None
    figure, axes = plt.subplots(1, len(found), figsize=(4.6 * len(found), 3.4), squeeze=False)
    for axis, (title, bars) in zip(axes[0], found.items(), strict=True):
        width = 0.84 / len(bars)
        for number, (label, medians) in enumerate(bars.items()):
            names = [band for band in BANDS if band in medians]
            places = [index + width * (number - (len(bars) - 1) / 2) for index in range(len(names))]
            color = (_OURS, _THEIRS, _BOTH)[number % 3]
            heights = [medians[band] for band in names]
            axis.bar(places, heights, 0.92 * width, label=label, color=color)
            axis.set_xticks(range(len(names)), names)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("probability p of the token")
        axis.set_axisbelow(True)
        axis.grid(alpha=0.3, axis="y")
        drawn = [error for medians in bars.values() for error in medians.values()]
        axis.set_ylim(min(drawn) / 3, max(drawn) * (max(drawn) / min(drawn)) ** 0.5)  # the legend
        axis.legend(fontsize=7.5, loc="upper left")
    return figure


def _by_library(group: Group, name: str) -> dict[str, dict[str, float]]:
    """Return the median errors of each band, by the labels of all that have the same."""
    labels: dict[str, list[str]] = {}
    medians: dict[str, dict[str, float]] = {}
    for provider, label in _ROUNDING.items():
        info = row.info if (row := group[provider]) else {}
        bands = {band: info[f"{name}, {band}"][0] for band in BANDS if f"{name}, {band}" in info}
        if bands:
            same = " ".join(map(text.error, bands.values()))
            labels.setdefault(same, []).append(label)
            medians.setdefault(same, bands)
    return {", ".join(labels[same]): medians[same] for same in labels}


# the title of a picture, and the function that draws it
PLOTS: dict[str, tuple[str, Callable[[Sequence[Group]], Any]]] = {
    "time": (
        "Time over the number of tokens",
        partial(_over_tokens, "x bare GEMMs", lambda group, row: group.ratio(row, BARE)),
    ),
    "memory": (
        "Extra memory over the number of tokens",
        partial(_over_tokens, "MiB", lambda _, row: _mib(row)),
    ),
    "accuracy": ("Errors by output and provider, shorter is better", _accuracy),
}
PICTURES: dict[str, tuple[str, Callable[[Sequence[Group]], Any]]] = {
    "rewards": ("Reward of SmolLM2-135M-Instruct over optimizer steps, by trainer", _rewards),
    "mismatch": ("Difference of log-probabilities between vLLM and the trainer", _mismatch),
    "ratios": ("Errors of log-probabilities and gradients by the token's probability", _ratios),
}
