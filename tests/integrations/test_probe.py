"""A host that differs from what an adapter needs is rejected, and the difference is named."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_kernels.integrations import liger, probe
from grpo_kernels.integrations.switch import Switch

trl = pytest.importorskip("trl", reason="TRL's adapter was not probed")
liger_loss = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")

from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.trainer import distillation_trainer, grpo_trainer, utils

from grpo_kernels.integrations import trl as ours
from grpo_kernels.integrations import trl_trainer

Change = Callable[[pytest.MonkeyPatch], None]
Theirs = liger_loss.LigerFusedLinearGRPOLoss
ADD, DIVERGENCE = utils.add_fused_lm_head, distillation_trainer._chunked_divergence_loss
BASE = trl.GRPOTrainer
COMPUTE_LOSS = BASE._compute_loss


@pytest.fixture(autouse=True)
def _unknown() -> Iterator[None]:
    """Forget the verdicts, before a test and after it."""
    probe.differences.cache_clear()
    yield
    probe.differences.cache_clear()


def put(owner: Any, name: str, value: Any) -> Change:
    return lambda patch: patch.setattr(owner, name, value)


def drop(owner: Any, name: str) -> Change:
    return lambda patch: patch.delattr(owner, name)


def signature(function: Any, **changes: Any) -> Any:
    """Return a function that claims other parameters: another default or name, None to drop it."""
    parameters = dict(inspect.signature(function).parameters)
    for name, change in changes.items():
        if change is None:
            del parameters[name]
        elif name in parameters and isinstance(change, str):
            parameters = {
                (change if known == name else known): x for known, x in parameters.items()
            }
        else:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters[name] = inspect.Parameter(name, kind, default=change)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    named = [x.replace(name=name) for name, x in parameters.items()]
    changed.__signature__ = inspect.Signature(named)
    return changed


def reordered(
    model: Any,
    outputs: Any = ("log_probs",),
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
) -> None: ...


def warmer(model: Any, temperature: float = 1.0, *args: Any, **kwargs: Any) -> None:
    ADD(model, temperature * 1.01, *args, **kwargs)


warmer.__signature__ = inspect.signature(ADD)


@functools.wraps(DIVERGENCE)
def larger_divergence(*args: Any, **kwargs: Any) -> Any:
    loss, entropy, count = DIVERGENCE(*args, **kwargs)
    return loss * 1.01, entropy, count


larger_divergence.__signature__ = inspect.signature(DIVERGENCE)


@dataclass
class WithoutTop1:
    loss: Any = None
    log_probs: Any = None
    entropy: Any = None
    log_sum_sq_probs: Any = None
    mean_logits: Any = None
    label_mask: Any = None
    aux_loss: Any = None


@dataclass
class WithRanks(WithoutTop1):
    is_top1: Any = None
    rank: Any = None


def fails(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("0 active drivers")


fails.__signature__ = inspect.signature(ADD)

OF_TRL: dict[str, tuple[Change, str]] = {
    "renamed": (drop(utils, "add_fused_lm_head"), r"trl.trainer.utils.add_fused_lm_head: missing"),
    "not imported": (
        drop(grpo_trainer, "add_fused_lm_head"),
        r"trl.trainer.grpo_trainer.add_fused_lm_head: missing",
    ),
    "no helper": (
        drop(utils, "maybe_gather_lm_head_ctx"),
        r"trl.trainer.utils.maybe_gather_lm_head_ctx: missing",
    ),
    "an added parameter": (
        put(utils, "add_fused_lm_head", signature(ADD, top_k=3)),
        r"add_fused_lm_head: new parameter 'top_k=3', which ours does not know",
    ),
    "a removed parameter": (
        put(utils, "add_fused_lm_head", signature(ADD, outputs=None)),
        r"add_fused_lm_head: no parameter 'outputs'",
    ),
    "a renamed parameter": (
        put(utils, "add_fused_lm_head", signature(ADD, temperature="tau")),
        r"new parameter 'tau=1.0', .*\n.*add_fused_lm_head: no parameter 'temperature'",
    ),
    "another default": (
        put(utils, "add_fused_lm_head", signature(ADD, temperature=2.0)),
        r"expected parameter 'temperature=1.0', got 'temperature=2.0'",
    ),
    "another order": (
        put(utils, "add_fused_lm_head", reordered),
        r"expected parameters in the order of model, temperature, .* got model, outputs",
    ),
    "a parameter of distillation": (
        put(distillation_trainer, "_chunked_divergence_loss", signature(DIVERGENCE, beta=None)),
        r"_chunked_divergence_loss: no parameter 'beta'",
    ),
    "an output less": (
        put(utils, "FusedCausalLMOutput", WithoutTop1),
        r"FusedCausalLMOutput: no parameter 'is_top1'",
    ),
    "an output more": (
        put(utils, "FusedCausalLMOutput", WithRanks),
        r"FusedCausalLMOutput: new parameter 'rank=None'",
    ),
    "other numbers": (
        put(utils, "add_fused_lm_head", warmer),
        r"add_fused_lm_head: log_probs differs by 0\.\d+ from ours \(allowed 0.00\d+\)",
    ),
    "other numbers of distillation": (
        put(distillation_trainer, "_chunked_divergence_loss", larger_divergence),
        r"_chunked_divergence_loss, beta 0.3: gradient of weight differs by",
    ),
    "not on a CPU": (
        put(utils, "add_fused_lm_head", fails),
        r"numbers could not be compared: RuntimeError: 0 active drivers",
    ),
}


@pytest.mark.parametrize("name", OF_TRL)
def test_a_trl_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = OF_TRL[name]
    change(monkeypatch)
    check_rejected(ours.SWITCH, message, 'pip install "trl==1.16.*"')


def check_rejected(switch: Switch, message: str, advice: str) -> None:
    """Hold a switch to an error that changes nothing, and to a warning with ``any_version``."""
    places = [probe.find(each.owner) for each in switch.probe.replacements()]
    before = [dict(vars(place)) for place in places]
    with pytest.raises(ImportError, match=message) as error:
        switch.enable()
    assert advice in str(error.value) and "any_version=True" in str(error.value)
    assert not switch.on and [dict(vars(place)) for place in places] == before
    with pytest.warns(RuntimeWarning, match=message), switch.enabled(any_version=True):
        assert switch.on
    assert [dict(vars(place)) for place in places] == before


def test_all_differences_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = signature(ADD, top_k=3, outputs=None)
    monkeypatch.setattr(utils, "add_fused_lm_head", changed)
    monkeypatch.delattr(grpo_trainer, "add_fused_lm_head")
    with pytest.raises(ImportError) as error:
        ours.enable()
    listed = [line for line in str(error.value).splitlines() if line.startswith("  * ")]
    assert len(listed) == 3


def test_nothing_is_left_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "add_fused_lm_head")
    monkeypatch.delattr(distillation_trainer, "_chunked_divergence_loss")
    with (
        pytest.warns(RuntimeWarning, match="add_fused_lm_head: missing"),
        pytest.raises(ImportError, match="trl: there is nothing in it that ours could replace"),
    ):
        ours.enable(any_version=True)
    assert not ours.SWITCH.on


def claim(monkeypatch: pytest.MonkeyPatch, claimed: str) -> None:
    monkeypatch.setattr(probe, "version", lambda name: claimed)


def test_a_newer_trl_that_is_the_same(monkeypatch, caplog) -> None:
    compared = []
    once = probe.Probe(
        host=ours.PROBE.host,
        replacements=ours.PROBE.replacements,
        uses=ours.PROBE.uses,
        compare=lambda: compared.append(1) or ours.PROBE.compare(),
    )
    switch = Switch(once)
    claim(monkeypatch, "1.19.0")
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with switch.enabled():
                assert utils.add_fused_lm_head is ours.add_fused_lm_head
    said = [record.getMessage() for record in caplog.records if "trl" in record.getMessage()]
    assert (
        len(said) == 1 and "trl 1.19.0 was not tested (tested: 1.16); the probe passed" in said[0]
    )
    assert compared == [1]  # once per version
    claim(monkeypatch, "1.18.0")
    with switch.enabled():
        pass
    assert compared == [1, 1]


def test_the_probe_leaves_the_state_of_torch_alone() -> None:
    torch.set_default_dtype(torch.float64)
    before = torch.random.get_rng_state()
    try:
        with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            for each in (ours.PROBE, trl_trainer.PROBE, liger.SWITCH.probe):
                each.check()
                assert torch.get_default_dtype() == torch.float64
            assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
            assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_warning_of_a_host_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*args: Any, **kwargs: Any) -> None:
        warnings.warn("it is going to change", DeprecationWarning, stacklevel=2)
        ADD(*args, **kwargs)

    warned.__signature__ = inspect.signature(ADD)
    monkeypatch.setattr(utils, "add_fused_lm_head", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.PROBE.check()


def test_the_probe_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of several processes of ZeRO-3, that may use NCCL."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    stage = SimpleNamespace(is_zero3=lambda: True)
    known = "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref"
    monkeypatch.setattr(known, lambda: stage)
    for each in (ours.PROBE, trl_trainer.PROBE, liger.SWITCH.probe):
        each.check()
    assert is_deepspeed_zero3_enabled()


def reading(read: Callable[[Any, Any], None]) -> Any:
    """Return TRL's loss that reads something else besides."""

    def compute(self: Any, model: Any, inputs: Any) -> Any:
        read(self, inputs)
        return COMPUTE_LOSS(self, model, inputs)

    return compute


