"""The parts of ``make gpu`` on tiny shapes: what needs no GPU runs here as it will there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu import exactness, profiles, races, smoke, waiting
from benchmarks.gpu import notes as notes_module
from benchmarks.gpu import part as parts
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.plan import FILE, PARTS
from benchmarks.gpu.timed import Cost, rates
from grpo_kernels.tools import canaries as gemms

pytestmark = pytest.mark.slow


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return make_notes(tmp_path)


def make_notes(folder: Path, seconds: float = 300.0) -> Notes:
    end = time.monotonic() + seconds
    return Notes(part="a part", out=folder, device=torch.device("cpu"), end=end)


def kept(notes: Notes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (notes.out / FILE).read_text().splitlines()]


@pytest.mark.parametrize("part", [part for part in PARTS if part.function], ids=lambda x: x.name)
def test_every_part_runs_on_tiny_shapes(part: parts.Part, notes: Notes) -> None:
    if torch.cuda.is_available():
        notes.device = torch.device("cuda")
    said = parts.run(part, notes, small=True)
    if part.needs_gpu and notes.device.type == "cpu":
        assert said == f"{part.name} needs a GPU" and not (notes.out / FILE).exists()
        return
    assert notes.failed == notes.missing == 0 and said == f"{notes.checks} checks, 0 failed"
    assert kept(notes) and all(line.get("ok", True) for line in kept(notes))
    assert notes.checks > 1 or part.name == "products"  # which only measures


def test_a_failed_check_is_counted_and_stops_nothing(
    notes: Notes, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise MemoryError("does not fit")

    def last() -> None:
        notes.check("last", True, "1", "1")
        notes.number("time", ms=1.25)

    notes.every([("wrong", lambda: notes.check("wrong", False, "1", "2"))])
    notes.every([("broken", broken), ("last", last)])
    assert notes.summary() == "3 checks, 2 failed"
    assert capsys.readouterr().out.splitlines() == [
        "FAILED wrong: expected 1, got 2",
        "FAILED broken: expected a result, got MemoryError: does not fit",
        "ok     last: expected 1, got 1",
        "       time: ms 1.25",
    ]
    assert kept(notes)[0] == {
        "part": "a part", "name": "wrong", "ok": False, "expected": "1", "came": "2",
    }  # fmt: skip


def test_no_case_begins_when_the_time_is_up(tmp_path: Path) -> None:
    notes = make_notes(tmp_path, seconds=-1.0)
    notes.every((str(index), lambda: pytest.fail("it began")) for index in range(3))
    assert notes.summary() == "0 checks, 0 failed, 3 cases not reached"


def test_a_lost_device_ends_the_part(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "device_is_lost", lambda device: True)
    with pytest.raises(RuntimeError, match="first broke the device"):
        notes.every([("first", lambda: None), ("second", lambda: pytest.fail("it began"))])


def test_bits_are_compared_not_values(notes: Notes) -> None:
    x = torch.tensor([0.0, float("nan"), 1.0])
    assert notes.check_equal("itself", x, x.clone())
    assert not notes.check_equal("signs of zero", x, x.copysign(torch.tensor(-1.0)))
    assert not notes.check_equal("one of three", x, torch.tensor([0.0, float("nan"), 1.5]))
    assert kept(notes)[-1]["came"] == "1 of 3 that differ, by up to 5.0e-01, at (2,)"


def spoiled(function: Callable[..., Any], by: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: by(function(*args, **kwargs))


def test_canaries_see_a_lost_part_of_k(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemms.accumulate

    def short(out: Any, a: Any, b: Any, *rest: Any, **options: Any) -> None:
        whole = a.shape[1] // 16 * 16
        right(out, a[:, :whole], b[:whole], *rest, **options)

    monkeypatch.setattr(gemms, "accumulate", short)
    exactness.canaries(notes, small=True)
    wrong = [line["name"] for line in kept(notes) if not line["ok"]]
    assert any("dhidden, torch.bfloat16, C 33 V 53 D 32" in name for name in wrong)
    assert not any(name.startswith("logits") for name in wrong)


def test_bits_see_a_row_that_depends_on_its_place(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uneven(logits: torch.Tensor) -> torch.Tensor:
        logits[1::2] *= 1.01
        return logits

    monkeypatch.setattr(exactness, "project", spoiled(exactness.project, uneven))
    exactness._places(notes, 32, 53, 16, torch.float32, torch.float32)
    wrong = [line["name"] for line in kept(notes) if not line["ok"]]
    assert len(wrong) == 2 and wrong[0].startswith("one row in 32 places")


def test_races_are_seen(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose results change from run to run, or with the tile."""
    calls = []

    def run_of(kernel: str, tile: Any, out: torch.dtype) -> Any:
        def run(config: Any) -> dict[str, torch.Tensor]:
            calls.append(kernel)
            value = len(calls) if kernel == "loss" else config.depth
            return {"the gradient": torch.full((2, 53), float(value), dtype=out)}

        return run

    monkeypatch.setattr(races, "run_of", run_of)
    monkeypatch.setitem(races._VOCABULARIES, True, (53,))
    races.races(notes, small=True)
    wrong = [line["name"] for line in kept(notes) if not line["ok"]]
    assert any(name.startswith("loss V 53") for name in wrong)
    assert wrong.count("dlogits V 53, 1 warps x 1") == 2


