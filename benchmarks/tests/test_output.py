"""From result files to tables, plots and numbers in documents."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import text
from benchmarks.accuracy.derive import accuracy_figures
from benchmarks.accuracy.table import accuracy_table
from benchmarks.derive import figures, times
from benchmarks.load import load
from benchmarks.markers import ROOT
from benchmarks.overview import headline, summary
from benchmarks.plots import PLOTS, save_plots
from benchmarks.results import report
from benchmarks.shapes import Case, Model
from benchmarks.standing import ahead, behind, standings
from benchmarks.table import case_table, training_table
from benchmarks.tests.synthetic_results import (
    NEWER,
    accuracy,
    accuracy_row,
    device,
    full_table,
    row,
    rows,
    run,
    table,
    training,
    write,
)  # fmt: skip
from benchmarks.work import WORKS


def test_the_newest_file_that_has_a_case_counts(tmp_path):
    old = run([table([row("ours", [1.0])]), table([row("ours", [1.0])], dtype="bf16")])
    new = run([table([row("ours", [2.0])])], environment=NEWER)
    found = {t.dtype: t for t in device(tmp_path, new, old).tables}
    assert found["fp32"].rows[0].seconds == [2.0] and found["fp32"].environment.day == "2026-02-03"
    assert found["bf16"].rows[0].seconds == [1.0] and found["bf16"].environment.day == "2026-01-02"


@pytest.mark.parametrize(
    "data, message",
    [
        ({"work": "loss"}, r"expected a result file with .*'tables'.*got \['work'\]"),
        ([], "got list"),
        (run([table([{"provider": "ours"}])]), r"tables\[0\].rows\[0\]: expected a field 'note'"),
        (
            run([table([row("ours", errors={"loss": "1"})])]),
            r"errors.loss: expected float, got '1'",
        ),
        (run([table([row("ours", alone=1)])]), "alone: expected bool, got 1"),
        (run([], training=[{"tokens": 3}]), r"training\[0\]: expected a field 'model'"),
        (run([table([], work="fly")]), "work: expected one of logprobs, .* got 'fly'"),
        (run([table([], tokens="many")]), r"tokens: expected int, got 'many'"),
        (run([], accuracy=[accuracy(logprobs=[-1.0])]), "logprobs: expected 4 values, got 1"),
        (
            run([], accuracy=[accuracy(rows=[accuracy_row("ours", entropy=[0.0])])]),
            "ours: expected 4 values, got 1",
        ),
        (run([], accuracy=[accuracy(model="huge")]), "model: expected one of .* got 'huge'"),
    ],
)
def test_an_unknown_format_is_an_error(tmp_path, data, message):
    path = tmp_path / "test-cpu" / "2026-01-02-abc.json"
    path.parent.mkdir()
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"2026-01-02-abc.json: .*{message}"):
        load(tmp_path)


def test_figures(tmp_path):
    (found,) = device(tmp_path, run([table(rows())])).tables
    by_name = figures(found)
    assert list(by_name) == ["floor", "ours", "eager", "trl", "cce"]
    ours, trl = by_name["ours"], by_name["trl"]
    assert ours.times and trl.times
    assert (ours.times.median, ours.times.minimum, ours.times.maximum) == (2.2, 2.0, 2.3)
    assert ours.times.spread == pytest.approx(0.3 / 2.2)
    assert trl.times.to == pytest.approx(
        {"floor": 2.0, "ours": 4.0 / 2.2, "eager": 4.0 / 2.6, "trl": 1.0}
    )
    assert ours.tflops == pytest.approx(3 * 2 * 1024 * 896 * 151936 / 2.2 / 1e12)
    assert (ours.extra, ours.returned, ours.predicted) == (200, 523, 190)
    assert ours.prediction == pytest.approx(0.95)
    assert (ours.value_error, ours.gradient_error) == (1e-9, 9e-7)
    assert by_name["cce"].times is None and by_name["cce"].extra is None


def test_half_of_the_rows_are_half_of_the_work():
    model = Model("tiny", 32, 257)
    whole, half = (Case(model, 1024, "fp32", WORKS[name]) for name in ("dapo", "dapo-masked"))
    assert half.flop == whole.flop / 2


def test_case_table(tmp_path):
    (found,) = device(tmp_path, run([table(rows())])).tables
    lines = case_table(found).splitlines()
    assert lines[0].startswith("|  | median, s | min to max | x floor | x ours | TFLOP/s |")
    assert lines[2].startswith("| floor | 2.00 | 2.00 to 2.10 | 1.00 | 0.91 |")
    assert lines[3].startswith("| **ours** | **2.20** | 2.00 to 2.30 | 1.10 | 1.00 | 0.380 |")
    assert "| **200 (plan 190)** | 523 | loss 1e-9, dhidden 9e-7, dweight 8e-7 |" in lines[3]
    assert lines[4].startswith("| eager (alone) | 2.60 |")
    assert lines[5].endswith("| yes |")
    assert lines[6].startswith(r"| cce | FAILED: error of dweight 2e-1; a\|b |  |")
    assert lines[-1] == "Not here: quack (needs a GPU). Not able: liger (no softcap)."


def test_summary_and_headline(tmp_path):
    found = device(tmp_path, run([table(rows()), table(rows()[:4], dtype="bf16")])).tables
    assert (
        "| [dapo](report.md#dapo-qwen25-05b-t1024-fp32) | qwen2.5-0.5b | 1024 | fp32 | 2.00 s "
        "| **1.10** | 1.30 eager | **200** | 1000 trl |"
    ) in summary(found, "report.md")
    lines = headline(found).splitlines()
    assert lines[0].startswith("|  | fp32: x floor | x ours | extra MiB | value error | gradient")
    assert lines[2].startswith("| floor | 1.00 (2.00 s) | 0.91 | 150 |  |  | 1.00 (2.00 s) |")
    assert lines[3].startswith("| **ours** | **1.10** | **1.00** | **200** | **1e-9** | **9e-7** |")
    assert lines[6] == "| cce | FAILED |  |  |  | 2e-1 |  |  |  |  |  |"


def test_standings_and_duels(tmp_path):
    slower = [{**r, "seconds": [9.0, 9.0]} if r["provider"] == "ours" else r for r in rows()]
    found = device(tmp_path, run([table(rows()), table(slower, tokens=512)])).tables
    lines = standings(found).splitlines()
    assert lines[0] == "fp32, 2 cases:"
    assert lines[5].startswith("| **ours** | 2 | 2.80 (1.10 to 4.50) | 1.00 |")
    assert lines[-1].endswith("| 2 |")  # cce failed in both
    assert ahead(found, "ours").splitlines() == [
        "`ours` is faster than every peer in 1 of 2 cases:",
        "",
        "* dapo, qwen2.5-0.5b, T=1024, fp32: eager takes 1.18 times as long",
    ]
    assert behind(found, "ours").endswith("T=512, fp32: `ours` takes 3.46 times as long as eager")
    assert ahead(found, "ours-input").endswith("in 0 of 0 cases.")


def test_training_table(tmp_path):
    found = device(tmp_path, run([], training=[training()]))
    lines = training_table(found.training[0]).splitlines()
    ours = "| **ours** | 1.30 | 1.20 to 1.40 | 1.00 | 0.500 | 1.00 | 0.800 | 1.00 |"
    assert lines[2] == f"{ours} 0.5, 0.25 |"
    assert lines[3].startswith("| trl | 2.60 | 2.60 to 2.60 | 2.00 |  |  | 1.60 | 2.00 |")
    assert lines[-1] == "Not here: trl-liger (needs a GPU)."
    assert "layers 2" in report(found, tmp_path)


def test_accuracy_table(tmp_path):
    found = device(tmp_path, run([], accuracy=[accuracy()]))
    lines = accuracy_table(found.accuracy[0]).splitlines()
    assert lines[0].startswith("|  | logp, p > 0.98: median | max | logp, p 0.5 to 0.98: median |")
    assert lines[2] == (
        "| **ours** | **2e-7** | **3e-7** | 2e-6 | 2e-6 | **4e-6** | **4e-6** "
        "| **2e-6** | **4e-6** | **1e-6** | **4e-6** |"
    )
    assert lines[3].startswith("| trl | 2e-3 | 3e-3 | **0** | **0** | 6e-2 | 6e-2 | 2e-2 | 6e-2 |")
    assert lines[3].endswith("| none |  |")
    assert lines[4].startswith(r"| eager | FAILED: ValueError: a\|b |  |")
    assert lines[-1] == "Not here: cce (needs a GPU). Not able: liger (a GRPO loss only)."
    said = report(found, tmp_path)
    assert "50 % p > 0.98, 25 % p 0.5 to 0.98, 25 % p < 0.5; the rarest 1e-4." in said
    assert "### small, bf16" in said and "* `trl`: what trl runs." in said


def test_the_newest_accuracy_of_a_head_counts(tmp_path):
    new = accuracy(rows=[accuracy_row("ours", logprobs=[0.0] * 4)])
    runs = run([], accuracy=[accuracy()]), run([], accuracy=[new], environment=NEWER)
    (table,) = device(tmp_path, *runs).accuracy
    assert [row.provider for row in table.rows] == ["ours"]
    assert accuracy_figures(table)["ours"].noise == 0.0


def test_report_says_where_each_case_was_measured(tmp_path):
    tests = {"passed": 3, "failed": 0, "skipped": 1, "seconds": 2.0}
    old = run([table(rows()), table(rows(), dtype="bf16")], tests=tests)
    found = device(tmp_path, old, run([table(rows())], environment=NEWER))
    said = report(found, tmp_path)
    assert "# Test CPU\n" in said and "without quack-kernels" in said
    assert "3 passed, 0 failed, 1 skipped, in 2.00 s." in said
    assert "errors against float64; measured 2026-01-02 at 0123456789ab." in said
    assert "errors against float64; measured 2026-02-03 at ffffffffffff." in said
    assert said.count("what trl runs") == 1
    assert "png" not in said


def test_numbers_are_written_short():
    assert [text.digits(x) for x in (1234.5, 12.34, 0.01234, 0.0)] == [
        "1234",
        "12.3",
        "0.0123",
        "0",
    ]
    assert [text.error(x) for x in (9.4e-7, 0.0, float("nan"))] == ["9e-7", "0", "nan"]
    assert [text.duration(x) for x in (2.0, 0.5, 1e-4)] == ["2.00 s", "500 ms", "0.100 ms"]
    assert text.unit_for([0.2, 5]).name == "s" and text.unit_for([0.02, 5]).name == "ms"
    assert times([]) == {}


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    tables = [full_table("dapo", "small", tokens, "bf16", 0.4) for tokens in (256, 512)]
    tables.append(full_table("logprobs-entropy", "small", 256, "fp32", 0.4))
    save_plots(device(tmp_path, run(tables)).tables, tmp_path)
    for plot in PLOTS:
        if not plot.of_policy:
            assert (tmp_path / plot.file).stat().st_size > 10_000
    save_plots([], tmp_path)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("plots", [True, False])
def test_command(tmp_path, plots):
    """Without matplotlib the tables are written all the same. The documents stay as they are."""
    if plots:
        pytest.importorskip("matplotlib")
    write(tmp_path, run([full_table("dapo", "small", 256, "fp32", 0.4)]))
    (tmp_path / "stray.json").write_text("{}")
    hide = "" if plots else "sys.modules['matplotlib'] = None;"
    code = f"import sys; {hide} from benchmarks.results import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "1 cases of 1 runs" in done.stdout and "stray.json: left out" in done.stdout
    assert "rewritten" not in done.stdout
    assert ("matplotlib is not installed" in done.stdout) != plots
    written = (tmp_path / "test-cpu" / "report.md").read_text()
    assert "| **ours** |" in written and ("(time.png)" in written) == plots
