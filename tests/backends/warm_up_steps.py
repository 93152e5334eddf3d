"""What warm_up and training steps would compile, in a process without ``TRITON_INTERPRET``.

``python -m tests.backends.warm_up_steps`` prints by case where they differ, see
:func:`differences`; ``FOLDER RANK`` after it runs one of two processes that warm up together, and
prints what each round of :func:`together` had compiled.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from triton.runtime.jit import JITFunction

from grpo_kernels import Head, LossConfig, TokenBatch, explain, linear_policy_loss, warm_up
from grpo_kernels.head import leading_dim
from tests.backends import fake_driver
from tests.net.cases import Case
from tests.net.problem import Problem, make_problem, trained_names
from tests.net.product import autocast, head_of, sampling_mask_of

ROWS = (1, 2, 3, 4, 5, 64, 1000)
_TILE_ROWS = 64
_PLAIN = Case(dtype="bfloat16", vocab=512, depth=64, packed=True)
_TIMEOUT = datetime.timedelta(seconds=60)  # no process waits longer for the other

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


def warm_up_for(case: Case, problem: Problem, head: Head, **options: Any) -> None:
    """Call warm_up as a training run would that takes such steps."""
    masks = () if problem.members is None else ("sampling_mask",)
    config = LossConfig(loss_type=case.loss_type, **case.settings)
    warm_up(head, config, inputs=(*problem.fields, *masks), backend="triton", **options)


def differences(case: Case, launched: fake_driver.Variants) -> dict[str, list[str]]:
    """Return by call the kernels that a step compiles after warm_up, and those of no step."""
    problem = posed(case, 4)
    head = head_of(case, problem)
    dtype = torch.bfloat16 if case.autocast else getattr(torch, case.dtype)
    names = ("precision", "batch_invariant", "schedule", "activation_bytes")
    options = {name: getattr(case, name) for name in names}
    with autocast(case):
        launched.clear()
        warm_up_for(case, problem, head, dtype=dtype, **options)
        unused, warm = dict(launched), set(launched)
        launched.clear()
        assert warm and all(x is None or x.grad is None for x in head.tensors)
        more = {}
        for call in _calls(case, head, dtype, options):
            more[call] = [launched[digest].name for digest in launched.keys() - warm]
            for digest in launched:
                unused.pop(digest, None)
            launched.clear()
    more["no step"] = [variant.name for variant in unused.values()]
    return {call: kernels for call, kernels in more.items() if kernels}


def _calls(case: Case, head: Head, dtype: torch.dtype, options: dict[str, Any]) -> Iterator[str]:
    """Run calls, and name each: every number of rows, schedule and size of a tile."""
    config = LossConfig(loss_type=case.loss_type, **case.settings)
    options = {**options, "backend": "triton"}
    for rows in ROWS:
        problem = posed(case, rows)
        batch = batch_of(problem)
        hidden = problem.leaves["hidden"].detach().to(dtype).requires_grad_()
        for size in (None, _TILE_ROWS * case.vocab * 4):
            sized = {**options, "max_workspace_bytes": size}
            plan = explain(hidden, head, batch, config, **sized)
            schedules = ["two_pass"] if plan.why_two_passes else ["one_pass", "two_pass"]
            if case.schedule != "auto":
                schedules = [case.schedule]
            for schedule in schedules:
                call = sized | {"schedule": schedule}
                linear_policy_loss(hidden, head, batch, config, **call).loss.backward()
                yield f"{rows} rows, {schedule}, {size} bytes"
        with torch.no_grad():
            linear_policy_loss(hidden, head, batch, config, **options)
        yield f"{rows} rows without a gradient"


def together(folder: str, rank: int) -> list[dict[str, Any]]:
    """Warm up two kernels twice, the first time with a compiler that fails in the first process."""
    store = dist.FileStore(f"{folder}/store", 2)
    store.set_timeout(_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    problem, rounds = posed(_PLAIN, 4), []
    head = head_of(_PLAIN, problem)
    asked = fake_driver.install_compiler()
    broken = mock.patch.object(JITFunction, "_do_compile", side_effect=RuntimeError("no compiler"))
    for name, patched in (("fails", broken if rank == 0 else None), ("works", None)):
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/{name}"
        error = None
        with patched or contextlib.nullcontext():
            try:
                warm_up_for(_PLAIN, problem, head, group=dist.group.WORLD, gradients=False)
            except Exception as caught:
                error = str(caught)
        rounds.append({"compiled": asked.compiled[:], "found": asked.found[:], "error": error})
        asked.compiled.clear()
        asked.found.clear()
        # a process that fails lives on, so that the other is not told
        store.set(f"{name}{rank}", "")
        store.wait([f"{name}0", f"{name}1"])
    return rounds


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["LOCAL_RANK"] = sys.argv[2]
        print(json.dumps(together(sys.argv[1], int(sys.argv[2]))))
    else:
        variants = fake_driver.install()
        for module in ("chunked_loop", "gradients"):  # rows of a tile as on a GPU
            place = sys.modules[f"grpo_kernels.engine.{module}"]
            place.leading_dim = lambda columns, dtype, _: leading_dim(
                columns, dtype, torch.device("cuda")
            )
        print(json.dumps({name: differences(case, variants) for name, case in CASES.items()}))
