"""What a marker in a document can ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from benchmarks import text
from benchmarks.accuracy.derive import accuracy_figures, is_of_gradients
from benchmarks.accuracy.providers import PROVIDERS as COMPARED
from benchmarks.accuracy.table import accuracy_table, caption, legend
from benchmarks.accuracy.table import in_order as accuracy_in_order
from benchmarks.context import Context, NotMeasuredError, where
from benchmarks.derive import phase_times, times
from benchmarks.overview import headline, summary
from benchmarks.plots import PLOTS
from benchmarks.providers import PROVIDERS
from benchmarks.rollouts.table import rollouts
from benchmarks.savings.table import caption as savings_caption
from benchmarks.savings.table import savings_table
from benchmarks.savings.variants import VARIANTS
from benchmarks.schedules import matches, schedules_table
from benchmarks.shapes import DTYPES, MODELS
from benchmarks.standing import ahead, behind, standings
from benchmarks.table import column_legend, training_table
from benchmarks.training.providers import PROVIDERS as TRAINERS
from benchmarks.work import WORKS

NOT_MEASURED = "not measured yet"
_KINDS = ("cpu", "cuda")
# parameter -> what it may be
_CHOICES: dict[str, Collection[str]] = {
    "WORK": WORKS,
    "MODEL": MODELS,
    "DTYPE": DTYPES,
    "PROVIDER": PROVIDERS,
    "BASE": PROVIDERS,
    "COMPARED": COMPARED,
    "OUTPUT": ("loss", "logprobs", "entropy", "dhidden", "dweight"),
    "PHASE": ("step", "generate", "train"),
    "TRAINER": [trainer.name for trainer in TRAINERS],
    "VARIANT": [variant.name for variant in VARIANTS if variant.base],
    "PLOT": [plot.name for plot in PLOTS],
}


def _written(write: Callable[[float], str], value: float | None) -> str:
    if value is None:
        raise NotMeasuredError
    return write(value)


def _ratio(context: Context, *names: str) -> str:
    *which, base = names
    found = context.figures(*which).times
    return _written(text.ratio, found.to.get(base) if found else None)


def _median(context: Context, *which: str) -> str:
    found = context.figures(*which).times
    return _written(text.duration, found.median if found else None)


def _extra(context: Context, *which: str) -> str:
    return _written(lambda x: f"{text.mib(x)} MiB", context.figures(*which).extra)


def _rate(context: Context, *which: str) -> str:
    return _written(lambda x: f"{text.digits(x)} TFLOP/s", context.figures(*which).tflops)


def _prediction(context: Context, *which: str) -> str:
    return _written(text.ratio, context.figures(*which).prediction)


def _error(context: Context, *names: str) -> str:
    *which, output = names
    return _written(text.error, context.figures(*which).row.errors.get(output))


def _step(context: Context, device: str, phase: str, provider: str, base: str) -> str:
    for table in context.device(device).training:
        timed = times(table.rows) if phase == "step" else phase_times(table.rows, phase)
        found = timed.get(provider)
        if found and base in found.to:
            return text.ratio(found.to[base])
    raise NotMeasuredError(provider)


def _headline(context: Context, device: str, *which: str) -> str:
    tables = context.tables(device, *which)
    table, environment = tables[0], tables[0].environment
    caption = (
        f"{WORKS[table.work].title}; {table.model} (D = {table.hidden}, V = {table.vocabulary}), "
        f"T = {table.tokens}; {where(environment)}; {environment.day}, {environment.source}."
    )
    return f"{caption}\n\n{headline(tables)}"


def _summary(context: Context, device: str) -> str:
    link = f"{context.results}/{context.device(device).slug}/report.md"
    return summary(context.cases(device), link)


def _training(context: Context, device: str) -> str:
    tables = context.device(device).training
    if not tables:
        raise NotMeasuredError(device)
    return "\n\n".join(f"{table.model}:\n\n{training_table(table)}" for table in tables)


def _accuracy(context: Context, device: str) -> str:
    if not (tables := context.device(device).accuracy):
        raise NotMeasuredError(device)
    parts = [legend(tables)]
    for table in accuracy_in_order(tables):
        where_and_when = f"{where(table.environment)}; {table.environment.day}."
        parts += [f"{caption(table)} {where_and_when}", accuracy_table(table)]
    return "\n\n".join(parts)


def _savings(context: Context, device: str) -> str:
    if not (tables := context.device(device).savings):
        raise NotMeasuredError(device)
    parts = []
    for table in tables:
        parts += [f"{savings_caption(table)} {where(table.environment)}.", savings_table(table)]
    return "\n\n".join(parts)


def _rollouts(context: Context, device: str) -> str:
    if not (entries := context.device(device).rollouts):
        raise NotMeasuredError(device)
    return rollouts(entries)


def _saved(context: Context, device: str, dtype: str, variant: str) -> str:
    for table in context.device(device).savings:
        if table.dtype != dtype:
            continue
        timed = times(table.rows)
        base = next(row.base for row in table.rows if row.provider == variant)
        if variant in timed and base in timed[variant].to:
            return text.ratio(timed[variant].to[base])
    raise NotMeasuredError(f"{device} {dtype} {variant}")


def _noise(context: Context, device: str, model: str, dtype: str, provider: str) -> str:
    for table in context.device(device).accuracy:
        if (table.model, table.dtype) == (model, dtype) and not is_of_gradients(table):
            found = accuracy_figures(table).get(provider)
            return _written(text.error, found.noise if found else None)
    raise NotMeasuredError(f"{device} {model} {dtype}")


def _schedules(context: Context, device: str) -> str:
    tables = context.cases(device)
    if not matches(tables):
        raise NotMeasuredError(device)
    return schedules_table(tables)


def _reports(context: Context) -> str:
    """A line per device that was measured."""
    lines = [
        f"* [{where(device.environment)}]({context.results}/{slug}/report.md): "
        f"{len(device.tables)} cases, {device.environment.day}"
        for slug, device in context.devices.items()
    ]
    return "\n".join(lines) or NOT_MEASURED


def _plot(context: Context, device: str, name: str) -> str:
    slug = context.device(device).slug
    title = next(plot.title for plot in PLOTS if plot.name == name)
    return f"![{title}]({context.results}/{slug}/{name}.png)"


def _models(context: Context) -> str:
    rows = (
        [f"`{x.name}`", str(x.hidden), str(x.vocabulary), f"{x.softcap:g}" if x.softcap else ""]
        for x in MODELS.values()
    )
    return text.markdown_table(["", "hidden", "vocabulary", "softcap"], rows)


def _works(context: Context) -> str:
    return "\n".join(f"* `{name}`: {work.title}" for name, work in WORKS.items())


def _providers(context: Context) -> str:
    return "\n".join(f"* `{name}`: {provider.note}" for name, provider in COMPARED.items())


@dataclass(frozen=True, kw_only=True)
class Generator:
    """One name that a marker can have."""

    call: Callable[..., str]
    parameters: str = ""
    block: bool = False  # paragraphs of their own, not a part of a sentence

    def check(self, words: Sequence[str], context: Context) -> None:
        """Whether ``words`` fit the parameters."""
        names = self.parameters.split()
        if len(words) != len(names):
            raise ValueError(
                f"expected {self.parameters or 'nothing'}, got {' '.join(words) or 'nothing'}"
            )
        for name, word in zip(names, words, strict=True):
            known = _CHOICES.get(name) or (*_KINDS, *context.devices)
            if name == "TOKENS" and not (word.isdigit() or word == "most"):
                raise ValueError(f'TOKENS: expected a number or "most", got {word!r}')
            if name != "TOKENS" and word not in known:
                raise ValueError(f"{name}: expected {' | '.join(known)}, got {word!r}")


_CASE = "DEVICE WORK MODEL TOKENS"
_ROW = f"{_CASE} DTYPE PROVIDER"
GENERATORS = {
    "ratio": Generator(call=_ratio, parameters=f"{_ROW} BASE"),
    "median": Generator(call=_median, parameters=_ROW),
    "extra": Generator(call=_extra, parameters=_ROW),
    "rate": Generator(call=_rate, parameters=_ROW),
    "prediction": Generator(call=_prediction, parameters=_ROW),
    "error": Generator(call=_error, parameters=f"{_ROW} OUTPUT"),
    "step": Generator(call=_step, parameters="DEVICE PHASE TRAINER TRAINER"),
    "device": Generator(call=lambda c, d: where(c.device(d).environment), parameters="DEVICE"),
    "date": Generator(call=lambda c, d: c.device(d).environment.day, parameters="DEVICE"),
    "commit": Generator(call=lambda c, d: c.device(d).environment.source, parameters="DEVICE"),
    "headline": Generator(call=_headline, parameters=_CASE, block=True),
    "summary": Generator(call=_summary, parameters="DEVICE", block=True),
    "standings": Generator(
        call=lambda c, d: standings(c.cases(d)), parameters="DEVICE", block=True
    ),
    "schedules": Generator(call=_schedules, parameters="DEVICE", block=True),
    "ahead": Generator(
        call=lambda c, d, p: ahead(c.cases(d), p), parameters="DEVICE PROVIDER", block=True
    ),
    "behind": Generator(
        call=lambda c, d, p: behind(c.cases(d), p), parameters="DEVICE PROVIDER", block=True
    ),
    "noise": Generator(call=_noise, parameters="DEVICE MODEL DTYPE COMPARED"),
    "accuracy": Generator(call=_accuracy, parameters="DEVICE", block=True),
    "rollouts": Generator(call=_rollouts, parameters="DEVICE", block=True),
    "savings": Generator(call=_savings, parameters="DEVICE", block=True),
    "saved": Generator(call=_saved, parameters="DEVICE DTYPE VARIANT"),
    "training": Generator(call=_training, parameters="DEVICE", block=True),
    "reports": Generator(call=_reports, block=True),
    "plot": Generator(call=_plot, parameters="DEVICE PLOT", block=True),
    "models": Generator(call=_models, block=True),
    "works": Generator(call=_works, block=True),
    "columns": Generator(call=lambda c: column_legend(), block=True),
    "providers": Generator(call=_providers, block=True),
}
