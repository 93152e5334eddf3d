"""What warm_up and training steps would compile: ``python -m tests.backends.warm_up_steps``

prints a JSON object by case, in a process without ``TRITON_INTERPRET``; see :class:`Found`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import (
    Head,
    HeadLoRA,
    LossConfig,
    SamplingMask,
    TokenBatch,
    Transform,
    explain,
    linear_policy_loss,
    warm_up,
)
from grpo_kernels.head import leading_dim
from tests.backends import fake_driver

ROWS = (1, 2, 3, 4, 5, 64, 1000)
_TILE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A head, a loss and what its batches have."""

    dtype: torch.dtype = torch.bfloat16
    columns: int = 512
    depth: int = 64
    loss: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("old_logprobs",)
    frozen: bool = False
    bias: bool = False
    lora: bool = False
    softcap: float | None = None
    master: torch.dtype | None = None  # of the weight, under autocast
    options: dict[str, Any] = field(default_factory=dict)

    def head(self) -> Head:
        dtype = self.master or self.dtype

        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape).to(dtype).requires_grad_(not self.frozen)

        lora = HeadLoRA(a=leaf(4, self.depth), b=leaf(self.columns, 4)) if self.lora else None
        bias = leaf(self.columns) if self.bias else None
        transform = Transform(softcap=self.softcap)
        return Head(leaf(self.columns, self.depth), bias, transform, lora)

    def batch(self, rows: int) -> TokenBatch:
        """Return sequences of up to three tokens, of which every third has no advantage."""
        lengths = [min(3, rows - start) for start in range(0, rows, 3)]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        advantages = torch.randn(len(lengths))
        advantages[2::3] = 0.0
        given: dict[str, Any] = {
            name: -torch.rand(rows) for name in self.inputs if name != "sampling_mask"
        }
        target = torch.randint(self.columns, (rows,))
        if "sampling_mask" in self.inputs:
            given["sampling_mask"] = SamplingMask.from_padded(target[:, None])
        active = [n if advantages[i] else 0 for i, n in enumerate(lengths)]
        return TokenBatch.from_packed(
            target, advantages, bounds, lengths=lengths, active_lengths=active, **given
        )


CASES = {
    "plain": Case(),
    "on policy": Case(inputs=()),
    "penalty": Case(loss={"beta": 0.1}, inputs=("old_logprobs", "ref_logprobs")),
    "entropy": Case(loss={"entropy_coef": 0.01}),
    "sequences": Case(loss={"loss_type": "gspo"}),
    "correction": Case(inputs=("old_logprobs", "rollout_logprobs")),
    "gate": Case(loss={"top_entropy_quantile": 0.2}),
    "fp16": Case(dtype=torch.float16),
    "fp32": Case(dtype=torch.float32),
    "input": Case(options={"precision": "input"}),
    "masks": Case(inputs=("old_logprobs", "sampling_mask")),
    "lora": Case(lora=True, bias=True),
    "frozen": Case(frozen=True, softcap=20.0),
    "autocast": Case(master=torch.float32),
    "invariant": Case(options={"batch_invariant": True}),
    "odd": Case(columns=5003, depth=56),
    "unaligned": Case(columns=1001, depth=61),
    "two passes": Case(options={"schedule": "two_pass"}),
    "one pass": Case(options={"schedule": "one_pass"}),
    "kept logits": Case(bias=True, options={"activation_bytes": 1 << 30}),
    "nothing kept": Case(frozen=True, options={"activation_bytes": 0}),
}


@dataclass
class Found:
    """Where warm_up and the steps after it differ."""

    missing: dict[str, list[str]]  # by call: kernels that a step compiles after warm_up
    unused: dict[str, int]  # compiled by warm_up for no step


def run(case: Case, found: fake_driver.Variants) -> Found:
    torch.manual_seed(0)
    head, config = case.head(), LossConfig(**case.loss)
    options = {"backend": "triton", **case.options}
    with torch.autocast("cpu", case.dtype, enabled=case.master is not None):
        found.clear()
        warm_up(head, config, dtype=case.dtype, inputs=case.inputs, **options)
        warm = dict(found)
        assert warm and all(x is None or x.grad is None for x in head.tensors)
        launched: fake_driver.Variants = {}
        missing = {}
        for call, variants in _calls(case, head, config, options, found):
            more = [name for digest, name in variants.items() if digest not in warm]
            if more:
                missing[call] = more
            launched |= variants
    unused = Counter(name for digest, name in warm.items() if digest not in launched)
    return Found(missing, dict(unused))


def _calls(
    case: Case,
    head: Head,
    config: LossConfig,
    options: dict[str, Any],
    found: fake_driver.Variants,
) -> Iterator[tuple[str, fake_driver.Variants]]:
    """Yield calls and what each launches: every number of rows, schedule and size of a tile."""
    sizes = (None, _TILE_ROWS * case.columns * 4)
    for rows in ROWS:
        batch = case.batch(rows)
        hidden = torch.randn(rows, case.depth).to(case.dtype).requires_grad_()
        for size in sizes:
            asked = {**options, "max_workspace_bytes": size}
            plan = explain(hidden, head, batch, config, **asked)
            schedules = {"two_pass"} if plan.why_two_passes else {"one_pass", "two_pass"}
            if options.get("schedule", "auto") != "auto":
                schedules = {options["schedule"]}
            for schedule in sorted(schedules):
                found.clear()
                asked["schedule"] = schedule
                linear_policy_loss(hidden, head, batch, config, **asked).loss.backward()
                yield f"{rows} rows, {schedule}, {size} bytes", dict(found)
        found.clear()
        with torch.no_grad():
            linear_policy_loss(hidden, head, batch, config, **options)
        yield f"{rows} rows without a gradient", dict(found)


if __name__ == "__main__":
    variants = fake_driver.install()
    for module in ("chunked_loop", "gradients"):  # rows of a tile as on a GPU, of tensors on a CPU
        place = sys.modules[f"grpo_kernels.engine.{module}"]
        place.leading_dim = lambda columns, dtype, _: leading_dim(
            columns, dtype, torch.device("cuda")
        )
    results = {name: run(case, variants) for name, case in CASES.items()}
    print(json.dumps({name: dataclasses.asdict(each) for name, each in results.items()}))
