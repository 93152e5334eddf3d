"""Optimizers with small states, by real bitsandbytes and torchao, and weights rounded at random."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao.optim import AdamW8bit
from torchao.optim.adam import _AdamW
from torchao.optim.cpu_offload import CPUOffloadOptimizer
from transformers import Adafactor, BitsAndBytesConfig, PreTrainedModel

from grpo_trainer import GRPOConfig
from grpo_trainer.demo.policy import make_policy, make_tokenizer, write_policy
from grpo_trainer.policy import WHOLE, check_optimizer
from tests.support.trainer import CannedEngine, parameters, rows_reward

ROUNDED = "bf16_stochastic_round=True"
STEPS = 6
VOCABULARY = 128  # whose embeddings are no small tensor
# optim: how far it may be from AdamW, as a share of how far AdamW has gone
BOUNDS = {
    "adamw_8bit": 0.03,
    "adamw_bnb_8bit": 0.03,
    "paged_adamw_8bit": 0.03,
    "adamw_torch_8bit": 0.03,
    "adamw_torch_4bit": 0.35,
}
AS_ADAMW: dict[str, Tensor] = {}
SCALES = 4 / 256  # bytes of a number's share of its block's scale
# optim, dtype: bytes of a parameter's state in a layer, in the embeddings and in a small tensor
STATES = [
    ("adamw_torch", "float32", (8, 8, 8)),
    ("adamw_torch", "bfloat16", (4, 4, 4)),
    ("adamw_8bit", "float32", (2 + 2 * SCALES, 8, 8)),
    ("adamw_8bit", "bfloat16", (2 + 2 * SCALES, 8, 8)),
    ("adamw_torch_8bit", "float32", (2 + 2 * SCALES, 2 + 2 * SCALES, 8)),
    ("adamw_torch_8bit", "bfloat16", (2 + 2 * SCALES, 2 + 2 * SCALES, 4)),
    ("adamw_torch_4bit", "float32", (1 + 2 * SCALES, 1 + 2 * SCALES, 8)),
    ("lion_8bit", "float32", (1 + SCALES, 4, 4)),
    ("adafactor", "float32", (4 * (64 + 64) / 64**2, 4 * (1 / 64 + 1 / VOCABULARY), 4)),
]

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(autouse=True)
def _own_overrides() -> Iterator[None]:
    """bitsandbytes keeps which parameters have fp32 states, by their place, for the process."""
    yield
    GlobalOptimManager.get_instance().initialize()


def policy_in(dtype: str) -> PreTrainedModel:
    policy = make_policy(make_tokenizer(), seed=0)
    policy.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    return policy.to(getattr(torch, dtype))


@pytest.fixture
def train(make_trainer):
    """Train on completions that do not depend on the weights; return the trainer."""

    def run(dtype: str = "float32", **changes: Any):
        settings = {
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "model": policy_in(dtype),
            "engine": CannedEngine(),
        }
        trainer = make_trainer(rows_reward, **(settings | changes))
        trainer.train()
        return trainer

    return run


@pytest.fixture
def adamw(train):
    """Return the weights that AdamW trains, once for all tests."""

    def run(**changes: Any) -> Tensor:
        key = f"adamw {sorted(changes.items())}"
        if key not in AS_ADAMW:
            AS_ADAMW[key] = parameters(train(optim="adamw_torch", **changes).model)
        return AS_ADAMW[key]

    return run


def state_bytes(trainer, name: str) -> float:
    """Return those of a parameter's state, a number of the parameter."""
    parameter = trainer.model.get_parameter(name)
    state = trainer.optimizer.state[parameter]
    buffers = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0}
    held = sum(stored(value) for key, value in buffers.items() if not key.startswith("qmap"))
    return held / parameter.numel()


def stored(value: Tensor) -> int:
    """Return the bytes of a tensor, or of those in it but for the table of 8-bit numbers."""
    if not is_traceable_wrapper_subclass(value):
        return value.nbytes
    names, _ = value.__tensor_flatten__()
    return sum(getattr(value, name).nbytes for name in names if name != "qmap")


