"""``grpo-kernels doctor``: which other trainers are here, and whether ours agrees with their own.

A trial takes one step of a small problem through the function that an adapter replaces, with the
host's own and with ours.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.head import Head
from grpo_kernels.linear_policy_loss import linear_policy_loss
from grpo_kernels.losses import LossConfig, PolicyLossOutput
from grpo_kernels.testing import relative_error

_ROWS, _LENGTH, _HIDDEN, _VOCABULARY, _TEMPERATURE = 8, 64, 64, 32_000, 0.7
_ROUNDS = 3
_ALLOWED = 1e-4  # relative to the largest element; both sides compute in fp32
_ALLOWED_IN_BF16 = 0.01  # of trials in the precision that the host has by default
_IN_BF16 = ("trl",)

Step = Callable[[], list[Tensor]]  # the loss, then the gradients


@dataclass(frozen=True)
class Side:
    """What a step takes."""

    seconds: float
    grown: int | None  # bytes by which memory grows at its peak; None: not known here


@dataclass(frozen=True)
class Trial:
    """A step by the host's own path, and by ours."""

    error: float
    allowed: float
    theirs: Side
    ours: Side

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Finding:
    """One host."""

    host: str  # a module of `grpo_kernels.integrations`
    version: str | None  # None: not installed
    tested: tuple[str, ...]
    on: bool | None  # whether ours is in place in this process; None: nothing is replaced
    trial: Trial | None = None
    failure: str | None = None  # of a trial
    note: str = ""  # why there is no trial

    @property
    def ok(self) -> bool:
        return self.failure is None and (self.trial is None or self.trial.ok)


def findings() -> Iterator[Finding]:
    """Look at every host, one after the other."""
    for name, make in HOSTS.items():
        yield _finding(name, make)


def _finding(name: str, make: Callable[[], Step] | str) -> Finding:
    adapter = import_module(f"grpo_kernels.integrations.{name}")
    switch = getattr(adapter, "SWITCH", None)
    host = adapter.HOST if switch is None else switch.host
    facts: dict[str, Any] = {"tested": host.tested, "on": None if switch is None else switch.on}
    try:
        facts["version"] = version(host.package)
        host.check(any_version=False)
    except PackageNotFoundError:
        return Finding(name, None, **facts)
    except ImportError as error:
        return Finding(name, **facts, note=str(error))
    if isinstance(make, str):
        return Finding(name, **facts, note=make)
    if facts["on"]:
        return Finding(name, **facts, note="no trial: theirs has been replaced")
    try:
        allowed = _ALLOWED_IN_BF16 if name in _IN_BF16 else _ALLOWED
        return Finding(name, **facts, trial=_trial(make, adapter, allowed))
    except Exception as error:  # it is what the user has to report
        return Finding(name, **facts, failure=f"{type(error).__name__}: {error}")


def _trial(make: Callable[[], Step], adapter: Any, allowed: float) -> Trial:
    # theirs last: of some hosts what exists with it keeps ours from being switched on
    found, sides = [], []
    for on in (True, False):
        with adapter.enabled() if on else nullcontext():
            step = make()
            found.append(step())
            sides.append(_measured(step))
    error = max(relative_error(a, b) for a, b in zip(*found, strict=True))
    return Trial(error, allowed, theirs=sides[1], ours=sides[0])


def _measured(step: Step) -> Side:
    _give_back()
    before, seconds = _memory(reset=True), []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = _memory(reset=False)
    return Side(median(seconds), None if before is None or peak is None else peak - before)


def _give_back() -> None:
    """Return freed memory to the system, which else the next step grows into unseen."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _memory(reset: bool) -> int | None:
    """Return the bytes in use and forget their peak, or return their peak."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() if reset else torch.cuda.max_memory_allocated()
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    field = "VmRSS:" if reset else "VmHWM:"
    return next((1024 * int(x.split()[1]) for x in lines if x.startswith(field)), None)


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Make hidden states, a weight and ids."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _LENGTH, _HIDDEN, generator=g)
    weight = torch.randn(_VOCABULARY, _HIDDEN, generator=g)
    ids = torch.randint(_VOCABULARY, (_ROWS, _LENGTH), generator=g)
    return (*(x.to(device).requires_grad_() for x in (hidden, weight)), ids.to(device))  # type: ignore[return-value]


def _backward(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def _model() -> tuple[Any, Tensor]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    _, _, ids = _tensors()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=_VOCABULARY, hidden_size=_HIDDEN, intermediate_size=_HIDDEN,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        return Qwen2ForCausalLM(config).to(ids.device), ids


def _trl() -> Step:
    """Score labels, and take the loss of GRPO, in the forward of a model that accelerate wraps."""
    accelerate = import_module("accelerate")
    model, ids = _model()
    # by TRL's own name, which is what is replaced
    import_module("trl.trainer.utils").add_fused_lm_head(model, temperature=_TEMPERATURE)
    leaves = [model.lm_head.weight, model.model.norm.weight]
    on_cpu = not torch.cuda.is_available()
    wrapped = accelerate.Accelerator(mixed_precision="bf16", cpu=on_cpu).prepare(model)
    advantages = torch.linspace(-0.7, 1.7, _ROWS, device=ids.device)
    batch = TokenBatch.from_padded(ids[:, 1:], advantages)
    config = LossConfig(loss_type="bnpo", temperature=_TEMPERATURE)

    def fused(hidden: Tensor, head: Head) -> PolicyLossOutput:
        return linear_policy_loss(hidden[:, :-1], head, batch, config)

    def step() -> list[Tensor]:
        found = wrapped(input_ids=ids, labels=ids, fused_lm_head=True)
        if import_module("grpo_kernels.integrations.trl").SWITCH.on:
            loss = wrapped(input_ids=ids, head_fn=fused).head.loss
        else:
            ratio = (found.log_probs - found.log_probs.detach()).exp()
            loss = -(advantages[:, None] * ratio).mean()
        return _backward(found.loss + loss, leaves)

    return step


def _liger() -> Step:
    hidden, weight, ids = _tensors()
    module = import_module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss
    loss_fn = module(temperature=_TEMPERATURE, beta=0.0, use_ref_model=False, compiled=False)
    advantages = torch.linspace(-0.7, 1.7, _ROWS, device=ids.device)

    def step() -> list[Tensor]:
        loss, _ = loss_fn(hidden, weight, ids, torch.ones_like(ids), advantages)
        return _backward(loss, [hidden, weight])

    return step


def _verl() -> Step:
    hidden, weight, ids = _tensors()
    scores = import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()

    def step() -> list[Tensor]:
        logprobs, entropy = scores(hidden, weight, ids, _TEMPERATURE)
        return _backward((logprobs + 0.1 * entropy).mean(), [hidden, weight])

    return step


_NEEDS_RANKS = "no trial: its function works on process groups"
# what each replaces, or why there is no trial
HOSTS: dict[str, Callable[[], Step] | str] = {
    "trl": _trl,
    "liger": _liger,
    "verl": _verl,
    "torchtitan": "no trial: its config names our losses, nothing is replaced",
    "axolotl": "no trial: its config names our plugin, nothing is replaced before",
    "ms_swift": "no trial: its trainer calls Liger's module",
    "prime_rl": "no trial: its head is a part of its models",
    "nemo_rl": _NEEDS_RANKS,
    "skyrl": _NEEDS_RANKS,
}
