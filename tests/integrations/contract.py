"""The one contract of our adapters: ours in the place of a host's own changes no number.

A host joins by a record, :class:`Adapter`, and a line: ``test_contract = contract_of(record)``, or
``cases(record)`` for what runs in processes of its own. In fp32 a step gives the same with ours. In
the precision that the host has by default it differs from the host's fp32 step by no more than its
own rounding explains. Once ours are off again all functions of the host are the very same objects,
and a step gives the same bits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grpo_kernels.integrations.lazy_scorers import LazyLogits
from grpo_kernels.integrations.probe import find
from grpo_kernels.integrations.switch import Switch
from grpo_kernels.testing import assert_as_exact_as

BF16 = 8e-3  # the last digit
_ROUNDING = 1e-5
# of a number per step, for the errors of so few differ by chance
_FACTOR, _FLOOR = 4.0, 2e-6
# shares of tokens or samples, of which one may lie on a threshold
_SHARES, _ONE = ("clip_ratio", "clipfrac", "accuracies"), 0.15


class Run(NamedTuple):
    """What a training gave."""

    log: list[dict[str, Any]]  # a row of numbers per step
    weights: Mapping[str, Tensor]  # at the end


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What the contract knows of a host, and of ours in it."""

    package: str  # what it is imported as
    step: Callable[..., Any]  # (ours, **settings): a Run, or nested tensors and numbers
    settings: Mapping[str, Mapping[str, Any]]  # of a step, by the name of a case
    default: Mapping[str, Any] = field(default_factory=dict)  # settings of its default precision
    # cases with thresholds, such as clips: its roundings decide which tokens are beyond them
    fp32_only: Collection[str] = ()
    switch: Switch | None = None
    refused: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # message: call


def contract_of(adapter: Adapter) -> Callable[[str], None]:
    """Return the test of a record."""
    found = cases(adapter)

    @pytest.mark.parametrize("case", found)
    def test(case: str) -> None:
        found[case]()

    return test


def cases(adapter: Adapter) -> dict[str, Callable[[], None]]:
    """Return the checks of a record by name."""
    found: dict[str, Callable[[], None]] = {
        name: partial(_check_step, adapter, name) for name in adapter.settings
    }
    if adapter.switch is not None:
        found["switch"] = partial(_check_switch, adapter.package, adapter.switch)
    return found | {
        f"refused, {message}": partial(_check_refused, message, call)
        for message, call in adapter.refused.items()
    }


def assert_passed(verdicts: Mapping[str, str]) -> None:
    """Assert that no case has failed that ran in other processes."""
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}


def _check_step(adapter: Adapter, name: str) -> None:
    settings = adapter.settings[name]
    exact = adapter.step(False, **settings)
    before = _functions(adapter.package)
    assert_alike(adapter.step(True, **settings), exact)
    if name == next(iter(adapter.settings)):  # and off again
        _assert_the_same(_functions(adapter.package), before)
        again = adapter.step(False, **settings)
        torch.testing.assert_close(again, exact, rtol=0, atol=0, equal_nan=True)
    if adapter.default and name not in adapter.fp32_only:
        theirs, found = (
            adapter.step(ours, **{**settings, **adapter.default}) for ours in (False, True)
        )
        assert_as_exact_as_theirs(found, theirs, exact)


def _check_switch(package: str, switch: Switch) -> None:
    """Hold a switch to what is wrong: no host, another one, a patch of somebody else's."""
    _check_probe(package, switch)  # which imports the host
    theirs = _functions(package)
    switch.enable()
    switch.enable()  # again, without effect
    ours = {place: x for place, x in _functions(package).items() if x is not theirs.get(place, x)}
    assert ours
    for (owner, name), function in ours.items():
        if inspect.isfunction(theirs[owner, name]):
            assert _parameters(function) == _parameters(theirs[owner, name])
        setattr(owner, name, print)
    with pytest.raises(ValueError, match=r"as enable\(\) left it, got <built-in function"):
        switch.disable()
    for (owner, name), function in ours.items():
        setattr(owner, name, function)
    switch.disable()
    switch.disable()
    _assert_the_same(_functions(package), theirs)