@pytest.mark.parametrize("optim", BOUNDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        # updates are in proportion to the gradients
        {
            "gradient_accumulation_steps": 2, "max_grad_norm": 1e-3, "adam_epsilon": 1e-2,
            "learning_rate": 1.0,
        },
    ],
    ids=["plain", "accumulated, clipped"],
)  # fmt: skip
def test_it_goes_the_way_of_adamw(train, adamw, optim, changes):
    start = parameters(policy_in("float32"))
    exact = adamw(**changes)
    found = parameters(train(optim=optim, **changes).model)
    way = (exact - start).norm()
    assert way > 0.1
    assert 1e-4 * way < (found - exact).norm() < BOUNDS[optim] * way


def test_clipping_shows(train):
    """Else the test above would pass without."""
    changes = {"optim": "adamw_8bit", "adam_epsilon": 1e-2, "learning_rate": 1e-2}
    clipped = train(**changes, max_grad_norm=1e-3)
    free = train(**changes)
    start = parameters(policy_in("float32"))
    ways = [(parameters(one.model) - start).norm() for one in (clipped, free)]
    assert ways[0] < 0.1 * ways[1]


@pytest.mark.parametrize(("optim", "dtype", "expected"), STATES)
def test_bytes_of_the_states(train, optim, dtype, expected):
    trainer = train(dtype, optim=optim, max_steps=1)
    layer = "model.layers.0.self_attn.q_proj.weight"
    names = (layer, "model.embed_tokens.weight", "model.norm.weight")
    assert tuple(state_bytes(trainer, name) for name in names) == pytest.approx(expected)
    assert state_bytes(trainer, "lm_head.weight") == pytest.approx(
        expected[1] if optim == "adafactor" else expected[0]
    )


def test_tied_embeddings_keep_the_head_in_fp32(train):
    policy = policy_in("bfloat16")
    policy.config.tie_word_embeddings = True
    policy.tie_weights()
    trainer = train(model=policy, optim="adamw_8bit", max_steps=1)
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
    assert state_bytes(trainer, "model.embed_tokens.weight") == 8


def test_paged_states_stay_where_they_are_without_a_gpu(train):
    with pytest.warns(UserWarning, match="Paged optimizers are not supported on CPU"):
        train(optim="paged_adamw_8bit", max_steps=1)


def test_compiled_as_it_is_by_default(train):
    torch.compiler.set_stance("default")
    trainer = train(
        "bfloat16", optim="adamw_torch_8bit", optim_args=ROUNDED, max_steps=2,
        model=make_policy(make_tokenizer(), seed=0).bfloat16(),
    )  # fmt: skip
    moved = parameters(trainer.model) - parameters(make_policy(make_tokenizer(), seed=0).bfloat16())
    assert 0 < moved.abs().mean() < 1e-2


# weights that are rounded at random


def step(trainer, steps: int = 1) -> Tensor:
    """Take optimizer steps with the same random gradients every time; return how far they went."""
    before = parameters(trainer.model).double()
    optimizer = trainer.create_optimizer()
    generator = torch.Generator().manual_seed(1)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    directions = [torch.randn(weight.shape, generator=generator) for weight in weights]
    for _ in range(steps):
        for weight, direction in zip(weights, directions, strict=True):
            weight.grad = direction.to(weight.dtype)
        optimizer.step()
    return parameters(trainer.model).double() - before


