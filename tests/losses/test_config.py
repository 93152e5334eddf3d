"""Losses of a user's own, and configs by their numbers; bad settings: tests/test_bad_input.py."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.losses import (
    LOSSES,
    NamedLoss,
    Surrogate,
    Terms,
    check_number,
    register_loss,
)
from grpo_kernels.losses import (
    config as configs,
)
from grpo_kernels.losses.surrogates import Clip


def test_registration_refuses_taken_and_unknown_names() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register_loss("grpo", LOSSES["grpo"])
    with pytest.raises(ValueError, match="surrogate: expected a subclass of Surrogate, got 'clip'"):
        register_loss("new", NamedLoss(surrogate="clip", aggregation="token_mean", source="x"))
    with pytest.raises(ValueError, match="aggregation: expected one of"):
        register_loss("new", NamedLoss(surrogate=Clip, aggregation="mean", source="x"))


def test_a_class_that_is_defined_again_replaces_its_loss():
    kinds = [type("Own", (Clip,), {}) for _ in range(2)]
    other = type("Other", (Clip,), {})
    try:
        for kind in kinds:
            register_loss("own", NamedLoss(kind, "token_mean", source="x"))
            assert LOSSES["own"].surrogate is kind
        for kind in (kinds[1], other):
            with pytest.raises(ValueError, match="'own' is already registered"):
                register_loss("own", NamedLoss(kind, "token_mean", source="x"))
    finally:
        LOSSES.pop("own", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Power(Surrogate):
    """A user's own, with a setting of its own."""

    power: float = 2.0

    def __post_init__(self) -> None:
        check_number("power", self.power, "a number above 0", lambda x: x > 0)

    def __call__(self, terms: Terms) -> Tensor:
        return -(terms.ratio**self.power) * terms.advantages


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = NamedLoss(surrogate=Power, aggregation="token_mean", source="here")
    monkeypatch.setitem(LOSSES, "power", loss)


@pytest.mark.usefixtures("power")
def test_a_loss_of_ones_own_has_its_settings() -> None:
    assert LossConfig(loss_type="power").surrogate == Power(power=2.0)
    config = LossConfig(loss_type="power", power=3.0, beta=0.1)
    assert config.surrogate == Power(power=3.0)
    assert LossConfig(loss_type="power", surrogate=Power(power=3.0), beta=0.1) == config
    with pytest.raises(ValueError, match="power: expected a number above 0, got -1"):
        LossConfig(loss_type="power", power=-1)


@pytest.mark.usefixtures("power")
def test_settings_and_surrogates_of_other_losses_are_refused() -> None:
    message = r"power: expected a setting of dapo \(epsilon, .*\) or one of loss_type, beta"
    with pytest.raises(ValueError, match=message):
        LossConfig(power=3.0)
    with pytest.raises(ValueError, match="surrogate: expected a Clip for dapo, got Power"):
        LossConfig(surrogate=Power())


def test_a_config_of_another_process_gets_a_number_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LossConfig(beta=0.25)
    there = LossConfig(loss_type="cispo", epsilon_high=4.5)
    data = pickle.dumps(there)
    monkeypatch.setattr(configs, "_numbers", itertools.count())
    monkeypatch.setattr(configs, "_alive", {})
    here = [LossConfig(beta=0.5), pickle.loads(data)]
    assert here[1] == there
    assert [LossConfig.of_registry_key(one.registry_key) for one in here] == here
