"""What a step is made of, by engine, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks import text
from benchmarks.load import RolloutsEntry
from benchmarks.rollouts.engines import ENGINES, NOT_INSTALLED

_PHASES = {
    "generate": "generate",
    "sync": "update",
    "score": "rewards",
    "old": "old policy",
    "ref": "reference",
    "loss": "loss",
}
_OVERLAP = "-overlap"  # the wait says nothing about how fast such an engine is
_LEGEND = (
    "Medians over the steps of one run of the trainer, by the clock that it logs. generated: "
    "completion tokens over the seconds of generation. update: from the trainer's weights to an "
    "engine that can generate with them; transformers' engines have the policy's own. The rest are "
    "shares of a step; of the generation that overlaps with training only the wait counts."
)


def rollouts(entries: Sequence[RolloutsEntry]) -> str:
    """A table per model, from the smallest, and what the lines mean."""
    parts = [_LEGEND]
    by_size = sorted(entries, key=lambda entry: entry.parameters)
    for model in dict.fromkeys(entry.model for entry in by_size):
        parts += _model([entry for entry in by_size if entry.model == model])
    seen = {entry.engine for entry in entries}
    parts.append("\n".join(f"* `{x.name}`: {x.note}." for x in ENGINES if x.name in seen))
    absent = [engine.name for engine in ENGINES if engine.sent and engine.name not in seen]
    if absent:
        parts.append(f"{', '.join(absent)}: {NOT_INSTALLED}.")
    return "\n\n".join(parts)


def _model(entries: list[RolloutsEntry]) -> list[str]:
    first, order = entries[0], [engine.name for engine in ENGINES]
    caption = (
        f"{first.model}, {text.digits(max(x.parameters for x in entries) / 1e6)} million "
        f"parameters, {first.dtype}; {first.sequences} completions of up to "
        f"{first.completion_tokens} tokens after {first.prompt_tokens}:"
    )
    lines = [_line(x) for x in sorted(entries, key=lambda entry: order.index(entry.engine))]
    shares = [f"{title}, %" for title in _PHASES.values()]
    header = ["", "generated, tokens/s", "update, s", "update, GiB/s", "step, s", *shares]
    return [caption, text.markdown_table(*text.without_empty(header, lines))]


def _line(entry: RolloutsEntry) -> list[str]:
    if entry.failure is not None:
        return [entry.engine, f"FAILED: {entry.failure}", *[""] * (3 + len(_PHASES))]
    rate = update = speed = ""
    if not entry.engine.endswith(_OVERLAP):
        pairs = zip(entry.tokens, entry.phases["generate"], strict=True)
        rate = text.digits(median(tokens / seconds for tokens, seconds in pairs))
    if entry.sent:
        seconds = median(entry.phases["sync"])
        update, speed = text.digits(seconds), text.digits(entry.weight_bytes / 2**30 / seconds)
    shares = [_share(entry, name) for name in _PHASES]
    return [entry.engine, rate, update, speed, text.digits(median(entry.seconds)), *shares]


def _share(entry: RolloutsEntry, phase: str) -> str:
    """Of the steps together, in percent."""
    if phase not in entry.phases or (phase == "sync" and not entry.sent):
        return ""
    return f"{100 * sum(entry.phases[phase]) / sum(entry.seconds):.0f}"