@pytest.mark.parametrize(
    "changes",
    [
        {"optim": "adamw_torch_8bit", "optim_args": ROUNDED},
        {"optim": "adamw_torch_4bit", "optim_args": ROUNDED},
        {"optimizer_cls_and_kwargs": (_AdamW, {"bf16_stochastic_round": True, "weight_decay": 0})},
    ],
    ids=["8bit", "4bit", "plain"],
)
def test_small_updates_are_right_on_average(make_trainer, changes):
    """A step of this learning rate is a twelfth of what bf16 resolves of most weights."""
    small = {"learning_rate": 1e-5, "adam_epsilon": 1e-12}
    dtype = {name: policy_in("bfloat16").to(name) for name in (torch.float32, torch.bfloat16)}
    exact = step(make_trainer(model=dtype[torch.float32], optim="adamw_torch", **small))
    kept = {}
    for name, way in {"rounded": changes, "lost": {"optim": "adamw_torch"}}.items():
        moved = step(make_trainer(model=policy_in("bfloat16"), **small, **way))
        kept[name] = float((moved @ exact) / (exact @ exact))
        assert set(moved.tolist()) != {0.0}
    # weights of 0.02 round by 1.2e-4: the mean over their number is off by 0.012
    assert kept["rounded"] == pytest.approx(1, abs=0.06)
    assert kept["lost"] < 0.3


# adapters


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_torch_8bit"])
@pytest.mark.parametrize("quantized", [False, True], ids=["lora", "qlora"])
def test_adapters(train, tmp_path, optim, quantized):
    write_policy(tmp_path / "policy", seed=0)
    changes: dict[str, Any] = {"model": str(tmp_path / "policy")}
    changes["model_init_kwargs"] = {"dtype": "bfloat16"}
    changes["peft_config"] = LoraConfig(r=64, target_modules="all-linear")
    if quantized:
        changes["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16
        )
        if optim == "adamw_torch_8bit":
            changes["optim_args"] = ROUNDED
    trained = {}
    for name in (optim, "adamw_torch"):
        own = {} if name == optim else {"optim_args": None}
        trained[name] = train(**(changes | {"optim": name} | own), max_steps=3)
    weight = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    kind = torch.bfloat16 if quantized else torch.float32
    assert trained[optim].model.get_parameter(weight).dtype == kind
    assert isinstance(layer_of(trained[optim], weight), bitsandbytes.nn.Linear4bit) == quantized
    assert state_bytes(trained[optim], weight) == 2 + 2 * SCALES
    factors = [
        torch.cat([x.detach().flatten().float() for n, x in one.model.named_parameters()
                   if "lora_B" in n])
        for one in trained.values()
    ]  # fmt: skip
    assert factors[1].norm() > 0.1
    assert 0 < (factors[0] - factors[1]).norm() < 0.1 * factors[1].norm()


def layer_of(trainer, weight: str) -> nn.Module:
    return trainer.model.get_submodule(weight.split(".lora_A")[0]).base_layer


# what is wrong is said before a model is loaded, where that is possible


