"""The parts of the page that are text: numbers, warnings, samples, tables."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_trainer.monitor.report.health import Finding
from grpo_trainer.monitor.report.record import RunRecord
from grpo_trainer.monitor.report.series import Curves
from grpo_trainer.monitor.report.texts import PromptSamples, Sample, Step

# metric -> its name on a tile
_TILES = {
    "reward": "reward",
    "eval_reward": "reward, held out",
    "kl": "KL",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "tokens_per_second": "tokens/s",
    "step_time": "seconds per step",
}


def tiles(run: RunRecord, curves: Curves, named: bool = False) -> str:
    """Return the run's first and last numbers; with its name, if several are compared."""
    boxes = [_steps_tile(run)]
    for metric, label in _TILES.items():
        values = curves[metric].finite if metric in curves else []
        if values:
            moved = f"{number(values[0])} &rarr; " if len(values) > 1 else ""
            boxes.append(_tile(label, f"<small>{moved}</small>{number(values[-1])}"))
    name = f"<h2>{html.escape(run.name)}</h2>" if named else ""
    return f'{name}<div class="tiles">{"".join(boxes)}</div>'


def warning_box(found: Sequence[Finding]) -> str:
    """Return what looks unwell, and what helps."""
    items = "".join(
        f"<li><strong>{html.escape(item.title)}.</strong> {html.escape(item.text)}</li>"
        for item in found
    )
    return f'<aside class="warnings" role="note"><h2>Worth a look</h2><ul>{items}</ul></aside>'


def samples_block(prompts: Sequence[PromptSamples]) -> str:
    """Return completions of a prompt, step beside step."""
    if not prompts:
        return ""
    blocks = [
        f"<details{' open' if index == 0 else ''}><summary>"
        f"<code>{html.escape(_short(item.prompt))}</code></summary>"
        f'<div class="steps">{"".join(map(_step, item.steps))}</div></details>'
        for index, item in enumerate(prompts)
    ]
    return f"<h2>Completions of one prompt over the run</h2>{''.join(blocks)}"


def facts_table(title: str, facts: Mapping[str, Any], folded: bool = False) -> str:
    """Return names and values; nothing if there are none."""
    if not facts:
        return ""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_value(value))}</td></tr>"
        for name, value in facts.items()
    )
    heading = html.escape(title)
    table = f'<div class="scroll"><table>{rows}</table></div>'
    if folded:
        return f'<details class="all"><summary>{heading}</summary>{table}</details>'
    return f"<h2>{heading}</h2>{table}"


def differences_table(title: str, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return where the runs' facts are not all the same; nothing if they are."""
    names = dict.fromkeys(name for _, facts in runs for name in facts)
    rows = [
        [name, *values]
        for name in names
        if len(set(values := [_value(facts.get(name, "-")) for _, facts in runs])) > 1
    ]
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in runs)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, *values in rows
    )
    table = f"<table><thead><tr><td></td>{head}</tr></thead>{body}</table>"
    return f'<h2>{html.escape(title)}</h2><div class="scroll">{table}</div>'


def number(value: float) -> str:
    """Return three digits, in full where they stand for more than that."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _steps_tile(run: RunRecord) -> str:
    last = max(int(row.get("step", 0)) for row in run.history)
    return _tile("steps", f"{last:,}")


def _tile(label: str, value: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{html.escape(label)}</span></div>'


def _step(step: Step) -> str:
    samples = "".join(map(_sample, step.samples))
    return f'<div class="step"><h4>step {step.step}</h4>{samples}</div>'


def _sample(sample: Sample) -> str:
    reward = "-" if math.isnan(sample.reward) else number(sample.reward)
    return f"<blockquote><b>{reward}</b><pre>{html.escape(sample.text) or ' '}</pre></blockquote>"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(text: str, characters: int = 400) -> str:
    return text if len(text) <= characters else text[:characters] + "..."
