"""The table of one_pass against two_pass with what "auto" takes."""

from __future__ import annotations

from benchmarks.problem import make_problem
from benchmarks.providers import PROVIDERS
from benchmarks.providers.ours import OURS, OURS_ONE_PASS, OURS_TWO_PASS, auto_schedule
from benchmarks.results import report
from benchmarks.schedules import matches, schedules_table
from benchmarks.shapes import MODELS, Case
from benchmarks.tests.synthetic_results import device, memory, row, run, table
from benchmarks.work import WORKS


def both(one: float, two: float, **ours) -> list:
    return [
        row("ours", [one] * 3, memory=memory(200), **ours),
        row("ours-two-pass", [two] * 3, memory=memory(100), schedule="two_pass"),
        row("floor", [1.0] * 3),
    ]


def tables(tmp_path, *rows: list, **changes):
    cases = [table(each, tokens=256 * (index + 1)) for index, each in enumerate(rows)]
    return device(tmp_path, run(cases, **changes)).tables


def test_the_choice_that_was_stored_counts(tmp_path) -> None:
    forced = row("ours-one-pass", [3.0] * 3, schedule="one_pass")
    right = both(2.0, 3.0, schedule="one_pass")
    wrong = both(3.0, 2.5, schedule="one_pass")
    chosen = [*both(2.1, 2.0, schedule="two_pass"), forced]  # ours is two_pass itself
    found = matches(tables(tmp_path, right, wrong, chosen))
    assert [match.choice for match in found] == ["one_pass", "one_pass", "two_pass"]
    assert [match.loss for match in found] == [1.0, 1.2, 1.0]
    assert found[2].one_pass.row.provider == "ours-one-pass"
    text = schedules_table([match.table for match in found])
    assert "| dapo | qwen2.5-0.5b | 512 | fp32 | 3.00 s | **2.50 s** |" in text
    assert "faster schedule in 2 of 3 cases, and loses 20.0 % against it at most" in text


def test_without_both_there_is_no_match(tmp_path) -> None:
    two_pass_only = both(2.0, 2.0, schedule="two_pass")
    no_two_pass = [row("ours", [1.0], schedule="one_pass"), row("ours-two-pass", failure="wrong")]
    assert matches(tables(tmp_path, two_pass_only, no_two_pass)) == []


def test_an_older_file_shows_what_auto_takes_now(tmp_path) -> None:
    (match,) = matches(tables(tmp_path, both(2.0, 3.0)))
    assert match.choice == "one_pass" and match.loss == 1.0


def test_the_report_has_it(tmp_path) -> None:
    found = device(tmp_path, run([table(both(2.0, 3.0, schedule="one_pass"))]))
    assert "## One pass or two" in report(found, tmp_path)
    alone = device(tmp_path / "x", run([table([row("ours", [1.0])])]))
    assert "## One pass or two" not in report(alone, tmp_path)


def test_the_other_schedule_is_measured_where_ours_does_not_take_it(monkeypatch) -> None:
    case = Case(MODELS["tiny"], 64, "bf16", WORKS["dapo"])
    for chosen, able in (("one_pass", False), ("two_pass", True)):
        monkeypatch.setattr("benchmarks.providers.ours.auto_schedule", lambda *_, c=chosen: c)
        assert (OURS_ONE_PASS.unable(case) is None) == able
    assert OURS_ONE_PASS.unable(Case(MODELS["tiny"], 64, "bf16", WORKS["logprobs"])) is not None
    problem = make_problem(case)
    assert OURS_ONE_PASS.planned(problem) == "one_pass"
    assert OURS_TWO_PASS.planned(problem) == "two_pass"
    assert OURS.planned(problem) == auto_schedule(case, "cpu")
    assert PROVIDERS["eager"].planned(problem) is None
