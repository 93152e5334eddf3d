"""Measurements as tables: one way to write any group, and two views over all cases of the heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series, concat

from benchmarks import text
from benchmarks.providers import EVERY, PROVIDERS
from benchmarks.providers.base import is_ours
from benchmarks.results import MOST_SPREAD, RESULTS, Group, Row
from benchmarks.shapes import DTYPES, INPUTS, MODELS, WORKS

BARE = "bare-gemms"
QUOTED = ("ours", "ours-input")  # ours with exact logits, and with logits rounded as baselines do
UNSTEADY = "unsteady"  # in place of a time
# a ratio of memories is written only if ours is at least this share of the largest one in the case
LEAST_SHARE = 0.05
# columns that are computed from times, which an unsteady row doesn't show
_OF_TIMES = ("generate", "train", "TFLOP/s", "GB/s", "x its bytes", "x bf16 GEMM")
_HEAD_SHARE, _OF_SHARE = "the head in it", ("theirs", "no head")  # a column and its other rows


@dataclass(frozen=True)
class Layout:
    """How the groups of one benchmark are shown: times, the cells of the rows, and errors."""

    title: str
    about: str = ""  # what the benchmark shows, as a section of a document begins
    base: str = ""  # its time is written in seconds, and all other times as a ratio to it
    side_by_side: bool = False  # the dtypes of a case share a table
    together: bool = False  # all groups share a table
    contest: bool = False  # sorted, compared with ours, and the smallest value is bold
    notes: bool = False  # a column describes each row
    providers: bool = False  # the descriptions are the current notes of the providers
    errors: bool = False  # a column lists the errors


LAYOUTS = {
    "heads": Layout("Every case", base=BARE, side_by_side=True, contest=True),
    "training": Layout(
        "A training step",
        "A whole GRPO step of a small model with a real head, generation included: our trainer "
        "next to TRL's. Each round builds every trainer again and measures its second step.",
        contest=True,
        errors=True,
    ),
    "vocabulary": Layout(
        "A large vocabulary",
        "A step of a model with the sizes of Gemma 3 1B, whose vocabulary has 262,144 ids, and "
        "random weights: forward and backward of one sequence, with gradient checkpointing and "
        "without an optimizer. The longest sequence whose step fits into the memory of a small GPU "
        "is found by bisection. On a CPU the model has fewer layers, and only memory and errors "
        "are measured.\n\n"
        "The head shares its weight with the embedding. With every head, both gradients of that "
        "weight exist at the end of the backward, which is most of the peak for a short sequence.",
        contest=True,
        errors=True,
    ),
    "padding": Layout(
        "Padding",
        "Forward and backward of one generation batch with completions of unequal lengths, through "
        "the real trainers. TRL pads all completions to the longest one. Our trainer pads each "
        "micro-batch, packs it, or cuts it by a budget of tokens. The errors are differences from "
        "TRL's loss and gradient.",
        notes=True,
        errors=True,
    ),
    "prefixes": Layout("Completions with a common beginning", notes=True, errors=True),
    "divergence": Layout(
        "Divergence from a teacher",
        "Forward and backward of the divergence of a head from a teacher's head, as distillation "
        "computes it, next to other libraries.",
        base=BARE,
        notes=True,
    ),
    "savings": Layout(
        "Skipped rows and adapters",
        "One of our losses on one batch, with more or less work to do, in turns in one run: masked "
        "tokens, tokens at zero advantage with and without their metrics, a frozen head, and LoRA "
        "on it. Each time is relative to the row that it is compared with.",
        notes=True,
        providers=True,
        errors=True,
    ),
    "products": Layout("Matrix products", base="logits bf16", notes=True),
    "tiles": Layout("Tiles of the GPU kernels", contest=True, notes=True),
    "row_kernel": Layout("The kernel that reads logits", notes=True, errors=True),
    "anchored": Layout("The GEMM that stores softmax numerators", notes=True, errors=True),
    "waits": Layout("GPU waits for the CPU", notes=True),
    "exactness": Layout("Exactness on hard inputs"),
    "skipping": Layout("Rows without a gradient", base=BARE),
    "lora": Layout("LoRA steps of two trainers", errors=True),
    "activations": Layout("Stored activations of a body", base="plain", notes=True, errors=True),
    "real": Layout("Steps of a pretrained model", notes=True, errors=True),
    "curves": Layout("Whole runs of a pretrained model", together=True, notes=True),
    "optimizers": Layout("Sparse backwards by optimizer", together=True, notes=True),
    "states": Layout("Weights and optimizer states in fewer bits", together=True, notes=True),
    "updates": Layout("Small steps in fewer bits", together=True, notes=True),
    "asynchronous": Layout("Batches ahead of training", base="0-ahead", together=True, notes=True),
    "rounding": Layout("Rounding of the weight's gradient", notes=True),
    "sparse": Layout(
        "Steps with a sparse backward",
        "A whole step of a loss, next to the bare GEMMs of its work. Real-text rows are a "
        "pretrained model's own samples; for a head larger than the model's own, ids repeat 6 nats "
        "below, so that the softmax keeps its shape. The more open the policy, the more entries a "
        "row needs, and the longer the step.",
        base=BARE,
        notes=True,
        providers=True,
    ),
    "entries": Layout(
        "The passes of a sparse backward",
        "Each pass next to the time that a copy of its bytes needs.",
        notes=True,
        errors=True,
    ),
    "backwards": Layout(
        "Backward modes",
        "The cost and the error of an op's backward, next to the one GEMM that computes the "
        "logits: by computing the logits again, by keeping what it needs, or from the entries of "
        "the softmax that matter. The inputs, from which targets are sampled, resemble a policy in "
        "RL, plain text, or the other tables, whose tail is flat. With a flat tail the rows need "
        "too many entries, so a sparse backward is the exact one with a search on top.\n\n"
        "*x bare*: time of forward and backward over the bare GEMM of the logits, in the same run. "
        "*dhidden*, *dweight*: norm of the difference over the norm. *entries*: how many entries "
        "of a row the forward keeps, over rows that are not exact. *exact*: the share of rows that "
        "are.",
        base=BARE,
        side_by_side=True,
    ),
    "sharded": Layout(
        "Over several ranks",
        "Each rank has all tokens (vocabulary) or its share of them (FSDP2, ZeRO-3). With few "
        "tokens, most of the memory is the gathered head and its gradient. Masked rows send "
        "nothing.",
        base="one process",
        notes=True,
        errors=True,
    ),
    "hosts": Layout("In other trainers", base="theirs", together=True, errors=True),
    "rollouts": Layout(
        "Generation and the rest of a step",
        "The trainer with each engine: how fast it generates, what new weights cost, and how the "
        "time of a step divides. The numbers are medians over the steps of one run, by the clock "
        "that the trainer logs.\n\n"
        "*generated*: completion tokens over the seconds of generation. *update*: from the "
        "trainer's weights to an engine that can generate with them; the engines of transformers "
        "use the policy's own weights. All other numbers are shares of a step. If generation "
        "overlaps with training, only the wait counts.",
        notes=True,
    ),
    "sparsity": Layout("Sparsity of the softmax"),
    "mismatch": Layout("Log-probabilities of the engine and the trainer", notes=True),
    "routing": Layout("Log-probabilities with a mixture of experts", notes=True),
    "accuracy": Layout(
        "Errors on a policy's distributions",
        "Errors, token by token, on the distributions of a policy that is sure of most tokens and "
        "open about some, before a real head. Targets are sampled from the distributions, and the "
        "reference is fp64 on the same inputs.\n\n"
        "A cell has the median and, in brackets, the largest error; for the ratio noise, the mean "
        "instead of the median.\n\n"
        "* *logp*: absolute error of the log-probability, by the probability p of the token.\n"
        "* *ratio noise*: `|exp(logp - exact) - 1|`, the error of an importance ratio whose other "
        "side is exact. On-policy, that ratio should be 1.\n"
        "* *H*: absolute error of the entropy.\n"
        "* *loss*: absolute error, on an off-policy batch in which some tokens are clipped.\n"
        "* *dhidden*, *dweight*: norm of the difference over the norm.\n"
        "* *rows of dhidden*: the same for each row with a gradient. If p is near 1, the row is a "
        "small difference of large terms, which rounded logits get wrong.\n\n"
        "Gradients are returned in the dtype of the inputs, and no one is more exact than that.",
        contest=True,
    ),
}


def is_quoted(provider: str) -> bool:
    """Return whether tables of one case have it: every library, and only our defaults."""
    return provider in QUOTED or not (is_ours(provider) or _is_queued(provider))


def competes(provider: str) -> bool:
    """Return whether it may be the best of a table: not a yardstick, and not a queued step."""
    return not (provider.startswith(BARE) or _is_queued(provider))


def _is_queued(provider: str) -> bool:
    return provider in PROVIDERS and PROVIDERS[provider].queued


def show(
    benchmark: str,
    groups: Sequence[Group],
    write: Callable[[DataFrame], str] = text.markdown,
    samples: bool = False,
) -> str:
    """Show the groups of one benchmark; below each table, list the rows it lacks and why.

    ``samples``: a column has the fastest and the slowest sample.
    """
    layout = LAYOUTS[benchmark]
    tables: dict[str, list[Group]] = {}
    for group in in_order(group for group in groups if group.benchmark == benchmark):
        facts = {**group.facts, "dtype": ""} if layout.side_by_side else group.facts
        tables.setdefault("" if layout.together else json.dumps(facts), []).append(group)
    parts = []
    for found in tables.values():
        parts += [caption(found), write(frame(found, layout, samples)), missing(found)]
    return "\n\n".join(filter(None, parts))


def frame(groups: Sequence[Group], layout: Layout, samples: bool = False) -> DataFrame:
    """Return a line for each work and provider; each dtype has its columns."""
    found: dict[str, dict[tuple[str, str], tuple[Group, Row]]] = {}  # by dtype and place
    for group in groups:
        for row in filter(lambda row: row.shown, group.rows):
            place = row.info.get("work", ""), row.provider
            found.setdefault(group.facts["dtype"], {})[place] = group, row
    first = {place: pair for each in reversed([*found.values()]) for place, pair in each.items()}
    places = [*dict.fromkeys(place for each in found.values() for place in each)]
    if layout.contest:
        places.sort(key=lambda place: _rank(*first[place]))
    head = DataFrame(places, columns=["work", "provider"])
    head["work"] = head["work"].mask(head["work"] == head["work"].shift(), "")
    head["note"] = [_note(first[place][1], layout) for place in places]
    parts = [head.set_axis([""] * 3, axis=1)]
    for dtype, each in found.items():
        lines = (_cells(*each[x], layout, samples) if x in each else {} for x in places)
        cells = DataFrame(lines).fillna("")
        cells = cells[sorted(cells, key="errors".__eq__)]  # errors are last
        if layout.contest:
            counts = [competes(name) for _, name in places]
            cells = cells.apply(text.bold_least, counts=counts)
        prefix = f"{dtype}: " if len(found) > 1 else ""
        parts.append(cells.rename(columns={cells.columns[0]: prefix + cells.columns[0]}))
    return concat(parts, axis=1)


def _note(row: Row, layout: Layout) -> str:
    if layout.providers and row.provider in EVERY:
        return EVERY[row.provider].note
    return row.note * layout.notes


def _rank(group: Group, row: Row) -> tuple[int, float]:
    """Return the rank of a row: defaults before variants, by time, or by error without a time."""
    size = row.median
    if not row.seconds:
        size = row.errors.get("dhidden", row.info.get("ratio noise", [None])[0])
    return _place(row.provider), math.inf if size is None or not row.runs else size


def _place(provider: str) -> int:
    """Place the bare GEMMs first, then ours, the defaults of the others, and variants."""
    if provider in (BARE, "ours"):
        return (BARE, "ours").index(provider)
    return 2 if provider in PROVIDERS and PROVIDERS[provider].default else 3


def _cells(group: Group, row: Row, layout: Layout, samples: bool = False) -> dict[str, str]:
    """Return the text of a row, by column."""
    base = row.info.get("base", layout.base)
    time = "x bare" if base == BARE and group.ratio(group[BARE], BARE) else "time"
    if not row.runs:
        return {time: "FAILED"}
    cells = {time: UNSTEADY if row.unsteady else text.duration(row.median)}
    ratio = text.ratio(group.ratio(row, base))
    if ratio and row.provider != base:
        of = f" of {base}" * ("base" in row.info)
        cells[time] = ratio if base == BARE else f"x {ratio}{of}"
    elif ratio and base == BARE:
        cells[time] = f"{ratio} ({cells[time]})"
    if layout.contest:
        cells["x ours"] = text.ratio(group.ratio(row, "ours"))
    if samples and row.seconds:
        ends = map(text.duration, (min(row.seconds), max(row.seconds)))
        cells["fastest to slowest"] = " to ".join(ends)
    errors = row.errors.items() if layout.errors else ()
    cells["errors"] = ", ".join(f"{name} {text.error(x)}" for name, x in errors)
    return cells | _steady_cells(group, row)


def _steady_cells(group: Group, row: Row) -> dict[str, str]:
    """Return the cells of a row, without numbers that come from unsteady times."""
    unsure = set(_OF_TIMES) if row.unsteady else set()
    if any(one and one.unsteady for one in (row, *map(group.__getitem__, _OF_SHARE))):
        unsure.add(_HEAD_SHARE)
    return {name: "" if name in unsure else cell for name, cell in row.cells.items()}


def caption(groups: Sequence[Group]) -> str:
    """Describe a case: what was measured, where, when, and at which commit."""
    one = groups[0]
    facts = one.facts
    shape = f"D = {facts['hidden']}, V = {facts['vocabulary']}" if "hidden" in facts else ""
    if facts.get("softcap") is not None:
        shape += f", softcap {facts['softcap']:g}"
    dtypes = {group.facts["dtype"] for group in groups}
    said = [
        WORKS[facts["work"]].title if facts.get("work") in WORKS else facts.get("work", ""),
        facts.get("kernel", ""),
        facts["model"] + (f" ({shape})" if shape else ""),
        f"T = {facts['tokens']}" if facts["tokens"] else "",
        facts["dtype"] if len(dtypes) == 1 else "",
        facts["inputs"] + " inputs" if "inputs" in facts else "",
        one.about,
        *_measured(groups),
    ]
    return f"{'; '.join(filter(None, said))}."


def _measured(groups: Sequence[Group]) -> list[str]:
    """Name device, date and commit once, or for each dtype if they differ."""
    places = {group.facts["dtype"]: f"{group.where}; {group.source}" for group in groups}
    if len(set(places.values())) == 1:
        return [*places.values()][:1]
    return [f"{dtype}: {place}" for dtype, place in places.items()]


def missing(groups: Sequence[Group]) -> str:
    """List the providers that a table lacks, by reason, and explain wrong and unsteady rows."""
    everywhere = {group.facts["dtype"] for group in groups}
    rows = DataFrame([{"dtype": x.facts["dtype"], **vars(row)} for x in groups for row in x.rows])
    parts = []
    for title, state in {"Not run": "absent", "Not applicable": "unable", "Wrong": "wrong"}.items():
        listed = []
        for why, who in rows[rows["state"] == state].groupby("reason", sort=False):
            dtypes = who.groupby("provider", sort=False)["dtype"].agg(set)
            names = (n if x == everywhere else f"{n} in {min(x)}" for n, x in dtypes.items())
            listed.append(f"{', '.join(names)} ({why})")
        parts += [f"{title}: {'; '.join(listed)}."] if listed else []
    if any(row.runs and row.unsteady for group in groups for row in group.rows):
        parts.append(f"Unsteady: the slowest sample is more than {MOST_SPREAD:g} x the fastest.")
    return " ".join(parts)


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort by work, then as models, inputs and dtypes are listed, then by seed and setup."""

    def place(group: Group) -> tuple[Any, ...]:
        def index(name: str, known: Iterable[str]) -> int:
            listed, found = list(known), group.facts.get(name)
            return listed.index(found) if found in listed else len(listed)

        inputs = (index("inputs", INPUTS) - 1) % len(INPUTS)  # the flat tail last
        model = index("model", MODELS), group.facts["tokens"]
        listed = index("work", WORKS), *model, inputs, index("dtype", DTYPES)
        return listed, group.facts.get("seed", 0), group.facts.get("setup", "")

    return sorted(groups, key=place)


