"""torchtitan's RL losses in its chunked wrapper and ours at the head train alike."""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import sys
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.integrations.contract import Adapter, Run, assert_passed, cases, contract_of
from tests.integrations.hosts import need
from tests.sharded.ranks import run_on_ranks

need("torchtitan")

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common.linear import Linear

from grpo_kernels.integrations import torchtitan as ours

STEPS, B, L, D, V = 6, 3, 8, 16, 61


def their_losses() -> ModuleType:
    """Import the losses without their neighbours, which need vLLM."""
    name = "torchtitan.experiments.rl"
    if name not in sys.modules:
        spec = importlib.util.find_spec("torchtitan.experiments")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        package = ModuleType(name)
        package.__path__ = [f"{next(iter(spec.submodule_search_locations))}/rl"]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    return importlib.import_module(f"{name}.losses")


class Model(nn.Module):
    """What torchtitan's decoders are to a chunked loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.norm = nn.RMSNorm(D)
        self.lm_head = Linear(Linear.Config(in_features=D, out_features=V))

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.embedding(ids) + torch.tanh(self.layer(self.embedding(ids))))


CONFIGS: dict[str, dict[str, float]] = {
    "GRPOLoss": {"clip_eps": 0.1},
    "DAPOLoss": {"ratio_clip_low": 0.1, "ratio_clip_high": 0.28},
}


def loss_of(name: str, own: bool) -> Any:
    if own:
        return getattr(ours, name).Config(**CONFIGS[name]).build()
    theirs = getattr(their_losses(), name).Config(**CONFIGS[name])
    return ChunkedLossWrapper.Config(num_chunks=4, loss_fn=theirs).build()


def inputs(seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (B, L), generator=g)
    sampled = torch.randn(B, L, generator=g) * 0.5 - 4
    sampled[1, 4] = -torch.inf
    mask = torch.arange(L) < torch.tensor([[L], [6], [0]])
    advantages = torch.randn(B, L, generator=g) * mask
    labels = ids.roll(-1, 1)
    return ids, labels, {
        "generator_logprobs": sampled, "advantages": advantages, "loss_mask": mask,
    }  # fmt: skip


def step(
    with_ours: bool, name: str, sharded: bool = False, dtype: torch.dtype | None = None
) -> Run:
    model, loss_fn = Model(), loss_of(name, with_ours)
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard([model.norm, model.lm_head], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    loss_fn.set_lm_head(model.lm_head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    log = []
    for number in range(STEPS):
        ids, labels, given = inputs(number + 100 * (dist.get_rank() if sharded else 0))
        loss, metrics = loss_fn(model(ids), labels, 17, **given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append({"loss": loss.item(), **{n: x.item() for n, x in metrics.items()}})
    weights = {n: x.full_tensor() if sharded else x for n, x in model.state_dict().items()}
    return Run(log, copy.deepcopy(weights))


def call(drop: str = "", on: bool = True) -> None:
    ids, labels, given = inputs(0)
    model, loss_fn = Model(), loss_of("GRPOLoss", True)
    if on:
        loss_fn.set_lm_head(model.lm_head)
    given.pop(drop, None)
    loss_fn(model(ids), labels, **given)


def set_wrapped() -> None:
    wrapped = Linear(Linear.Config(in_features=D, out_features=V))
    wrapped.forward = wrapped.forward  # as torchtitan's tensor parallelism does
    loss_of("GRPOLoss", True).set_lm_head(wrapped)


def another_interface() -> None:
    """Import ours where the wrapper's call takes one more argument."""

    def call(self, pred, labels, global_valid_tokens=None, scale=1.0, **loss_inputs): ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedLossWrapper, "__call__", call)
        importlib.reload(ours)


ALONE = Adapter(
    package="torchtitan",
    step=step,
    settings={name: {"name": name} for name in CONFIGS},
    refused={
        "lm_head: expected set_lm_head": partial(call, on=False),
        "expected generator_logprobs, advantages, loss_mask, got": partial(call, "advantages"),
        "forward": set_wrapped,
        "no attribute 'PPOLoss'": lambda: ours.PPOLoss,
        r"ChunkedLossWrapper.__call__: new parameter 'scale=1.0', which": another_interface,
    },
)
SHARDED = Adapter(
    package="torchtitan",
    step=partial(step, sharded=True),
    settings=ALONE.settings,
    default={"dtype": torch.bfloat16},
)
test_contract = contract_of(ALONE)


def test_sharded() -> None:
    assert_passed(run_on_ranks(partial(cases, SHARDED), 2))


@pytest.mark.parametrize("name", CONFIGS)
def test_in_the_trainers_eyes(name: str) -> None:
    assert isinstance(loss_of(name, True), ChunkedLossWrapper)  # so it skips its own head
    theirs = getattr(their_losses(), name)
    mine, own = ({x.name for x in fields(kind.Config)} for kind in (getattr(ours, name), theirs))
    assert mine == own
