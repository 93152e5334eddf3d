"""A body's forward and backward by stored activations: peak memory, time, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers import Qwen3Config, Qwen3ForCausalLM, modeling_utils

from benchmarks import text
from benchmarks.check import relative_error, take_gradient, why_wrong
from benchmarks.child import ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt
from benchmarks.results import Row
from benchmarks.timing import cuda_growth, make_timer, resident_growth
from grpo_trainer.policy.tiled_mlp import tile_mlps

_ROUNDS = 3
_LONGEST = 45.0  # seconds of a process; a job has five of them
_RANK = 16
NOTES = {
    "plain": "gradient_checkpointing",
    "offload": "inputs of layers in main memory",
    "every-second-layer": "every_n_layers: 2",
    "tiles": "mlp_tile_tokens",
    "tiles-offload": "both",
}


@dataclass(frozen=True)
class Case:
    """A body of Qwen3 with random weights, frozen in bf16, with adapters on all of its layers."""

    name: str
    layers: int
    width: int
    inner: int  # of the MLP
    heads: int
    keys: int  # heads of keys
    rows: int
    length: int
    tile: int  # mlp_tile_tokens

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def facts(self) -> dict[str, Any]:
        sizes = asdict(self)
        return {"model": sizes.pop("name"), "dtype": "bf16", "tokens": self.tokens, **sizes}

    def __str__(self) -> str:
        return f"{self.name}-{self.layers}-layers-{self.tokens}"


CASES = {
    "tiny": [Case("tiny", 4, 32, 96, 2, 1, 2, 19, 8)],
    "quick": [Case("quick", 4, 256, 768, 4, 2, 2, 256, 64)],
    "cpu": [Case("small", 8, 512, 1536, 8, 2, 4, 512, 256)],
    "gpu": [Case("8b", 8, 4096, 12288, 32, 8, 8, 2048, 2048)],
    "gpu-full": [
        Case("8b", 8, 4096, 12288, 32, 8, 8, 2048, 2048),
        Case("8b", 16, 4096, 12288, 32, 8, 16, 4096, 4096),
    ],
}


def about(case: Case, device: str) -> str:
    return f"LoRA of rank {_RANK}; errors against plain"


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    for row in rows:
        with attempt(row):
            rounds = session.rounds(_ROUNDS)
            found = ask(_measured, row.provider, case, session.device, rounds, timeout=_LONGEST)
            row.seconds, row.errors, row.info = found
            row.cells["MiB grown"] = text.mib(row.info["grown_bytes"])
            row.leave_out("wrong", why_wrong(row.errors, "bf16"))


def _measured(name: str, case: Case, device: str, rounds: int) -> Any:
    """Return seconds, errors and bytes, in a process that does nothing else."""
    body, step = _step(case, device)
    with _keeping(body, "plain", case):
        expected = step()  # the libraries are loaded now
    with _keeping(body, name, case):
        growth = cuda_growth if device == "cuda" else resident_growth
        gradient, grown = growth(step)
        timer = make_timer(device)
        seconds = [timer(step) for _ in range(rounds)]
    errors = {"gradient": relative_error(gradient, expected)}
    return seconds, errors, {"grown_bytes": grown}


def _step(case: Case, device: str) -> tuple[Any, Callable[[], Tensor]]:
    """Return a body, and a function that computes its gradient."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=case.width,
        intermediate_size=case.inner,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.keys,
        head_dim=case.width // case.heads,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        adapter = LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules="all-linear")
        adapted: Any = get_peft_model(model, adapter).train()
        ids = torch.randint(1024, (case.rows, case.length))
    adapted.enable_input_require_grads()
    leaves = [x for x in adapted.parameters() if x.requires_grad]
    body = adapted.get_base_model()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # or the gradients of their other factors are 0
            torch.nn.init.normal_(parameter, std=0.02)

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            hidden = body.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.backward(torch.ones_like(hidden))
        return take_gradient(leaves)

    return body, step


@contextmanager
def _keeping(body: Any, name: str, case: Case) -> Iterator[None]:
    """Apply a setting of stored activations to a body."""
    offload = name in ("offload", "tiles-offload")
    every = 2 if name == "every-second-layer" else 1
    tile_mlps(body, case.tile if name.startswith("tiles") else None)
    body.gradient_checkpointing_enable(every_n_layers=every, offload=offload)
    if torch.cuda.is_available():
        yield
        return
    # no memory is pinned without a GPU
    unpinned = partial(save_on_cpu, pin_memory=False)
    with patch.object(modeling_utils, "save_on_cpu", lambda **_: unpinned()):
        yield


test_activations = check_row