def _heads(groups: Iterable[Group]) -> DataFrame:
    """Return a line for each case of the heads and each provider that a table has."""

    def extra_ratio(group: Group, row: Row) -> float | None:
        ours = group["ours"].extra_bytes if group["ours"] else None
        largest = max((x.extra_bytes or 0 for x in group.rows if x.runs), default=0)
        if row.extra_bytes is None or not ours or ours < LEAST_SHARE * largest:
            return None
        return row.extra_bytes / ours

    return DataFrame([
        {
            **{name: group.facts[name] for name in ("work", "model", "tokens", "dtype")},
            "case": number,
            "provider": row.provider,
            "runs": row.runs,
            "unsteady": row.unsteady,
            "seconds": row.median,
            "fastest": min(row.seconds, default=None),
            "x bare": group.ratio(row, BARE),
            "x ours": group.ratio(row, "ours"),
            "x ours-input": group.ratio(row, "ours-input"),
            "extra": row.extra_bytes,
            "extra memory x ours": extra_ratio(group, row),
            "value error": row.worst("loss", "logprobs", "entropy"),
            "gradient error": row.worst("dhidden", "dweight"),
            "same bits: again": row.info.get("repeatable"),
            "in another batch": row.info.get("batch_invariant"),
        }
        for number, group in enumerate(in_order(x for x in groups if x.benchmark == "heads"))
        for row in group.rows
        if row.shown
    ])  # fmt: skip


