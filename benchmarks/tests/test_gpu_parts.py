"""The parts of ``make gpu``; on a CPU on tiny shapes, where they need no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.environment import ROOT
from benchmarks.gpu import chunks, exactness, products, profiles, races, smoke, tiles, waiting
from benchmarks.gpu import notes as notes_module
from benchmarks.gpu.notes import FILE, Notes
from benchmarks.gpu.timed import Cost, rates
from grpo_kernels.tools import canaries as gemms

pytestmark = pytest.mark.slow


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(part="a part", out=tmp_path, device=torch.device("cpu"))


def kept(notes: Notes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (notes.out / FILE).read_text().splitlines()]


PARTS = {
    "smoke": smoke.smoke,
    "canaries": exactness.canaries,
    "races": races.races,
    "bits": exactness.bits,
    "waiting": waiting.waiting,
    "products": products.products,
    "rows": tiles.rows,
    "profiles": profiles.profiles,
    "forward": tiles.forward,
    "chunks": chunks.chunks,
}
NEED_A_GPU = ("waiting", "profiles")


@pytest.mark.parametrize("name", PARTS)
def test_part(name: str, device: torch.device, tmp_path: Path) -> None:
    if name in NEED_A_GPU and device.type == "cpu":
        pytest.skip("it needs a GPU")
    on_gpu = device.type == "cuda"
    out = Path(os.environ["OUT"]) if on_gpu and "OUT" in os.environ else tmp_path
    notes = Notes(part=name, out=out, device=device)
    PARTS[name](notes, small=not on_gpu)
    assert not notes.failed, f"{notes.checks} checks, {notes.failed} failed"
    assert notes.checks > 1 or name == "products"  # which only measures
    assert any(line["part"] == name for line in kept(notes))


def test_run_has_every_part_and_fits_into_nine_minutes() -> None:
    """Even if each takes all of its time, some is left for the benchmarks."""
    script = (ROOT / "benchmarks/gpu/run.sh").read_text()
    seconds = dict(re.findall(r"^part (\w+) (\d+)$", script, re.MULTILINE))
    assert list(seconds) == list(PARTS)
    assert sum(map(int, seconds.values())) + 30 + 60 < 520


def test_all_files_with_gpu_tests_are_run() -> None:
    script = (ROOT / "benchmarks/gpu/run.sh").read_text()
    run = tuple(
        path.strip() for path in re.findall(r"tests/[\w/.]+", script.split("step tests")[1])
    )
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\btargets\(|device: torch\.device|mark\.gpu\b", path.read_text())
    }
    assert marked and all(path.startswith(run) for path in marked), marked
    assert all((ROOT / path).exists() for path in run)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a python of a machine with a GPU, whose steps do as their names say."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
if [ "$1" = - ]; then echo "a GPU, 141 GiB"; exit "${NO_GPU:-0}"; fi
case "$*" in
*races*) echo "FAILED one: expected 1, got 2"; echo "1 failed"; exit 1 ;;
*bits*) trap "" INT; echo "* 5 TFLOP/s"; sleep 60 ;;
*xdist* | *sys_tags*) exit 1 ;;
*) echo "== 3 passed in 0.1s ==" ;;
esac
""")
    python.chmod(0o755)
    return python, {**os.environ, "OUT": str(tmp_path / "out")}


def ran(python: Path, variables: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", script, str(python)]
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def test_what_fails_or_hangs_does_not_stop_the_others(
    machine: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "benchmarks/gpu"
    folder.mkdir(parents=True)
    source = (ROOT / "benchmarks/gpu/run.sh").read_text()
    script = folder / "run.sh"
    script.write_text(source.replace("part bits 30", "part bits 1").replace("-k 8", "-k 0.5"))
    done = ran(*machine, str(script))
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert "a GPU, 141 GiB" in said
    assert "smoke      ok        3 passed in 0.1s " in said
    assert "FAILED one: expected 1, got 2" in said and "* 5 TFLOP/s" in said
    states = dict(line.split(": ") for line in said if re.match(r"^\w+: \w+$", line))
    assert states.pop("races") == "failed" and states.pop("bits") == "timeout"
    assert set(states.values()) == {"ok"} and list(states)[-1] == "tests"
    assert "races" in (tmp_path / "out/gpu-log.txt").read_text()


def test_without_a_gpu_run_says_so(machine: tuple[Path, dict[str, str]]) -> None:
    python, variables = machine
    done = ran(python, {**variables, "NO_GPU": "1"}, str(ROOT / "benchmarks/gpu/run.sh"))
    assert done.returncode == 2 and done.stdout == "no GPU to measure on: a GPU, 141 GiB\n"


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
    assert (notes.checks, notes.failed) == (3, 2)
    assert capsys.readouterr().out.splitlines() == [
        "FAILED wrong: expected 1, got 2",
        "FAILED broken: expected a result, got MemoryError: does not fit",
        "ok     last: expected 1, got 1",
        "       time: ms 1.25",
    ]
    assert kept(notes)[0] == {
        "part": "a part", "name": "wrong", "ok": False, "expected": "1", "came": "2",
    }  # fmt: skip


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