def larger_loss(self: Any, model: Any, inputs: Any) -> Any:
    return COMPUTE_LOSS(self, model, inputs) * 1.01


def with_items(self: Any, model: Any, inputs: Any, num_items: Any = None) -> Any:
    return COMPUTE_LOSS(self, model, inputs)


class OtherTrainer:
    """One that has little of TRL's."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any: ...


@dataclass
class OtherConfig:
    beta: float = 0.0
    loss_type: str = "dapo"


LOSS = functools.partial(put, trl.GRPOTrainer, "_compute_loss")
OF_THE_TRAINER: dict[str, tuple[Change, str]] = {
    "a parameter": (LOSS(with_items), r"_compute_loss: new parameter 'num_items=None'"),
    "attributes": (
        put(trl, "GRPOTrainer", OtherTrainer),
        r"trl.GRPOTrainer: no attribute 'use_adaptive_entropy'",
    ),
    "settings": (put(trl, "GRPOConfig", OtherConfig), r"trl.GRPOConfig: no parameter 'delta'"),
    "a new setting": (
        LOSS(reading(lambda trainer, inputs: trainer.args.length_penalty)),
        r"numbers could not be compared: AttributeError: .*'length_penalty'",
    ),
    "a new attribute": (
        LOSS(reading(lambda trainer, inputs: trainer.length_penalty)),
        r"numbers could not be compared: AttributeError: .*'length_penalty'",
    ),
    "a new input": (
        LOSS(reading(lambda trainer, inputs: inputs.get("group_sizes"))),
        r"_compute_loss, dapo: input 'group_sizes', which ours does not know",
    ),
    "numbers": (LOSS(larger_loss), r"_compute_loss, vespo: loss differs by"),
}


@pytest.mark.parametrize("name", OF_THE_TRAINER)
def test_a_trainer_of_trl_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = OF_THE_TRAINER[name]
    change(monkeypatch)
    with pytest.raises(ImportError, match=message) as error:
        trl_trainer.FusedGRPOTrainer("no-such-model")
    assert "a subclass of FusedGRPOTrainer with any_version = True" in str(error.value)
    assert not ours.SWITCH.on

    class Tried(trl_trainer.FusedGRPOTrainer):
        any_version = True

    built: list[Any] = []
    monkeypatch.setattr(BASE, "__init__", lambda self, model: built.append((model, ours.SWITCH.on)))
    with pytest.warns(RuntimeWarning, match=message):
        Tried("a model")
    assert built == [("a model", True)]


FORWARD, INIT = Theirs.forward, Theirs.__init__


def larger(self: Any, *args: Any, **kwargs: Any) -> Any:
    loss, metrics = FORWARD(self, *args, **kwargs)
    return loss * 1.01, metrics


larger.__signature__ = inspect.signature(FORWARD)
OF_LIGER: dict[str, tuple[Change, str]] = {
    "an added parameter": (
        put(Theirs, "forward", signature(FORWARD, sequence_mask=0)),
        r"LigerFusedLinearGRPOLoss.forward: new parameter 'sequence_mask=0'",
    ),
    "a removed setting": (
        put(Theirs, "__init__", signature(INIT, vespo_k_pos=None)),
        r"LigerFusedLinearGRPOLoss.__init__: no parameter 'vespo_k_pos'",
    ),
    "another default": (
        put(Theirs, "__init__", signature(INIT, beta=0.0)),
        r"__init__: expected parameter 'beta=0.04', got 'beta=0.0'",
    ),
    "other numbers": (put(Theirs, "forward", larger), r"GRPOLoss, cispo: loss differs by"),
}


@pytest.mark.parametrize("name", OF_LIGER)
def test_a_liger_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = OF_LIGER[name]
    change(monkeypatch)
    check_rejected(liger.SWITCH, message, 'pip install "liger-kernel==0.8.5.*"')