def cases(groups: Sequence[Group]) -> str:
    """Show a line per case of the heads: ours and the best baseline, in time and in memory."""
    rows = _heads(groups)
    if rows.empty:
        return ""
    header = [
        "work", "model", "T", "dtype", "bare",
        "x bare: ours", "ours-input", "fastest baseline",
        "extra MiB: ours", "ours-input", "least memory: baseline",
    ]  # fmt: skip
    lines = [_case(case) for _, case in rows.groupby("case", sort=False)]
    return text.markdown(DataFrame(lines, columns=header))


def _case(rows: DataFrame) -> list[str]:
    rows = rows.set_index("provider")
    one, measured = rows.iloc[0], rows[rows["runs"]]
    cells = [str(one[name]) for name in ("work", "model", "tokens", "dtype")]
    bare = text.duration(measured["seconds"].get(BARE))
    cells.append(UNSTEADY if BARE in rows.index and rows["unsteady"][BARE] else bare)
    baselines = [name for name in measured.index if competes(name) and not is_ours(name)]
    for column, write in (("x bare", text.ratio), ("extra", text.mib)):
        known = measured[column].dropna()
        others = known[known.index.isin(baselines)]
        best = others.idxmin() if len(others) else ""
        texts = [write(known.get(name)) for name in (*QUOTED, best)]
        if column == "x bare":
            unsteady = [name in rows.index and rows["unsteady"][name] for name in QUOTED]
            unsteady.append(_may_be_faster(measured.loc[baselines], best))
            texts = [UNSTEADY if bad else x for bad, x in zip(unsteady, texts, strict=True)]
            best *= texts[-1] != UNSTEADY
        *ours, other = texts if UNSTEADY in texts else text.bold_least(texts)
        wrong = [name in rows.index and not rows["runs"][name] for name in QUOTED]
        cells += ["FAILED" if bad else cell for bad, cell in zip(wrong, ours, strict=True)]
        cells.append(f"{other} {best}".strip())
    return cells