def _check_probe(package: str, switch: Switch) -> None:
    """Hold a switch to hosts that are absent, that have changed, and that are only newer."""
    probe, theirs = switch.probe, _functions(package)
    first = next(iter(probe.replacements()))
    owner = find(first.owner)
    absent = replace(probe, host=replace(probe.host, package="no-such-host"))
    newer = replace(probe, host=replace(probe.host, tested=("0.0",)))
    try:
        switch.probe = absent
        with pytest.raises(ImportError, match=r"no-such-host: expected .* not installed"):
            switch.enable()
        switch.probe = newer
        with switch.enabled():
            assert switch.on
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, first.name, _with_another_parameter)
            switch.probe = replace(newer)  # whose verdict is not known yet
            said = rf"\* \S+\.{first.name}.*: (missing|new parameter 'another')"
            with pytest.raises(ImportError, match=said):
                switch.enable()
    finally:
        switch.probe = probe
    assert not switch.on
    _assert_the_same(_functions(package), theirs)


def _with_another_parameter(another: Any) -> None:
    """Stand for a function that a host has changed."""


def _check_refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, ImportError, AttributeError), match=message):
        call()


def _functions(package: str) -> dict[tuple[Any, str], Any]:
    """Return all functions and classes of a host by the module or class that has them."""
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    owners: list[Any] = [sys.modules[name] for name in names]
    for value in [x for module in owners for x in vars(module).values()]:
        if isinstance(value, type) and value.__module__.partition(".")[0] == package:
            owners.append(value)
    return {
        (owner, name): value
        for owner in owners
        for name, value in list(vars(owner).items())
        if callable(value)
    }


def _assert_the_same(found: Mapping[Any, Any], before: Mapping[Any, Any]) -> None:
    assert [place for place, value in before.items() if found.get(place) is not value] == []


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(x.name, x.default) for x in inspect.signature(function).parameters.values()]


def assert_alike(found: Any, theirs: Any) -> None:
    """Compare what two steps gave in fp32."""
    if isinstance(theirs, Run):
        assert_same_run(found, theirs)
    else:
        torch.testing.assert_close(found, theirs, rtol=2e-5, atol=1e-5, equal_nan=True)


def assert_same_run(
    found: Run, theirs: Run, atol: float = 2e-6, weights_atol: float = 2e-6
) -> None:
    """Compare two trainings in fp32: what they have logged, and their weights at the end."""
    torch.testing.assert_close(found.log, theirs.log, rtol=1e-4, atol=atol, equal_nan=True)
    torch.testing.assert_close(found.weights, theirs.weights, rtol=0, atol=weights_atol)


def assert_as_exact_as_theirs(found: Any, theirs: Any, exact: Any) -> None:
    """Compare what our step and the host's gave in its precision by their errors."""
    if isinstance(exact, Run):
        return _assert_run_as_exact_as(found, theirs, exact)
    leaves = zip(*map(tree_leaves, (found, theirs, exact)), strict=True)
    for number, (own, other, true) in enumerate(leaves):
        if isinstance(true, Tensor):
            own_error, error = (_norm(x.double() - true) for x in (own, other))
            bound = max(2 * error, BF16 * _norm(true))
            assert own_error <= bound, f"result {number}: {own_error}, theirs {error}"


def _assert_run_as_exact_as(found: Run, theirs: Run, exact: Run) -> None:
    """Compare every number that is logged over all steps, and all weights at the end."""
    own, others, true = (_columns(run.log) for run in (found, theirs, exact))
    assert own.keys() == others.keys() == true.keys()
    for name in true:
        assert torch.equal(own[name].isnan(), others[name].isnan()), name
        own_error, error = (_norm(x[name] - true[name]) for x in (own, others))
        floor = _ONE if any(word in name for word in _SHARES) else 0.0
        bound = _FACTOR * error + _FLOOR * max(1.0, _norm(true[name])) + floor
        assert own_error <= bound, f"{name}: error {own_error:.1e}, theirs {error:.1e}"
    weights = [torch.cat([x.flatten() for x in run[1].values()]) for run in (found, theirs, exact)]
    assert_as_exact_as(*weights, _ROUNDING, "weights")


def _norm(x: Tensor) -> float:
    return float(x.nan_to_num().norm())


def _columns(log: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the values of each name, NaN where a row has none."""
    rows = [row for row in log if "train_loss" not in row]  # which sums up
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name) for row in rows] for name in names}
    return {
        name: torch.tensor([torch.nan if x is None else x for x in column], dtype=torch.float64)
        for name, column in values.items()
    }


@contextmanager
def unformed(rows: int = 0) -> Iterator[None]:
    """Fail where LazyLogits of more ``rows`` than these are formed, with gradients or without."""
    form = LazyLogits.form_logits

    def form_logits(self: Any) -> Tensor:
        assert self.hidden.shape[-2] <= rows
        return form(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyLogits, "form_logits", form_logits)
        yield
