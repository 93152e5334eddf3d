"""What is on is ours, everywhere in the host; what is off is theirs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import pytest

from grpo_kernels.integrations.switch import Host, Replacement, Switch


def theirs() -> str:
    return "theirs"


def ours() -> str:
    return "ours"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a package of two modules, of which the second has imported a function of the first."""
    first, second = ModuleType("made_up.first"), ModuleType("made_up.second")
    first.score = second.score = theirs
    first.other = second.other = len
    for module in (first, second):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(first=first, second=second)


def switch_of(host: SimpleNamespace) -> Switch:
    def replacements() -> Iterator[Replacement]:
        yield Replacement(host.first, "score", ours, everywhere=True)
        yield Replacement(host.first, "other", ours)

    return Switch(Host("torch", ("2", "3.1")), replacements)


def test_on_and_off(host: SimpleNamespace) -> None:
    switch = switch_of(host)
    for _ in range(2):
        with switch.enabled():
            switch.enable()  # twice
            assert host.first.score() == host.second.score() == "ours"
            assert host.first.other is ours and host.second.other is len
            late = ModuleType("made_up.late")
            late.score = host.first.score
            sys.modules["made_up.late"] = late
        switch.disable()
        assert not switch.on
        assert host.first.score is host.second.score is late.score is theirs
        assert host.first.other is len
        del sys.modules["made_up.late"]


def test_one_that_is_on_stays_on(host: SimpleNamespace) -> None:
    switch = switch_of(host)
    switch.enable()
    with switch.enabled():
        pass
    assert host.first.score is ours


def test_blocks_that_overlap(host: SimpleNamespace) -> None:
    switch = switch_of(host)
    first, second = switch.enabled(), switch.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert host.first.score() == "ours"
    second.__exit__(None, None, None)
    assert host.first.score() == "theirs"


def test_threads_that_come_at_once() -> None:
    put: list[object] = []

    class Counted(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            put.append(value)
            super().__setattr__(name, value)

    owner, both = Counted(score=theirs), threading.Barrier(2)

    def replacements() -> Iterator[Replacement]:
        yield Replacement(owner, "score", ours)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for the other, if that is let in

    switch, inside = Switch(Host("torch", ("2",)), replacements), threading.Barrier(2)

    def run() -> None:
        with switch.enabled():
            inside.wait(10)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert put == [ours, theirs]


def test_what_others_have_replaced_is_not_lost(host: SimpleNamespace) -> None:
    switch = switch_of(host)
    switch.enable()
    host.first.score = print
    with pytest.raises(ValueError, match="torch: expected score as enable.. has left it, got <bui"):
        switch.disable()
    assert switch.on and host.first.score is print
    host.first.score = ours
    switch.disable()
    assert host.second.score is theirs


def test_two_for_one_place_are_refused(host: SimpleNamespace) -> None:
    with (
        switch_of(host).enabled(),
        pytest.raises(ValueError, match="torch: score has been replaced already, by another"),
    ):
        switch_of(host).enable()
    assert host.first.score is theirs


@pytest.mark.parametrize(
    ("package", "tested", "message"),
    [
        ("no-such-host", ("1.2",), "no-such-host: expected version 1.2, but it is not installed"),
        ("torch", ("1", "2.1000"), "torch: expected version 1 or 2.1000, got .*any_version=True"),
    ],
)
def test_versions(package: str, tested: tuple[str, ...], message: str) -> None:
    switch = Switch(Host(package, tested), lambda: iter(()))
    with pytest.raises(ImportError, match=message):
        switch.enable()
    if package == "torch":
        switch.enable(any_version=True)
