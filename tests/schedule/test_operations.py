"""How many operations a step costs the host; each costs a launch on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from grpo_kernels import Bounded, LossConfig, TokenBatch, linear_logprobs, linear_policy_loss
from grpo_kernels.backends import kernel_packing
from grpo_kernels.batch import PACKERS, host
from grpo_kernels.schedule import Plan
from grpo_kernels.testing import make_problem

# these start no work on a device
FREE = ("view", "slice", "select", "expand", "detach", "alias", "as_strided", "unsqueeze")
FREE += ("squeeze", "t", "split", "unbind", "empty", "new_empty", "empty_like", "set_")
FREE += ("_unsafe_view", "lift_fresh")
FREE += ("zero_", "_local_scalar_dense")  # of a CPU's GEMMs, and of numbers that lie there


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher, and which of it would start work on a device.

    The names of the latter are appended to ``names``.
    """

    def __init__(self, names: list[str] | None = None) -> None:
        super().__init__()
        self.count = self.launches = 0
        self._names = [] if names is None else names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        name = func._schema.name.removeprefix("aten::")
        if name not in FREE:
            self.launches += 1
            self._names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend,most", [("chunked", 127), ("cpu", 60)])
def test_a_step_takes_few_operations(backend: str, most: int) -> None:
    problem = make_problem(4, 8, 16, 67, dtype=torch.float32)
    config = LossConfig(loss_type="dapo")
    with Operations() as batch:
        made = problem.batch(ref_logprobs=None, rollout_logprobs=None)
    with Operations() as loss:
        out = linear_policy_loss(problem.hidden, problem.weight, made, config, backend=backend)
        out.loss.backward()
    assert batch.count <= 43
    assert loss.count <= most


INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off"
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of Triton's kernels that are launched from now on, as on a GPU."""
    interpreter = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    names: list[str] = []

    def run(self: Any, *args: Any, **options: Any) -> Any:
        names.append(self.fn.__name__)
        with _disable_current_modes():  # the interpreter computes with torch operations
            return launch(self, *args, **options)

    launch = interpreter.run
    monkeypatch.setattr(interpreter, "run", run)
    monkeypatch.setitem(PACKERS, "cpu", kernel_packing)
    return names


@INTERPRETED
@pytest.mark.parametrize(
    "loss_type,most,operations", [("dapo", 26, 59), ("cispo", 26, 59), ("grpo", 35, 73)]
)
def test_a_step_on_a_gpu_launches_few_kernels(
    loss_type: str,
    most: int,
    operations: int,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count a batch, its loss and its backward, with a scaled loss and unread metrics."""
    monkeypatch.setattr(Plan, "leaves_out", False)  # as in a batch of this size on a GPU
    problem = make_problem(4, 8, 16, 67).to("cpu", torch.bfloat16)
    advantages, old = torch.randn(4), problem.logprobs["old_logprobs"].float()
    config, scale = LossConfig(loss_type=loss_type), torch.tensor(2.0)
    for _ in range(2):  # the first one traces the loss
        launched.clear()
        problem.hidden.grad = problem.weight.grad = None
        with Operations() as step:
            mask = problem.mask
            batch = TokenBatch.from_padded(problem.target, advantages, mask, old_logprobs=old)
            inputs = (problem.hidden, problem.weight, batch, config)
            (linear_policy_loss(*inputs, backend="triton").loss * scale).backward()
    gemms_outside_of_torch = 2  # those of both gradients: a CPU's are MKL's
    assert 4 <= len(launched) <= 8
    assert step.count <= operations
    assert step.launches + len(launched) + gemms_outside_of_torch <= most


@INTERPRETED
@pytest.mark.parametrize(
    "backward,chunks,kernels,most",
    [
        ("sparse", 1, 15, 108),
        (Bounded(exact_weight=False), 1, 18, 108),
        (Bounded(exact_weight=False), 4, 50, 160),
    ],
    ids=str,
)
def test_a_sparse_step_on_a_gpu_launches_few_kernels(
    backward: str | Bounded,
    chunks: int,
    kernels: int,
    most: int,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten kernels a chunk, repairs included; the rest, and the loss, once a step."""
    monkeypatch.setattr(Plan, "leaves_out", False)
    problem = make_problem(2, 6, 16, 670, bias=False).to("cpu", torch.bfloat16)
    advantages, old = torch.randn(2), problem.logprobs["old_logprobs"].float()
    options: dict[str, Any] = {"backend": "triton", "backward": backward}
    if chunks > 1:
        options["max_workspace_bytes"] = 3 * 670 * 2
    for _ in range(2):  # the first one traces the loss
        launched.clear()
        problem.hidden.grad = problem.weight.grad = None
        with Operations() as step:
            mask = torch.ones_like(problem.mask)
            batch = TokenBatch.from_padded(problem.target, advantages, mask, old_logprobs=old)
            inputs = (problem.hidden, problem.weight, batch, LossConfig())
            linear_policy_loss(*inputs, **options).loss.backward()
    assert launched.count("_mark_kernel") == chunks
    assert 10 < len(launched) <= kernels
    assert step.launches + len(launched) <= most


@INTERPRETED
@pytest.mark.parametrize("known,of_batch", [(False, 1), (True, 5)])
@pytest.mark.parametrize("padded", [False, True])
def test_few_launches_come_before_the_first_gemm(
    known: bool,
    of_batch: int,
    padded: bool,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU is idle until its first GEMM is launched. Known lengths are checked on the device."""
    problem = make_problem(4, 8, 16, 67, bias=False).to("cpu", torch.bfloat16)
    old = problem.logprobs["old_logprobs"].float()
    mask = problem.mask if padded else torch.ones_like(problem.mask)
    lengths = mask.sum(1).tolist() if known else None
    config = LossConfig()
    if known:
        monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    for _ in range(2):  # the first one traces the loss
        launched.clear()
        with Operations(launched):
            batch = TokenBatch.from_padded(
                problem.target, problem.advantages, mask, old_logprobs=old, lengths=lengths
            )
            of_loss = len(launched)
            linear_policy_loss(problem.hidden, problem.weight, batch, config, backend="triton")
    assert of_loss <= of_batch
    # the rows of padded hidden states, and the anchors
    before = launched[of_loss : launched.index("anchored_kernel")]
    assert before[-1] == "_target_logits_kernel" and before[:-1] in ([], ["index_select"])


def test_metrics_cost_nothing_until_they_are_read() -> None:
    problem = make_problem(dtype=torch.float32)
    out = linear_policy_loss(problem.hidden, problem.weight, problem.batch(), LossConfig(beta=0.1))
    with Operations() as first:
        dict(out.metrics)
    with Operations() as second:
        dict(out.metrics)
    assert first.count > second.count > 0


def test_no_wide_copy_of_the_weight_gradient() -> None:
    """Of many slices and one range of rows, each is written to the result at once."""
    seen = set()

    class Outputs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.update((x.dtype, x.shape) for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    x = make_problem(1, 13, vocab_size=40_000).to("cpu", torch.bfloat16)
    out = linear_logprobs(x.hidden, x.weight, x.target, backend="chunked")
    with Outputs():
        torch.autograd.grad(out.logprobs.sum(), (x.hidden, x.weight))
    assert (torch.bfloat16, x.weight.shape) in seen
    assert (torch.float32, x.weight.shape) not in seen
