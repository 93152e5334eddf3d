"""Result files and their tables: rows as recorded, the newest counts, no row is left out."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figure, report, tables, text
from benchmarks.results import RESULTS, Group, Recorder, Row, load, load_run, slug
from benchmarks.shapes import REAL

FACTS = {
    "work": "dapo", "model": "tiny", "tokens": 32, "hidden": 32, "vocabulary": 257,
    "softcap": None, "dtype": "fp32", "inputs": "peaked",
}  # fmt: skip


def group(*rows: Row, folder: Path | None = None, date: str = "", **facts: Any) -> Group:
    recorder = Recorder(folder, "cpu")
    recorder.environment["date"] = date
    return recorder.add("heads", {**FACTS, **facts}, rows, "errors against float64")


def test_stored_files_are_well_formed() -> None:
    for path in RESULTS.glob("*/*.jsonl"):
        found = load_run(path)
        assert found and path.parent.name == slug(found[0].environment["device"]), path
        for each in found:
            assert each.benchmark in tables.LAYOUTS and each.source[:10] in path.name, path
            places = [(row.provider, row.info.get("work")) for row in each.rows]
            assert len(places) == len(set(places)) > 0, path
            for row in each.rows:
                assert all(seconds > 0 for seconds in row.seconds), path
                assert row.runs != bool(row.reason) and (row.runs or not row.seconds), path
                assert not row.runs or all(value < 1 for value in row.errors.values()), path


def test_what_is_recorded_can_be_read_and_the_newest_counts(tmp_path: Path) -> None:
    new, old = {"folder": tmp_path, "date": "2026-02-03"}, {"folder": tmp_path, "date": "2026-01"}
    wrong = Row("eager", state="wrong", reason="error of loss nan", errors={"loss": math.nan})
    group(Row("ours", seconds=[2.0], info={"again": True}), **new)
    group(Row("ours", seconds=[1.0]), **old)
    group(Row("ours", seconds=[3.0]), wrong, dtype="bf16", **old)
    ((_, found),) = load(tmp_path).items()
    fp32, bf16 = sorted(found, key=lambda each: each.facts["dtype"], reverse=True)
    assert fp32.rows == [Row("ours", seconds=[2.0], info={"again": True})]
    assert bf16.rows[0].seconds == [3.0] and math.isnan(bf16.rows[1].errors["loss"])
    assert len(list(tmp_path.rglob("*.jsonl"))) == 3  # none was written over another


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: JSONDecodeError"),
        ('{"benchmark": "heads"}', "line 2: KeyError: 'facts'"),
        ('{"benchmark": "x", "facts": {}, "about": "", "size": 3}', "line 2: TypeError: .*size"),
        (
            '{"benchmark": "heads", "facts": {}, "about": "", "provider": "x", "state": "gone"}',
            "state: expected one of measured, absent, unable, wrong, got 'gone'",
        ),
    ],
)
def test_a_broken_file_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    group(Row("ours"), folder=tmp_path)
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text(path.read_text().splitlines()[0] + f"\n{line}\n")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_table_names_everybody() -> None:
    fp32 = group(
        Row("bare-gemms", seconds=[1.0]),
        Row("eager", seconds=[1.7, 2.0, 2.1], cells={"MiB": "3", "value": "3e-9"}),
        Row("ours", seconds=[1.1], cells={"MiB": "4", "value": "2e-9"}),
        Row("trl", state="wrong", reason="error of loss nan", errors={"loss": math.nan}),
        Row("cce", state="absent", reason="needs a GPU"),
        Row("ours-input", state="unable", reason="the same as ours"),
    )
    bf16 = group(Row("cce", state="absent", reason="needs a GPU"), dtype="bf16")
    caption, table, missing = tables.show("heads", [bf16, fp32]).split("\n\n")
    assert caption.startswith("dapo loss, beta 0, full head: forward + backward; tiny (D = 32")
    names = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert names == ["bare-gemms", "ours", "eager", "trl"]
    assert "| **1.10** | **1.00** | 4 | **2e-9** |" in table and "FAILED" in table
    assert "| 2.00 | 1.82 | **3** | 3e-9 |" in table
    assert missing == (
        "Not run: cce (needs a GPU). Not applicable: ours-input in fp32 (the same as ours). "
        "Wrong: trl in fp32 (error of loss nan)."
    )


def test_a_yardstick_and_who_had_a_start_are_no_baselines() -> None:
    names = ("bare-gemms", "bare-gemms-whole", "liger-triton-queued", "ours-queued", "ours", "trl")
    found = group(*(Row(name, seconds=[1.0 + i]) for i, name in enumerate(names)))
    assert tables.cases([found]).splitlines()[-1].count("6.00 trl") == 1
    assert "bare-gemms-whole" in tables.show("heads", [found])
    assert not tables.is_quoted("liger-triton-queued") and tables.is_quoted("bare-gemms-whole")


def test_standings_count_cases() -> None:
    groups = [
        group(Row("bare-gemms", seconds=[1.0]), Row("ours", seconds=[x]), tokens=16 * x)
        for x in (1, 2, 3)
    ]
    groups[0].rows[1].info["repeatable"] = False
    groups[1].rows[1].info["repeatable"] = True
    shown = tables.standings(groups)
    assert shown.startswith("fp32, 3 cases:")
    assert "| ours | 3 | 2.00 (1.00 to 3.00) | 1.00 | all but 1 |" in shown
    assert "| dapo | tiny | 16 | fp32 | 1.00 s | **1.00** |" in tables.cases(groups)


def test_rows_with_unsteady_times_keep_only_errors_and_memory() -> None:
    """Samples of one call may spread by half; the steps of a whole run may spread by more."""
    found = group(
        Row("bare-gemms", seconds=[1.0]),
        Row("ours", seconds=[1.0, 1.2, 1.5], info={"extra_bytes": 2**20}),
        Row("eager", seconds=[1.0, 3.0, 5.0], cells={"MiB": "3", "grad": "3e-9", "train": "9 s"}),
        Row("trl", seconds=[4.0]),
    )
    ours, eager = found.rows[1:3]
    assert not ours.unsteady and ours.median == 1.2
    assert eager.unsteady and eager.median is None and found.ratio(eager, "ours") is None
    shown = tables.show("heads", [found])
    assert "| eager | unsteady | | **3** | **3e-9** |" in shown and "9 s" not in shown
    assert shown.endswith("Unsteady: the slowest sample is more than 1.5 x the fastest.")
    assert "1.00 s to 5.00 s" in tables.show("heads", [found], samples=True)
    assert "| eager | 0 | |" in tables.standings([found])
    # a steady baseline is not the fastest one if an unsteady one may be
    assert tables.cases([found]).endswith(
        "| dapo | tiny | 32 | fp32 | 1.00 s | 1.20 | unsteady | **1** |"
    )
    assert report.rejected([found]).splitlines()[1:] == [
        "  heads: dapo, tiny, 32, fp32, peaked: eager 5.00"
    ]
    assert not Row("ours", seconds=[1.0, 9.0], whole_run=True).unsteady


def test_steps_of_whole_runs_are_known_by_their_benchmark(tmp_path: Path) -> None:
    """Even in files without that mark."""
    facts = {"model": "m", "tokens": 0, "dtype": "fp32"}
    recorder = Recorder(tmp_path, "cpu")
    for benchmark in ("real", "training"):
        recorder.add(benchmark, facts, [Row("ours", seconds=[1.0, 9.0])])
    (path,) = tmp_path.rglob("*.jsonl")
    path.write_text(path.read_text().replace(', "whole_run": false', ""))
    assert [one.rows[0].median for one in load_run(path)] == [5.0, None]


def test_a_base_without_a_steady_time_gives_no_ratio() -> None:
    found = group(Row("bare-gemms", seconds=[1.0, 2.0]), Row("ours", seconds=[3.0]))
    shown = tables.show("heads", [found])
    assert "| | time | x ours |" in shown
    assert "| bare-gemms | unsteady | |" in shown and "| ours | 3.00 s | **1.00** |" in shown


def test_shares_of_the_head_need_steady_times_of_what_they_compare() -> None:
    facts = {"model": "m", "tokens": 0, "dtype": "fp32"}
    rows = [
        Row(name, seconds=seconds, cells={"the head in it": "x 0.30"})
        for name, seconds in (("theirs", [1.0, 2.0]), ("ours", [1.0]), ("no head", [0.5]))
    ]
    assert "0.30" not in tables.show("hosts", [Recorder(None, "cpu").add("hosts", facts, rows)])


def test_memory_is_not_divided_by_next_to_nothing() -> None:
    def shown(ours: int) -> str:
        sizes = {"ours": ours, "trl": 50, "eager": 1000}
        rows = [Row(x, seconds=[1.0], info={"extra_bytes": size}) for x, size in sizes.items()]
        return tables.standings([group(*rows)])

    assert "| trl | 1 | 1.00 | 1.00 |" in shown(50) and "20.00" in shown(50)
    assert "memory" not in shown(49)


def test_columns_of_zeros_are_left_out() -> None:
    rows = [{"": "a", "zero": "0.00", "share": "0 %", "some": "0"}, {"": "b", "some": "1"}]
    assert text.markdown(rows).splitlines()[0] == "| | some |"


def test_a_section_without_a_result_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"model": "m", "tokens": 0, "dtype": "fp32"}
    found = Recorder(None, "cpu").add("savings", facts, [Row("ours, all", seconds=[1.0])])
    stored = {"cpu": [found], "cuda": []}
    monkeypatch.setattr(report, "newest", lambda kind: (kind, stored[kind]))
    assert report.section("sharded") == report.show("sharded", "cpu") == ""
    shown = report.section("savings")
    assert shown.startswith("## Skipped rows and adapters\n\nOne of our losses")
    assert "\n\nOn a CPU:\n\nm; fp32; " in shown and "GPU:" not in shown
    of_gpu, of_cpu = report.unmeasured().splitlines()
    assert "`test_savings.py`" in of_gpu and "`test_savings.py`" not in of_cpu
    assert "`test_sharded.py` (Over several ranks)" in of_cpu and "ranks" not in of_gpu


def test_a_sparse_step_has_the_times_that_are_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = FACTS | {"dtype": "bf16", "inputs": "real-text", "model": "smollm2-135m"}
    errors = {"dhidden": 0.01, "dweight": 0.02}
    names = ("ours", "ours-sparse-hidden", "ours-sparse", "eager")
    rows = [Row(x, seconds=[4.0], errors=errors, info={"entries": [7.0, 9.0]}) for x in names]
    found = Recorder(None, "cpu").add("sparse", facts, rows)
    monkeypatch.setattr(report, "newest", lambda kind: (kind, [found]))
    rows[2].seconds = [1.0]
    said = report.sparse_step("cpu")
    assert "needs 1.00 of the time with a sparse gradient of the hidden states and 0.25 of" in said
    rows[1].seconds = [1.0, 4.0]
    said = report.sparse_step("cpu")
    assert "needs 0.25 of the time with sparse gradients of hidden states and head" in said
    rows[2].seconds = [1.0, 4.0]
    said = report.sparse_step("cpu")
    assert "needs" not in said and "an exact backward's 2%" in said
    rows.pop()
    found.rows.pop()
    assert report.sparse_step("cpu") == ""


def test_pictures_of_a_real_model_are_drawn_where_there_are_results(tmp_path: Path) -> None:
    from benchmarks.plots import PICTURES, save_plots

    def group_of(benchmark: str, names: list[str], **info: Any) -> Group:
        facts = {"model": "m", "tokens": 0, "dtype": "bf16", "inputs": REAL}
        return Recorder(None, "cpu").add(benchmark, facts, [Row(name, info=info) for name in names])

    rewards = {"rewards": [0.1, 0.3, 0.2, 0.5]}
    names = ("ours", "ours", "trl", "ours-lora")
    runs = [group_of("curves", [name], **rewards) for name in names]
    bands = {"by_probability": {"p > 0.98": [0.01, 0.1], "p < 0.5": [0.02, 0.3]}}
    runs.append(group_of("mismatch", ["vllm, ours", "vllm, eager"], **bands))
    errors = {"logp, p > 0.98": [1e-7, 1e-6], "logp, p < 0.5": [1e-6, 1e-5]}
    runs.append(group_of("accuracy", ["ours", "eager"], **errors))
    drawn = [tmp_path / f"{name}.png" for name in PICTURES]
    save_plots(runs, tmp_path)
    first = [path.read_bytes() for path in drawn]
    assert all(data.startswith(b"\x89PNG") for data in first)
    save_plots(runs, tmp_path)
    assert [path.read_bytes() for path in drawn] == first
    save_plots([group_of("real", ["ours"], **rewards)], tmp_path)  # no curve
    assert not any(path.exists() for path in drawn)


def test_curves_are_compared_where_both_trainers_have_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_of(provider: str, seed: int, *norms: float) -> Group:
        facts = {"model": "m", "tokens": 0, "dtype": "fp32", "setup": provider, "seed": seed}
        row = Row(provider, info={"gradient_norms": norms})
        return Recorder(None, "cpu").add("curves", facts, [row])

    runs = [run_of("ours", seed, 1.0, 2.0) for seed in (0, 1, 2)]
    runs += [run_of("trl", 0, 1.0, 2.0), run_of("trl", 1, 1.0, 2.5), run_of("trl-lora", 0, 1.0)]
    runs += [run_of("ours", 3, 0.0), run_of("trl", 3, 0.0)]
    monkeypatch.setattr(report, "newest", lambda kind: (kind, runs))
    said = report.curve_differences("cpu")
    assert said.endswith(" is 2e-1 in our trainer (5 steps).")
    runs[:] = runs[:3]
    assert report.curve_differences("cpu") == ""


def test_steps_are_compared_with_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"model": "m", "tokens": 0, "dtype": "fp32"}
    rows = [
        Row("ours", seconds=[1.0, 2.0, 3.0], info={"peak_bytes": 1}, whole_run=True),
        Row("trl", seconds=[2.0, 8.0, 6.0], info={"peak_bytes": 4}, whole_run=True),
        Row("ours-lora", seconds=[1.0], info={"peak_bytes": 1}),  # TRL's is missing
    ]
    group = Recorder(None, "cpu").add("real", facts, rows)
    monkeypatch.setattr(report, "newest", lambda kind: (kind, [group]))
    said = report.step_ratios("cpu")
    assert "0.50 (0.25 to 0.50) of the time and 0.25 of the memory in our trainer (" in said
    assert "LoRA" not in said
    group.rows.pop(1)
    assert report.step_ratios("cpu") == ""


def test_ratios_are_those_of_real_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(inputs: str, dtype: str, mean: float) -> Group:
        facts = {"model": "m", "tokens": 0, "dtype": dtype, "inputs": inputs}
        row = Row("ours", info={"ratio noise": (mean, 10 * mean)})
        return Recorder(None, "cpu").add("accuracy", facts, [row])

    cases = [case("mostly-decided", "bf16", 0.3), case("real-text", "fp32", 0.5)]
    monkeypatch.setattr(report, "newest", lambda kind: (kind, cases))
    assert report.ratio_errors("cpu") == ""
    cases.append(case("real-text", "bf16", 0.02))
    said = report.ratio_errors("cpu")
    assert " is 2% on average (up to 20%) with grpo-kernels (" in said and "30%" not in said


def test_a_caption_names_the_place_of_each_dtype_if_they_differ() -> None:
    groups = [group(Row("ours", seconds=[1.0])) for _ in range(2)]
    groups[1].facts["dtype"] = "bf16"
    one = f"{groups[0].where}; {groups[0].source}"
    assert "(" in groups[0].where and tables.caption(groups).endswith(f"; {one}.")
    groups[1].environment = groups[1].environment | {"isa": "OTHER"}
    other = f"{groups[1].where}; {groups[1].source}"
    assert "(OTHER)" in other
    assert tables.caption(groups).endswith(f"; fp32: {one}; bf16: {other}.")


def test_two_schedules_are_compared_with_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cases that have steady times of all."""
    sizes = {
        "ours": (2.0, 60),
        "ours-two-pass": (3.0, 6),
        "trl": (4.0, 100),
        "liger-triton": (1.0, 30),
    }
    errors = {"dhidden": 1e-3, "dweight": 2e-3}

    def case(tokens: int, **seconds: list[float]) -> Group:
        rows = [
            Row(name, seconds=seconds.get(name, [time]), errors=errors, info={"extra_bytes": size})
            for name, (time, size) in sizes.items()
        ]
        return group(*rows, tokens=tokens, dtype="bf16")

    cases = [case(64, trl=[1.0, 9.0]), case(32), case(16, ours=[1.0])]
    monkeypatch.setattr(report, "newest", lambda kind: (kind, cases))
    said = report.next_to_others("cpu").splitlines()
    assert "heads of Tiny, bf16, 16 to 32 tokens:" in said[0]
    assert "25% to 50% of the time of TRL's fused head, and 60% of its memory" in said[2]
    assert "75% of its time, and 6% of its memory" in said[3]
    assert "2e-3" in said[4]
    assert "needs 50% to 100% of the time of our default, and 50% of its memory" in said[5]
    assert "needs 20% of the memory of Liger's loss" in said[5]
    del cases[1:]
    assert report.next_to_others("cpu") == ""


def test_bars_beyond_the_axis_are_broken() -> None:
    def row(name: str, seconds: float, size: int) -> Row:
        errors = {"dhidden": 1e-3, "dweight": 1e-3}
        return Row(name, seconds=[seconds], errors=errors, info={"extra_bytes": size})

    drawn = figure.draw("light", "wide", [group(row("bare-gemms", 1, 1), row("ours", 2, 2**20))])
    assert "<path" not in drawn and ">2.00<" in drawn
    far = [row("bare-gemms", 1, 1), row("ours", 2, 2**20), row("eager", 30, 2**40)]
    drawn = figure.draw("light", "wide", [group(*far)])
    assert drawn.count("<path") == 2 and ">30.00<" in drawn and ">1,048,576<" in drawn
    widths = sorted(float(x) for x in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn))
    assert widths == pytest.approx([0.1, 2 / 3 * 200, 185, 200], abs=0.1)
