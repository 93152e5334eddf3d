"""From result files to tables, plots and blocks of documents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import report as command
from benchmarks import text
from benchmarks.figures import accuracy_figures, figures
from benchmarks.plots import PLOTS, save_plots
from benchmarks.report import headline, report, show
from benchmarks.results import load
from benchmarks.rollouts.engines import NOT_INSTALLED
from benchmarks.tables import heads, others
from benchmarks.tests.stored import (
    NEWER,
    accuracy,
    device,
    environment,
    memory,
    rollouts,
    row,
    rows,
    run,
    table,
    write,
)


def test_figures(tmp_path: Path) -> None:
    (found,) = device(tmp_path, run([table(rows())])).tables
    by_name = figures(found)
    assert list(by_name) == ["bare-gemms", "ours", "eager", "trl", "cce"]
    ours, trl = by_name["ours"], by_name["trl"]
    assert ours.median == 2.2
    assert {name: trl.to(name) for name in trl.medians} == pytest.approx(
        {"bare-gemms": 2.0, "ours": 4.0 / 2.2, "eager": 4.0 / 2.6, "trl": 1.0}
    )
    assert ours.extra == 200 * 2**20
    assert (ours.value_error, ours.gradient_error) == (1e-9, 9e-7)
    assert by_name["cce"].median is None and by_name["cce"].extra is None


def test_cases_and_headline(tmp_path: Path) -> None:
    found = device(tmp_path, run([table(rows()), table(rows()[:4], dtype="bf16")]))
    line = "| fp32 | 2.00 s | **1.10** | 1.30 eager | **200** | 1000 trl |"
    assert f"| dapo | qwen2.5-0.5b | 1024 {line}" in heads.cases(found.tables)
    said = headline("cpu", "dapo", "qwen2.5-0.5b", 1024, {"test-cpu": found})
    caption, _, *lines = said.splitlines()
    assert caption.endswith("T = 1024; Test CPU, 2 threads; 2026-01-02, 0123456789ab.")
    assert lines[0].startswith("|  | fp32: x bare | x ours | extra MiB | value error | gradient")
    assert lines[2].startswith("| bare-gemms | 1.00 (2.00 s) | 0.91 | 150 |  |  | 1.00 (2.00 s) |")
    assert lines[3].startswith("| **ours** | **1.10** | **1.00** | **200** | **1e-9** | **9e-7** |")
    assert lines[6] == "| cce | FAILED |  |  |  | 2e-1 |  |  |  |  |  |"


def test_standings(tmp_path: Path) -> None:
    slower = [{**r, "seconds": [9.0, 9.0]} if r["provider"] == "ours" else r for r in rows()]
    found = device(tmp_path, run([table(rows()), table(slower, tokens=512)])).tables
    lines = heads.standings(found).splitlines()
    assert lines[0] == "fp32, 2 cases:"
    assert lines[5].startswith("| **ours** | 2 | 2.80 (1.10 to 4.50) | 1.00 |")
    assert lines[-1].endswith("| 2 |")  # cce failed in both


def test_one_pass_beside_two(tmp_path: Path) -> None:
    def both(one: float, two: float, **ours) -> list:
        other = row("ours-two-pass", [two], memory=memory(100), schedule="two_pass")
        return [row("ours", [one], memory=memory(200), **ours), other]

    forced = row("ours-one-pass", [3.0], schedule="one_pass")
    chosen = [*both(2.1, 2.0, schedule="two_pass"), forced]  # ours is two_pass itself
    alone = [row("ours", [1.0], schedule="one_pass"), row("ours-two-pass", failure="wrong")]
    every = [both(2.0, 3.0), both(3.0, 2.5, schedule="one_pass"), chosen, alone]
    cases = [table(each, tokens=256 * (i + 1)) for i, each in enumerate(every)]
    lines = heads.schedules(device(tmp_path, run(cases)).tables).splitlines()[2:]
    assert [line.split("|")[5:7] + line.split("|")[-2:-1] for line in lines] == [
        [" **2.00 s** ", " 3.00 s ", " one_pass "],
        [" 3.00 s ", " **2.50 s** ", " one_pass "],
        [" 3.00 s ", " **2.00 s** ", " two_pass "],
    ]


def test_accuracy(tmp_path: Path) -> None:
    found = device(tmp_path, run([], accuracy=[accuracy()]))
    lines = others.accuracy_table(found.accuracy[0]).splitlines()
    assert lines[0].startswith("|  | logp, p > 0.98: median | max | logp, p 0.5 to 0.98: median |")
    assert lines[2] == (
        "| **ours** | **2e-7** | **3e-7** | 2e-6 | 2e-6 | **4e-6** | **4e-6** "
        "| **2e-6** | **4e-6** | **1e-6** | **4e-6** |"
    )
    assert lines[3].startswith("| trl | 2e-3 | 3e-3 | **0** | **0** | 6e-2 | 6e-2 | 2e-2 | 6e-2 |")
    assert lines[3].endswith("| none |  |")
    assert lines[4].startswith(r"| eager | FAILED: ValueError: a\|b |  |")
    assert lines[-1] == "Not here: cce (needs a GPU). Not able: liger (a GRPO loss only)."
    said = others.accuracy(found.accuracy)
    assert "50 % p > 0.98, 25 % p 0.5 to 0.98, 25 % p < 0.5; the rarest 1e-4." in said
    assert "Ratio noise: " in said and "Test CPU, 2 threads; 2026-01-02." in said


def test_rows_without_a_gradient_have_no_relative_error(tmp_path: Path) -> None:
    ours = row("ours", dhidden=[0.0, 0.0, 1e-3, 2e-3], errors={"dhidden": 1e-3})
    of_loss = {"work": "dapo", "entropy": [], "dhidden": [0.0, 1.0, 1.0, 2.0], "rows": [ours]}
    found = device(tmp_path, run([], accuracy=[accuracy(**of_loss)])).accuracy[0]
    gradients = accuracy_figures(found)["ours"].gradients
    assert {band: spread.maximum for band, spread in gradients.items()} == {
        "p > 0.98": 0.0, "p 0.5 to 0.98": 1e-3, "p < 0.5": 1e-3,
    }  # fmt: skip
    assert "| **ours** |  | **1e-3** |" not in others.accuracy([found])
    assert "rows of dhidden, p > 0.98: median" in others.accuracy([found])


def test_rollouts(tmp_path: Path) -> None:
    large = {"model": "a large model", "parameters": 10**9}
    failed = {"failure": "out of memory", "phases": {}, "seconds": [], "tokens": []}
    entries = [
        rollouts("vllm-server", **large),
        rollouts("vllm-server-overlap"),
        rollouts("vllm-server"),
        rollouts("transformers"),
        rollouts("vllm-colocate", parameters=0, **failed),
    ]
    said = others.rollouts(device(tmp_path, run([], rollouts=entries)).rollouts)
    lines = {line.split("|")[1].strip(): line for line in said.splitlines() if "|" in line}
    assert lines["transformers"] == "| transformers | 100 |  |  | 4.00 | 25 |  | 50 |"
    assert lines["vllm-server"].endswith("| 100 | 0.500 | 1.00 | 4.00 | 25 | 12 | 50 |")
    assert lines["vllm-server-overlap"].startswith("| vllm-server-overlap |  | 0.500 |")
    assert "FAILED: out of memory" in lines["vllm-colocate"]
    assert said.index("a model, 2.00 million parameters") < said.index("a large model, 1000")
    assert "* `vllm-server`: a vLLM server on the same machine." in said
    assert NOT_INSTALLED not in said
    alone = others.rollouts(device(tmp_path / "1", run([], rollouts=entries[3:4])).rollouts)
    assert f"vllm-colocate, vllm-server, vllm-server-overlap: {NOT_INSTALLED}." in alone


def test_the_newest_device_of_a_kind_is_shown(tmp_path: Path) -> None:
    every = {"a": environment(), "b": NEWER, "c": environment()}
    for index, (slug, facts) in enumerate(every.items()):
        only = table([row("bare-gemms", [1.0]), row("ours", [1.0 + index])])
        write(tmp_path, run([only], environment=facts), slug=slug)
    found = load(tmp_path)
    assert "| 1.00 s | **2.00** |" in show("cases", "cpu", found)
    assert show("cases", "cuda", found) == show("training", "cpu", found) == "not measured yet"
    assert headline("cpu", "dapo", "qwen2.5-0.5b", 512, found) == "not measured yet"


def test_numbers_are_written_short() -> None:
    digits = [text.digits(x) for x in (1234.5, 12.34, 0.01234, 0.0)]
    assert digits == ["1234", "12.3", "0.0123", "0"]
    assert [text.error(x) for x in (9.4e-7, 0.0, float("nan"))] == ["9e-7", "0", "nan"]
    assert [text.duration(x) for x in (2.0, 0.5, 1e-4)] == ["2.00 s", "500 ms", "0.100 ms"]


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [table(rows(), tokens=256), table(rows()), table(rows(), dtype="bf16")]
    save_plots(device(tmp_path, run(cases)).tables, tmp_path)
    for name in PLOTS:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    save_plots([], tmp_path)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("plots", [True, False])
def test_the_command(
    plots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib the tables are written all the same."""
    if plots:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    found = device(tmp_path, run([table(rows())]))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    command.main()
    printed = capsys.readouterr().out
    assert "1 cases of 1 runs" in printed and "| 2.00 s | **1.10** |" in printed
    assert ("matplotlib is not installed" in printed) != plots
    assert (tmp_path / "test-cpu" / "time.png").exists() == plots
    written = (tmp_path / "test-cpu" / "report.md").read_text()
    assert written == report(found) and "# Test CPU, 2 threads" in written
    assert "## dapo, qwen2.5-0.5b, T = 1024" in written