def _may_be_faster(baselines: DataFrame, best: str) -> bool:
    """Return whether an unsteady baseline has been faster than the best of the steady ones."""
    unsteady = baselines["fastest"][baselines["unsteady"]]
    return len(unsteady) > 0 and not unsteady.min() >= baselines["seconds"].get(best, math.inf)


def standings(groups: Sequence[Group]) -> str:
    """Show a line for each provider, over all of its cases of a dtype."""
    rows, parts = _heads(groups), []
    for dtype in DTYPES if len(rows) else ():
        if len(of_dtype := rows[rows["dtype"] == dtype]):
            parts += [f"{dtype}, {of_dtype['case'].nunique()} cases:"]
            parts += [text.markdown(_standings(of_dtype))]
    return "\n\n".join(parts)


def _standings(rows: DataFrame) -> DataFrame:
    by_provider = rows.groupby("provider", sort=False)
    ratios = by_provider["x bare"].median().fillna(math.inf)
    found = by_provider.agg(
        cases=("seconds", lambda x: str(x.count())),
        **{name: (name, _write_spread) for name in ("x bare", "x ours", "x ours-input")},
        **{"extra memory x ours": ("extra memory x ours", _write_spread)},
        **{name: (name, _write_worst) for name in ("value error", "gradient error")},
        **{name: (name, _write_always) for name in ("same bits: again", "in another batch")},
        failed=("runs", lambda x: str((~x).sum() or "")),
    )
    order = sorted(found.index, key=lambda name: (_place(name), ratios[name]))
    return found.loc[order].rename_axis("").reset_index()


