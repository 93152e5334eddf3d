"""A host that differs from what an adapter needs is rejected, and the difference is named."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels.common import hosts
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


def like(function: Any, call: Any = None, **changes: Any) -> Any:
    """Return a function with other parameters: a default, a new name, or None to drop one."""
    parameters = dict(inspect.signature(function).parameters)
    for name, change in changes.items():
        if isinstance(change, str):
            parameters = {(change if x == name else x): y for x, y in parameters.items()}
        elif change is None:
            del parameters[name]
        else:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters[name] = inspect.Parameter(name, kind, default=change)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return (call or function)(*args, **kwargs)

    changed.__signature__ = inspect.Signature([x.replace(name=y) for y, x in parameters.items()])
    return changed


def larger(function: Any) -> Any:
    """Return a function that multiplies what it returns, or the first of several, by 1.01."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01

    return like(function, call)


def reordered(model, outputs=("log_probs",), temperature=1.0, cast_lm_head_to_fp32=False): ...


def warmer(model: Any, temperature: float = 1.0, *args: Any, **kwargs: Any) -> None:
    ADD(model, temperature * 1.01, *args, **kwargs)


def fails(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("0 active drivers")


FIELDS = [(field.name, Any, None) for field in fields(utils.FusedCausalLMOutput)]
WITHOUT_TOP1 = [field for field in FIELDS if field[0] != "is_top1"]
WITH_RANKS = [*FIELDS, ("rank", Any, None)]
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
        put(utils, "add_fused_lm_head", like(ADD, top_k=3)),
        r"add_fused_lm_head: new parameter 'top_k=3', which ours does not know",
    ),
    "a removed parameter": (
        put(utils, "add_fused_lm_head", like(ADD, outputs=None)),
        r"add_fused_lm_head: no parameter 'outputs'",
    ),
    "a renamed parameter": (
        put(utils, "add_fused_lm_head", like(ADD, temperature="tau")),
        r"new parameter 'tau=1.0', .*\n.*add_fused_lm_head: no parameter 'temperature'",
    ),
    "another default": (
        put(utils, "add_fused_lm_head", like(ADD, temperature=2.0)),
        r"expected parameter 'temperature=1.0', got 'temperature=2.0'",
    ),
    "another order": (
        put(utils, "add_fused_lm_head", reordered),
        r"expected parameters in the order of model, temperature, .* got model, outputs",
    ),
    "a parameter of distillation": (
        put(distillation_trainer, "_chunked_divergence_loss", like(DIVERGENCE, beta=None)),
        r"_chunked_divergence_loss: no parameter 'beta'",
    ),
    "an output less": (
        put(utils, "FusedCausalLMOutput", make_dataclass("Less", WITHOUT_TOP1)),
        r"FusedCausalLMOutput: no parameter 'is_top1'",
    ),
    "an output more": (
        put(utils, "FusedCausalLMOutput", make_dataclass("More", WITH_RANKS)),
        r"FusedCausalLMOutput: new parameter 'rank=None'",
    ),
    "other numbers": (
        put(utils, "add_fused_lm_head", like(ADD, warmer)),
        r"add_fused_lm_head: log_probs differs by 0\.\d+ from ours \(allowed 0.00\d+\)",
    ),
    "other numbers of distillation": (
        put(distillation_trainer, "_chunked_divergence_loss", larger(DIVERGENCE)),
        r"_chunked_divergence_loss, beta 0.3: gradient of weight differs by",
    ),
    "not on a CPU": (
        put(utils, "add_fused_lm_head", like(ADD, fails)),
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
    changed = like(ADD, top_k=3, outputs=None)
    monkeypatch.setattr(utils, "add_fused_lm_head", changed)
    monkeypatch.delattr(grpo_trainer, "add_fused_lm_head")
    with pytest.raises(ImportError) as error:
        ours.enable()
    listed = [line for line in str(error.value).splitlines() if line.startswith("  * ")]
    assert len(listed) == 3


def test_a_module_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    with pytest.raises(ImportError, match=r"\* trl.trainer.utils.add_fused_lm_head: missing \("):
        ours.enable()


def test_nothing_is_left_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "add_fused_lm_head")
    monkeypatch.delattr(distillation_trainer, "_chunked_divergence_loss")
    with (
        pytest.warns(RuntimeWarning, match="add_fused_lm_head: missing"),
        pytest.raises(ImportError, match="trl: found nothing in it that we could replace"),
    ):
        ours.enable(any_version=True)
    assert not ours.SWITCH.on