ADAPTER = LoraConfig(target_modules=["q_proj"])
ROUNDED_8BIT = {"optim": "adamw_torch_8bit", "optim_args": ROUNDED}
NO_CLASS = "optimizer_cls_and_kwargs: expected a class and a dict"
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        ROUNDED_8BIT | {"optim_args": "bf16_stochastic_rond=True"},
        "optim_args: expected bf16_stochastic_round, block_size with optim=adamw_torch_8bit, "
        r"got bf16_stochastic_rond \(is it bf16_stochastic_round\?\)",
    ),
    ({"optim": "adamw_8bit", "optim_args": ROUNDED}, "optim_args: expected none with"),
    ({"optim": "sgd", "optim_args": "momentum"}, "optim_args: expected name=value"),
    ({"optim": "sgd", "optim_args": "momentum=much"}, "optim_args: sgd: .*'much'"),
    (
        ROUNDED_8BIT | {"optim_args": "block_size=128"},
        "optim_args: expected no block_size, .*set it in optimizer_cls_and_kwargs; got 128",
    ),
    (ROUNDED_8BIT, r"bf16_stochastic_round: .*dtype=bfloat16.*float32"),
    (
        ROUNDED_8BIT | {"model": policy_in("bfloat16"), "peft_config": ADAPTER},
        "bf16_stochastic_round: expected False with an adapter",
    ),
    # it looks for layers, which is left to the model: the error is about its package
    (
        {"optim": "galore_adamw", "optim_target_modules": "all-linear"},
        "optim: galore_adamw needs a package: .*galore_torch",
    ),
    *(
        ({"optimizer_cls_and_kwargs": chosen}, NO_CLASS)
        for chosen in (Adafactor, (Adafactor,), (Adafactor, None), ("adamw", {}))
    ),
    (
        {"optimizer_cls_and_kwargs": (CPUOffloadOptimizer, {})},
        "CPUOffloadOptimizer only with a GPU, got cpu",
    ),
    # transformers makes groups with that of the field, in which the optimizer's own is lost
    (
        {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"weight_decay": 0.1})},
        "optimizer_cls_and_kwargs: .*no weight_decay.* 0.1",
    ),
    (
        {"optim": "adagrad", "optim_args": "weight_decay=0.1"},
        "optim_args: .*got 0.1; set weight_decay=0.1 in GRPOC",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_wrong(train, changes, message):
    with pytest.raises(ValueError, match=message):
        train(**changes)


@pytest.mark.parametrize(
    ("package", "optim"), [("bitsandbytes", "adamw_8bit"), ("torchao", "adamw_torch_4bit")]
)
def test_a_package_that_is_missing(make_args, monkeypatch, package, optim):
    found = f"transformers.trainer_optimizer.is_{package}_available"
    monkeypatch.setattr(found, lambda *_: False)
    with pytest.raises(ValueError, match=f"optim: {optim} needs .*{package}.*pip install"):
        make_args(optim=optim)


# a class and its settings


def test_a_class_has_the_learning_rate(make_trainer, policy):
    chosen = AdamW8bit, {"block_size": 128, "betas": (0.8, 0.9)}
    trainer = make_trainer(optimizer_cls_and_kwargs=chosen, learning_rate=3e-4)
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, AdamW8bit) and optimizer.block_size == 128
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([3e-4] * 2)
    own = torch.optim.SGD, {"lr": 0.5}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no effect")
        trainer = make_trainer(optimizer_cls_and_kwargs=own)
    assert trainer.create_optimizer().defaults["lr"] == 0.5


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "rmsprop"])
def test_weight_decay_is_that_of_the_field(make_trainer, optim):
    chosen = torch.optim.AdamW, {"weight_decay": 0.1}
    same = {"weight_decay": 0.1, "optim": optim, "optim_args": "weight_decay=0.1"}
    for changes in (same, {"weight_decay": 0.1, "optimizer_cls_and_kwargs": chosen}):
        groups = make_trainer(**changes).create_optimizer().param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]  # norms have none


def test_a_class_replaces_optim(make_trainer, policy):
    chosen = torch.optim.SGD, {}
    changes = {"optim": "adamw_torch_8bit", "optim_args": ROUNDED}
    with pytest.warns(UserWarning, match="optim, optim_args: no effect with optimizer_cls_and"):
        make_trainer(optimizer_cls_and_kwargs=chosen, **changes)
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    with pytest.warns(UserWarning, match="optim: no effect with optimizers"):
        make_trainer(optimizers=(optimizer, None), optim="adamw_8bit")
    with pytest.raises(ValueError, match="optimizers, optimizer_cls_and_kwargs: expected one"):
        make_trainer(optimizers=(optimizer, None), optimizer_cls_and_kwargs=chosen)


def test_states_in_main_memory_need_whole_gradients(make_args, monkeypatch):
    chosen = CPUOffloadOptimizer, {}
    args = make_args(max_grad_norm=0.5)
    monkeypatch.setattr(GRPOConfig, "device", torch.device("cuda"))
    trainer = SimpleNamespace(args=args, optimizer=None, optimizer_cls_and_kwargs=chosen)
    with pytest.raises(ValueError, match="max_grad_norm: expected 0 with CPUOffload.*got 0.5"):
        check_optimizer(trainer, WHOLE)
    trainer.args.max_grad_norm = 0.0
    check_optimizer(trainer, WHOLE)
