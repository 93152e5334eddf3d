"""Gradient checkpointing: its arguments, what each keeps, and that none changes what is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from transformers import modeling_utils

from grpo_trainer.config import check_arguments, checkpointing
from tests.support.trainer import CannedEngine, lengths_reward, logged, parameters
from tests.trainer.policy.test_tiled_mlp import peak, qwen3

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of names that transformers calls old
    pytest.mark.skipif(
        "offload" not in checkpointing._of_transformers(), reason="transformers is older"
    ),
]

NAMES = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
LORA = {"r": 2, "lora_alpha": 8, "lora_dropout": 0.3, "target_modules": "all-linear"}
EVERY_SECOND = {"every_n_layers": 2}
OFFLOAD = {"offload": True}


class Host(saved_tensors_hooks):
    """Keeps tensors outside of torch, as pinned memory is outside of a GPU; counts their bytes."""

    taken = 0

    def __init__(self, **options: Any) -> None:
        assert options == {"pin_memory": True, "device_type": "cpu"}
        super().__init__(self._pack, self._unpack)

    @classmethod
    def _pack(cls, x: Tensor) -> Any:
        cls.taken += x.nbytes
        return x.dtype, x.shape, x.detach().contiguous().view(torch.uint8).numpy().copy()

    @staticmethod
    def _unpack(kept: Any) -> Tensor:
        dtype, shape, values = kept
        return torch.from_numpy(values).view(dtype).view(shape).clone()


def unpinned(pin_memory: bool, **options: Any) -> save_on_cpu:
    assert pin_memory  # which a machine without a GPU has not
    return save_on_cpu(pin_memory=False, **options)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let offload pass, as on a machine with a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)


@pytest.fixture(params=["of torch", "outside of torch"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    made = unpinned if request.param == "of torch" else Host
    monkeypatch.setattr(modeling_utils, "save_on_cpu", made)
    monkeypatch.setattr(Host, "taken", 0)


@pytest.fixture
def train(make_trainer, policy):
    def train(**changes: Any) -> tuple[Any, Tensor]:
        """Return what two steps log, and the weights after them."""
        settings = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
        settings |= {"gradient_checkpointing": True} | changes
        if settings.pop("adapted", False):
            peft = pytest.importorskip("peft")
            settings["peft_config"] = peft.LoraConfig(**LORA)
        model = copy.deepcopy(policy)
        trainer = make_trainer(lengths_reward, model, CannedEngine(), **settings)
        trainer.train()
        assert len(trainer.state.log_history) > 2
        return logged(trainer), parameters(trainer.model)

    return train


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (OFFLOAD, {"packing": "padded", "adapted": True}),
        (OFFLOAD, {"packing": "packed", "mlp_tile_tokens": 5}),
        (EVERY_SECOND | OFFLOAD, {"adapted": True}),
        (EVERY_SECOND, {}),
    ],
)
def test_no_argument_changes_a_bit(train, host, arguments: Any, changes: dict[str, Any]) -> None:
    logged_with, weights_with = train(gradient_checkpointing_kwargs=arguments, **changes)
    logged_without, weights_without = train(**changes)
    assert logged_with == logged_without
    assert torch.equal(weights_with, weights_without)


@contextmanager
def checkpointed(model: Any, **options: Any) -> Iterator[Any]:
    """Enable gradient checkpointing as transformers' trainer does."""
    model.gradient_checkpointing_enable(**options)
    yield model
    model.gradient_checkpointing_disable()