def test_a_newer_trl_that_is_the_same(monkeypatch, caplog) -> None:
    compared = []
    compare = lambda: compared.append(1) or ours.PROBE.compare()  # noqa: E731
    switch = Switch(replace(ours.PROBE, compare=compare))
    monkeypatch.setattr(hosts, "version", lambda name: "1.19.0")
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with switch.enabled():
                assert utils.add_fused_lm_head is ours.add_fused_lm_head
    said = [record.getMessage() for record in caplog.records if "trl" in record.getMessage()]
    assert (
        len(said) == 1
        and "trl 1.19.0 was not tested (tested: 1.16), but the probe passed" in said[0]
    )
    assert compared == [1]  # once per version
    monkeypatch.setattr(hosts, "version", lambda name: "1.18.0")
    with switch.enabled():
        pass
    assert compared == [1, 1]


PROBES = (ours.PROBE, trl_trainer.PROBE, liger.SWITCH.probe)


def test_the_probe_leaves_the_state_of_torch_alone() -> None:
    torch.set_default_dtype(torch.float64)
    before = torch.random.get_rng_state()
    try:
        with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            for each in PROBES:
                each.check()
                assert torch.get_default_dtype() == torch.float64
            assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
            assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)


MODES = {
    "fake tensors": FakeTensorMode,
    "counted operations": functools.partial(FlopCounterMode, display=False),
    "empty weights": accelerate.init_empty_weights,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_do_not_disturb_the_numbers(mode: str) -> None:
    with MODES[mode]():
        for each in PROBES:
            each.check()


def test_a_compiled_function_may_probe() -> None:
    def build(x: torch.Tensor) -> torch.Tensor:
        for each in PROBES:
            each.check()
        return x + 1

    torch.compile(build, backend="eager")(torch.ones(2))


def test_a_warning_of_a_host_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*args: Any, **kwargs: Any) -> None:
        warnings.warn("it is going to change", DeprecationWarning, stacklevel=2)
        ADD(*args, **kwargs)

    monkeypatch.setattr(utils, "add_fused_lm_head", like(ADD, warned))
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
    for each in PROBES:
        each.check()
    assert is_deepspeed_zero3_enabled()


def reading(read: Callable[[Any, Any], None]) -> Any:
    """Return TRL's loss that reads something else besides."""

    def compute(self: Any, model: Any, inputs: Any) -> Any:
        read(self, inputs)
        return COMPUTE_LOSS(self, model, inputs)

    return compute


def with_items(self: Any, model: Any, inputs: Any, num_items: Any = None) -> Any:
    return COMPUTE_LOSS(self, model, inputs)


class OtherTrainer:
    def _compute_loss(self, model: Any, inputs: Any) -> Any: ...


LOSS = functools.partial(put, trl.GRPOTrainer, "_compute_loss")
OF_THE_TRAINER: dict[str, tuple[Change, str]] = {
    "a parameter": (LOSS(with_items), r"_compute_loss: new parameter 'num_items=None'"),
    "attributes": (
        put(trl, "GRPOTrainer", OtherTrainer),
        r"trl.GRPOTrainer: no attribute 'use_adaptive_entropy'",
    ),
    "settings": (
        put(trl, "GRPOConfig", make_dataclass("Config", ["beta", "loss_type"])),
        r"trl.GRPOConfig: no parameter 'delta'",
    ),
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
        r"_compute_loss, dapo: unknown input 'group_sizes'",
    ),
    "numbers": (LOSS(larger(COMPUTE_LOSS)), r"_compute_loss, vespo: loss differs by"),
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


OF_LIGER: dict[str, tuple[Change, str]] = {
    "an added parameter": (
        put(Theirs, "forward", like(FORWARD, sequence_mask=0)),
        r"LigerFusedLinearGRPOLoss.forward: new parameter 'sequence_mask=0'",
    ),
    "a removed setting": (
        put(Theirs, "__init__", like(INIT, vespo_k_pos=None)),
        r"LigerFusedLinearGRPOLoss.__init__: no parameter 'vespo_k_pos'",
    ),
    "another default": (
        put(Theirs, "__init__", like(INIT, beta=0.0)),
        r"__init__: expected parameter 'beta=0.04', got 'beta=0.0'",
    ),
    "other numbers": (put(Theirs, "forward", larger(FORWARD)), r"GRPOLoss, cispo: loss differs by"),
}


@pytest.mark.parametrize("name", OF_LIGER)
def test_a_liger_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = OF_LIGER[name]
    change(monkeypatch)
    check_rejected(liger.SWITCH, message, 'pip install "liger-kernel==0.8.5.*"')
