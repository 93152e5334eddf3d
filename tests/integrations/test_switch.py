"""What is on is ours, everywhere in the host; what is off is theirs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType

import pytest

from grpo_kernels.integrations.probe import Host, Probe, Replacement
from grpo_kernels.integrations.switch import Switch
from tests.integrations.contract import Adapter, contract_of

OURS = ("lazy_scorers", "liger", "ms_swift", "trl_head", "verl")


def theirs() -> str:
    return "theirs"


def ours() -> str:
    return "ours"


def other(obj: object, /) -> str:
    return "ours"


# a package of two modules, of which the second has imported a function of the first
FIRST, SECOND = ModuleType("made_up.first"), ModuleType("made_up.second")
FIRST.score = SECOND.score = theirs
FIRST.other = SECOND.other = len


def made_up_switch() -> Switch:
    def replacements() -> Iterator[Replacement]:
        yield Replacement("made_up.first", "score", ours, everywhere=True)
        yield Replacement("made_up.first", "other", other)

    return Switch(Probe(host=Host("torch", ("2", "3.1")), replacements=replacements))


SWITCH = made_up_switch()


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (FIRST, SECOND):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    SWITCH.disable()
    assert FIRST.score is SECOND.score is theirs
    assert FIRST.other is SECOND.other is len


def test_what_is_imported_meanwhile() -> None:
    for _ in range(2):
        with SWITCH.enabled():
            assert FIRST.score() == SECOND.score() == "ours"
            assert FIRST.other is other and SECOND.other is len
            late = ModuleType("made_up.late")
            late.score = FIRST.score
            sys.modules["made_up.late"] = late
        assert not SWITCH.on and late.score is theirs
        del sys.modules["made_up.late"]


test_contract = contract_of(
    Adapter(package="made_up", step=lambda with_ours: [0], settings={"": {}}, switch=SWITCH)
)


def test_one_that_is_on_stays_on() -> None:
    SWITCH.enable()
    with SWITCH.enabled():
        pass
    assert FIRST.score is ours


def test_threads_that_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[object] = []

    class Counted(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            put.append(value)
            super().__setattr__(name, value)

    counted, both = Counted("made_up.counted"), threading.Barrier(2)
    vars(counted)["score"] = theirs
    monkeypatch.setitem(sys.modules, counted.__name__, counted)

    def replacements() -> Iterator[Replacement]:
        yield Replacement(counted.__name__, "score", ours)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for the other, if that is let in

    probe = Probe(host=Host("torch", ("2",)), replacements=replacements)
    switch, inside = Switch(probe), threading.Barrier(2)

    def run() -> None:
        with switch.enabled():
            inside.wait(10)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert put == [ours, theirs]


def test_two_for_one_place_are_refused() -> None:
    with (
        made_up_switch().enabled(),
        pytest.raises(ValueError, match="torch: score has already been replaced by another"),
    ):
        SWITCH.enable()


def test_nothing_of_a_host_is_imported() -> None:
    code = (
        f"import sys\nfrom grpo_kernels.integrations import {', '.join(OURS)}\n"
        "print({name.partition('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" in run.stdout
    assert not any(f"'{name}'" in run.stdout for name in ["trl", "verl", "liger_kernel", "swift"])