def _write_spread(values: Series) -> str:
    return text.spread([*values.dropna()])


def _write_worst(errors: Series) -> str:
    return text.error(max(errors.dropna(), default=None))


def _write_always(values: Series) -> str:
    """Write whether it holds in all cases in which it is known."""
    known = [*values.dropna()]
    failed = known.count(False)
    if 0 < failed < len(known):
        return f"all but {failed}"
    return "no" if failed else "yes" * any(known)


EXECUTED = RESULTS / "executed.json"
TARGETS = ("sm_80", "sm_90", "sm_100")
_NOTABLE = 0.005  # instructions of a logit that two digits show


def executed(path: Path = EXECUTED) -> str:
    """Show the instructions of GPU kernels, as ``test_executed.py`` counts them."""
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    keys = ("provider", "with", "dtype", "kernel", "target")
    sass = {tuple(x[key] for key in keys): x for x in found["compiled"]}
    kinds = ("vector", "transcendental", "shared", "scalar", "wait")
    order = list(dict.fromkeys(x["with"] for x in found["executed"]))
    rows, products = [], {}
    for x in sorted(found["executed"], key=lambda x: (order.index(x["with"]), x["dtype"])):
        for work in x["work"]:
            count = work["instructions"]
            key = (x["provider"], x["with"], x["dtype"], work["kernel"])
            of_sass = {target: sass.get((*key, target)) for target in TARGETS}
            more = f", {x['with']}" if x["with"] else ""
            name = f"{x['provider']}{more}: `{work['kernel']}`"
            if count["matrix"] >= _NOTABLE:
                products[name] = f"{count['matrix']:.2f}"
            rows.append({
                "kernel": name,
                "logits": x["dtype"],
                **{kind: f"{count[kind]:z.2f}" for kind in kinds},
                "loads and stores": f"{count['load'] + count['store']:.2f}",
                "bytes read": f"{work['read']:z.1f}",
                "written": f"{work['written']:z.1f}",
                **{name: f"{y['instructions']:.1f}" if y else "" for name, y in of_sass.items()},
                "registers": str(of_sass["sm_90"]["registers"]) if of_sass["sm_90"] else "",
            })  # fmt: skip
    where = found["environment"]
    versions = ", ".join(f"{n} {where['versions'][n]}" for n in ("triton", "trl", "liger-kernel"))
    said = "; ".join(f"{count} in {name}" for name, count in products.items())
    return (
        f"{text.markdown(rows)}\n\nMatrix instructions, which have no column: {said}; none in any "
        f"other row. {where['date'][:10]}, {where['commit'][:12]}, {versions}."
    )