def test_what_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload the bytes of a token no longer grow with the number of layers."""
    monkeypatch.setattr(modeling_utils, "save_on_cpu", Host)
    monkeypatch.setattr(Host, "taken", 0)
    few, many, width = 6, 10, 32

    def per_token(layers: int, **options: Any) -> float:
        with checkpointed(qwen3(num_hidden_layers=layers), **options) as model:
            peak(model, 2)  # the gradients of parameters are there from now on
            return (peak(model, 384) - peak(model, 128)) / 256

    of_layer = 4 * width  # a hidden state in fp32
    assert per_token(many) - per_token(few) == (many - few) * of_layer
    assert Host.taken == 0
    assert per_token(many, **OFFLOAD) == per_token(few, **OFFLOAD)
    assert Host.taken == (many + few) * of_layer * (2 + 384 + 128)
    # every second layer keeps all of its inside
    assert per_token(many, **EVERY_SECOND) > per_token(many) + (many - few) / 2 * 10 * of_layer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ofload": True}, r": expected one of .*every_n_layers, offload.* \(is it offload\?\)"),
        ({"every_n_layers": 0}, r"\['every_n_layers'\]: expected an integer >= 1, got 0"),
        ({"every_n_layers": 1.5}, r"\['every_n_layers'\]: expected an integer >= 1, got 1.5"),
        ({"offload": "no"}, r"\['offload'\]: expected True or False, got 'no'"),
        ({"use_reentrant": 0}, r"\['use_reentrant'\]: expected True or False, got 0"),
        ([1], r": expected a dictionary, as JSON"),
    ],
)
def test_wrong_arguments(make_args, name: str, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=name + message):
        make_args(gradient_checkpointing=None, **{name: arguments})


@pytest.mark.parametrize("kind", ["gradient", "activation"])
@pytest.mark.parametrize("arguments", [OFFLOAD, EVERY_SECOND, {"use_reentrant": False}])
def test_arguments_without_checkpointing(make_args, gpu, kind: str, arguments: Any) -> None:
    switch, name = f"{kind}_checkpointing", f"{kind}_checkpointing_kwargs"
    off = {"gradient_checkpointing": None} | {switch: False}
    with pytest.raises(ValueError, match=f"{name}: expected None with {switch}=False.*, got"):
        make_args(**off, **{name: arguments})
    args = make_args(gradient_checkpointing=None, **{name: arguments})
    assert args.gradient_checkpointing is True  # the default
    args.gradient_checkpointing = args.activation_checkpointing = False
    with pytest.raises(ValueError, match="expected None with gradient_checkpointing=False"):
        check_arguments(args, None)


def test_known_arguments_pass(make_args, gpu) -> None:
    for arguments in (
        {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "none"},
        OFFLOAD | EVERY_SECOND,
        {},
        None,
    ):
        args = make_args(gradient_checkpointing=True, gradient_checkpointing_kwargs=arguments)
        expected = None if arguments is None else {"use_reentrant": False} | arguments
        assert args.activation_checkpointing_kwargs == expected
        assert args.gradient_checkpointing_kwargs == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_arguments_do_not_make_checkpoints_reentrant(
    make_trainer, policy, name: str, reentrant: bool | None
) -> None:
    """Torch would, where they do not say, and then ignore some of them."""
    arguments: dict[str, Any] = {"preserve_rng_state": False}
    arguments |= {} if reentrant is None else {"use_reentrant": reentrant}
    own = dict(arguments)
    trainer = make_trainer(
        lengths_reward, policy, CannedEngine(),
        gradient_checkpointing=True, max_steps=1, **{name: arguments},
    )  # fmt: skip
    trainer.train()
    used = trainer.model.model.layers[0]._gradient_checkpointing_func.keywords
    assert used == {"use_reentrant": bool(reentrant), "preserve_rng_state": False}
    assert arguments == own


@pytest.mark.skipif("torch.accelerator.is_available()")
@pytest.mark.parametrize("name", NAMES)
def test_offload_without_a_gpu(make_args, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\['offload'\]: expected False without a GPU"):
        make_args(gradient_checkpointing=None, **{name: OFFLOAD})
    make_args(gradient_checkpointing=None, **{name: {"offload": False}})


@pytest.mark.parametrize(
    ("arguments", "version"), [(OFFLOAD, "5.17"), (EVERY_SECOND, "5.16")], ids=["offload", "every"]
)
def test_an_older_transformers(make_args, monkeypatch, arguments: Any, version: str) -> None:
    class Older:
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            pass

    monkeypatch.setattr(checkpointing, "PreTrainedModel", Older)
    monkeypatch.setattr(checkpointing.transformers, "__version__", "5.15.0")
    with pytest.raises(ValueError, match=rf"expected transformers>={version} .*, got 5\.15\.0"):
        make_args(gradient_checkpointing=True, gradient_checkpointing_kwargs=arguments)
    make_args(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
