"""What warm_up and training steps would compile: ``python -m tests.backends.warm_up_steps``

prints a JSON object by case, in a process without ``TRITON_INTERPRET``; see :class:`Found`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_kernels import Head, LossConfig, TokenBatch, explain, linear_policy_loss, warm_up
from grpo_kernels.head import leading_dim
from tests.backends import fake_driver
from tests.net.cases import Case
from tests.net.problem import Problem, make_problem, trained_names
from tests.net.product import autocast, head_of, sampling_mask_of

ROWS = (1, 2, 3, 4, 5, 64, 1000)
_TILE_ROWS = 64
_PLAIN = Case(dtype="bfloat16", vocab=512, depth=64, packed=True)

CASES = {
    "plain": _PLAIN,
    "on policy": replace(_PLAIN, drift="none"),
    "penalty": replace(_PLAIN, settings={"beta": 0.1}),
    "entropy": replace(_PLAIN, settings={"entropy_coef": 0.01}),
    "sequences": replace(_PLAIN, loss_type="gspo"),
    "correction": replace(_PLAIN, rollout="given"),
    "gate": replace(_PLAIN, settings={"top_entropy_quantile": 0.2}),
    "fp16": replace(_PLAIN, dtype="float16"),
    "fp32": replace(_PLAIN, dtype="float32"),
    "input": replace(_PLAIN, precision="input"),
    "masks": replace(_PLAIN, sampling_mask=True),
    "lora": replace(_PLAIN, lora=4, bias=True),
    "frozen": replace(_PLAIN, trained="hidden", softcap=20.0),
    "autocast": replace(_PLAIN, dtype="float32", autocast=True),
    "invariant": replace(_PLAIN, batch_invariant=True),
    "odd": replace(_PLAIN, vocab=5003, depth=56),
    "unaligned": replace(_PLAIN, vocab=1001, depth=61),
    "two passes": replace(_PLAIN, schedule="two_pass"),
    "one pass": replace(_PLAIN, schedule="one_pass"),
    "kept logits": replace(_PLAIN, bias=True, activation_bytes=1 << 30),
    "nothing kept": replace(_PLAIN, trained="hidden", activation_bytes=0),
}


@dataclass
class Found:
    """Where warm_up and the steps after it differ."""

    missing: dict[str, list[str]]  # by call: kernels that a step compiles after warm_up
    unused: dict[str, int]  # compiled by warm_up for no step


def posed(case: Case, rows: int) -> Problem:
    """Return the problem of sequences of up to three tokens; every third has no advantage."""
    lengths = tuple(min(3, rows - start) for start in range(0, rows, 3))
    problem = make_problem(replace(case, lengths=lengths)).posed(trained_names(case))
    problem.advantages[2::3] = 0.0
    return problem


def batch_of(problem: Problem) -> TokenBatch:
    """Return the batch of all tokens, built without a mask, with lengths that the host knows."""
    lengths = problem.cu_seqlens.diff()
    return TokenBatch.from_packed(
        problem.target,
        problem.advantages,
        problem.cu_seqlens,
        lengths=lengths.tolist(),
        active_lengths=(lengths * (problem.advantages != 0)).tolist(),
        sampling_mask=sampling_mask_of(problem.members),
        **problem.fields,
    )


def inputs_of(problem: Problem) -> tuple[str, ...]:
    """Return what the batches have."""
    masks = () if problem.members is None else ("sampling_mask",)
    return (*problem.fields, *masks)


def dtype_of(case: Case) -> torch.dtype:
    """Return the dtype of the hidden states."""
    return torch.bfloat16 if case.autocast else getattr(torch, case.dtype)


def options_of(case: Case) -> dict[str, Any]:
    names = ("precision", "batch_invariant", "schedule", "activation_bytes")
    return {"backend": "triton", **{name: getattr(case, name) for name in names}}


def run(case: Case, found: fake_driver.Variants) -> Found:
    problem, config = posed(case, 4), LossConfig(loss_type=case.loss_type, **case.settings)
    head = head_of(case, problem)
    with autocast(case):
        found.clear()
        inputs = inputs_of(problem)
        warm_up(head, config, dtype=dtype_of(case), inputs=inputs, **options_of(case))
        warm = dict(found)
        assert warm and all(x is None or x.grad is None for x in head.tensors)
        launched: fake_driver.Variants = {}
        missing = {}
        for call, variants in _calls(case, head, config, found):
            more = [x.name for digest, x in variants.items() if digest not in warm]
            if more:
                missing[call] = more
            launched |= variants
    unused = Counter(x.name for digest, x in warm.items() if digest not in launched)
    return Found(missing, dict(unused))


def _calls(
    case: Case, head: Head, config: LossConfig, found: fake_driver.Variants
) -> Iterator[tuple[str, fake_driver.Variants]]:
    """Yield calls and what each launches: every number of rows, schedule and size of a tile."""
    options = options_of(case)
    for rows in ROWS:
        problem = posed(case, rows)
        batch = batch_of(problem)
        hidden = problem.leaves["hidden"].detach().to(dtype_of(case)).requires_grad_()
        for size in (None, _TILE_ROWS * case.vocab * 4):
            asked = {**options, "max_workspace_bytes": size}
            plan = explain(hidden, head, batch, config, **asked)
            schedules = {"two_pass"} if plan.why_two_passes else {"one_pass", "two_pass"}
            if case.schedule != "auto":
                schedules = {case.schedule}
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