def test_smoke_sees_a_wrong_gradient(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Any, backend: str = "triton") -> dict[str, torch.Tensor]:
        return {"dhidden": torch.ones(2) * (1.0 if backend == "reference" else 1.1)}

    problem = smoke.make_problem(*smoke._SIZES[True])
    smoke._compare(notes, "it", problem, torch.float32, wrong)
    assert notes.failed == 1


@pytest.mark.parametrize("synchronizes", [False, True])
def test_a_step_that_waits_is_named(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, synchronizes: bool
) -> None:
    modes: list[str] = []
    right = waiting.linear_policy_loss

    def loss(*args: Any, **kwargs: Any) -> Any:
        if synchronizes and modes and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return right(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(waiting, "linear_policy_loss", loss)
    waiting.waiting(notes, small=True)
    assert notes.checks == 8 and notes.failed == (8 if synchronizes else 0)
    assert modes == ["error", "default"] * 8
    if synchronizes:
        assert "synchronizing CUDA operation at test_gpu_parts.py:" in kept(notes)[-1]["came"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profile_of_a_step(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no kernel runs on a device; its table and its idle time are tested below."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profiles.profiles(notes, small=True)
    host, spans, headline = kept(notes)
    assert notes.failed == 0 and all(host[f"{x}, ms"] > 0 for x in ("TokenBatch", "planning"))
    assert spans["spans"] == [] and "0 kernels and copies" in headline["text"]


def test_idle_time_of_a_profile(notes: Notes) -> None:
    def event(name: str, start: float, end: float, device: DeviceType) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=device)

    spans = profiles.device_spans(
        [
            event("aten::mm", 0, 1000, DeviceType.CPU),
            event("scale", 60, 70, DeviceType.CUDA),
            event("gemm", 10, 30, DeviceType.CUDA),
            event("copy", 20, 40, DeviceType.CUDA),  # beside it
            event("gemm", 70, 100, DeviceType.CUDA),
        ]
    )
    assert profiles.busy(spans) == 70 and profiles.idle(spans) == 20 and profiles.idle([]) == 0
    profiles.table(notes, "T 8", spans)
    assert kept(notes)[0] == {"part": "a part", "name": "T 8, gemm", "us": 50, "calls": 2}


def test_rates_stand_beside_what_the_machine_should_reach() -> None:
    found = rates(2.0, Cost(operations=790e12, bytes=2.1e12))
    assert found["tflops"] == pytest.approx(395) and found["x_floor"] == pytest.approx(2)
    assert (found["floor_ms"], found["unhidden_ms"]) == pytest.approx((1000, 1500))
    assert rates(2.0, Cost(bytes=4.2e12))["gb_per_s"] == pytest.approx(2100)
