"""What ``head_fn`` returns comes unchanged through what wraps a model and walks its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import operations
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from grpo_kernels import LossConfig, TokenBatch, linear_logprobs, linear_policy_loss
from grpo_kernels.head import Head
from grpo_kernels.hf import add_fused_head
from grpo_kernels.integrations import lazy_scorers
from grpo_kernels.integrations.lazy_scorers import LazyLogits
from tests.parity.accelerate_state import accelerate_state
from tests.support.tiny_models import tiny_model, tokens

IDS, MASK = tokens()


def of_loss(hidden: Tensor, head: Head) -> Any:
    batch = TokenBatch.from_padded(IDS[:, 1:], torch.tensor([1.0, -0.5]), MASK[:, 1:])
    return linear_policy_loss(hidden[:, :-1], head, batch, LossConfig())


def of_mapping(hidden: Tensor, head: Head) -> Any:
    found = linear_logprobs(hidden[:, :-1], head, IDS[:, 1:], outputs=("logprobs", "is_top1"))
    return {"outputs": found, "is_top1": found.is_top1}


HEADS: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "loss": (of_loss, lambda found: found.loss),
    "mapping": (of_mapping, lambda found: found["outputs"].logprobs.sum()),
}


def by_accelerate(model: Any) -> Any:
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def by_operations(model: Any) -> Any:
    def run(**inputs: Any) -> Any:
        found = operations.send_to_device(model(**inputs), torch.device("cpu"))
        return tree_map(lambda x: x, operations.convert_to_fp32(found))

    return run


def by_fsdp2(model: Any) -> Any:
    policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "accelerate, bf16": by_accelerate,
    "walks": by_operations,
    "ddp": DistributedDataParallel,
    "ddp, unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp, static": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "fsdp2": by_fsdp2,
}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with accelerate_state({}):
        yield
    dist.destroy_process_group()


def run(model: Any, call: Any, kind: str) -> tuple[Any, float]:
    fn, loss_of = HEADS[kind]
    found = call(input_ids=IDS, attention_mask=MASK, head_fn=fn).head
    loss_of(found).backward()
    norms = [x.grad.float().norm() for x in model.parameters() if x.grad is not None]
    return found, float(torch.stack(norms).norm())


@pytest.mark.filterwarnings("ignore")  # torch's, on FSDP1 and on parameters that are all used
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", HEADS)
def test_what_head_fn_returns(kind: str, wrapper: str) -> None:
    model, plain = tiny_model("qwen2"), tiny_model("qwen2")
    add_fused_head(model)
    add_fused_head(plain)
    with torch.autocast("cpu", torch.bfloat16) if "bf16" in wrapper else nullcontext():
        expected, expected_norm = run(plain, plain, kind)
    found, norm = run(model, WRAPPERS[wrapper](model), kind)
    assert type(found) is type(expected) and norm == pytest.approx(expected_norm)
    if kind == "loss":
        assert "stats" not in vars(found.metrics)  # nobody has computed them
        assert torch.equal(found.metrics.logprobs, expected.metrics.logprobs)
        found, expected = [(x.loss, dict(x.metrics)) for x in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def score(model: Any, call: Any) -> tuple[Tensor, float]:
    logits = call(input_ids=IDS, attention_mask=MASK).logits
    if isinstance(logits, LazyLogits):
        logp = logits[:, :-1].logprobs(IDS[:, 1:])
    else:
        logp = logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    logp.sum().backward()
    norms = [x.grad.float().norm() for x in model.parameters() if x.grad is not None]
    return logp.detach(), float(torch.stack(norms).norm())


@pytest.mark.filterwarnings("ignore:.*FSDP")
@pytest.mark.parametrize("wrapper", ["walks", "ddp", "ddp, static", "fsdp2", "ddp, unused"])
def test_logits_that_are_not_formed(wrapper: str) -> None:
    model, plain = tiny_model("qwen2"), tiny_model("qwen2")
    expected, expected_norm = score(plain, plain)
    if wrapper == "ddp, unused":  # it cannot see what is used by a score outside of the forward
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    lazy_scorers.defer_logits(model)
    wrapped = WRAPPERS[wrapper](model)
    if wrapper == "ddp, unused":
        with pytest.raises(RuntimeError, match="mark a variable ready only once"):
            score(model, wrapped)
        return
    found, norm = score(model, wrapped)
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
