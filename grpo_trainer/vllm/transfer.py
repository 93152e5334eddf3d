"""Sending weights to vLLM through shared files, and whether only an adapter is sent."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import is_bitsandbytes_available

from grpo_trainer.engines import EngineContext, WeightSource
from grpo_trainer.policy import base_policy, is_quantized, takes_images
from grpo_trainer.vllm.http import JsonServer, ServerError

logger = logging.getLogger(__name__)

_FILE_BYTES = 1 << 30  # this much of the weights is in memory twice


class FileTransfer:
    """Writes the weights to a folder for each update, and deletes the previous update's.

    The server has ``timeout`` seconds to load them.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # runs that share an output folder must not share this one
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=folder)).resolve()
        self._timeout = timeout

    def send(self, server: JsonServer, weights: WeightSource, adapter: str = "") -> None:
        """Replace the server's weights, or the weights of its adapter model ``adapter``."""
        for old in self._folder.iterdir():
            shutil.rmtree(old)
        # under a new name, which no other machine has cached
        written = tempfile.mkdtemp(dir=self._folder)
        body: dict[str, Any] = {"lora_name": adapter, "lora_path": written}
        if adapter:
            path = "/v1/load_lora_adapter"
            save_adapter(written, weights)
        else:
            path = "/collective_rpc"
            body = {"method": "reload_weights", "kwargs": {"weights_path": written}}
            for number, tensors in enumerate(_parts(weights())):
                save_file(tensors, f"{written}/model-{number:05d}.safetensors")
                tensors.clear()  # else it stays in memory while the next part is read
        try:
            server.ask("POST", path, body, timeout=self._timeout)
        except ServerError as error:
            raise type(error)(f"{error} (can the server read the folder {written}?)") from error

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def save_adapter(folder: str, factors: WeightSource) -> None:
    """Write a LoRA adapter in PEFT's format, with the scaling in its factors."""
    tensors = {name: value for part in _parts(factors()) for name, value in part.items()}
    save_file(tensors, f"{folder}/adapter_model.safetensors")
    rank = max(len(value) for name, value in tensors.items() if name.endswith(".lora_A.weight"))
    described = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    Path(folder, "adapter_config.json").write_text(json.dumps(described))


def adapter_rank(context: EngineContext, ranks: Callable[[], Sequence[int] | str]) -> int:
    """Return the one of ``ranks`` that fits the policy's adapter; 0: vLLM gets it merged.

    ``ranks`` may instead return the reason why there are none.

    Raises:
        ValueError: vLLM cannot apply the adapter, but ``vllm_lora_transfer`` requires it, or the
            base is quantized, so that the adapter cannot be merged either.
    """
    setting, policy = context.args.vllm_lora_transfer, context.policy()
    if setting == "merged" and is_quantized(policy):
        raise ValueError(
            "vllm_lora_transfer: expected auto or adapter with a quantized base, into which an "
            "adapter cannot be merged exactly, got 'merged'"
        )
    if context.args.max_staleness is not None:
        return _merged_in_flight(context)
    if setting == "merged" or (setting == "auto" and not is_peft_model(policy)):
        return 0
    reason = _beyond_vllm(policy)
    if reason is None:
        config = policy.peft_config[policy.active_adapters[0]]
        rank, known = max([config.r, *config.rank_pattern.values()]), ranks()
        if isinstance(known, str):
            reason = known
        elif room := [each for each in known if each >= rank]:
            return min(room)
        else:
            most = f"at most {max(known)} (max_lora_rank)"
            reason = f"its rank is {rank}, and vLLM is configured for {most}"
    if setting == "adapter":
        raise ValueError(f"vllm_lora_transfer: expected an adapter that vLLM applies, but {reason}")
    if is_quantized(policy):
        raise ValueError(
            "use_vllm: expected a LoRA adapter that vLLM applies on a quantized base, into which "
            f"it cannot be merged exactly, but {reason}; generate with transformers, or leave the "
            "base in full precision"
        )
    logger.warning("vllm_lora_transfer: merging the adapter into the weights: %s", reason)
    return 0


def _merged_in_flight(context: EngineContext) -> int:
    """Return 0: vLLM gets the adapter merged, since its requests keep their first adapter."""
    setting, policy = context.args.vllm_lora_transfer, context.policy()
    if is_peft_model(policy) and (setting == "adapter" or is_quantized(policy)):
        on = " on a quantized base" if is_quantized(policy) else ""
        raise ValueError(
            f"max_staleness: expected None with an adapter that vLLM applies{on}: a completion in "
            "vLLM keeps its first adapter, while merged weights can change"
        )
    return 0


def _beyond_vllm(policy: Any) -> str | None:
    """Return why vLLM can never apply the adapter like the policy, or None."""
    if not is_peft_model(policy):
        return "the policy has none"
    if takes_images(policy):
        return "the policy accepts images"
    head, [adapter] = base_policy(policy).get_output_embeddings(), policy.active_adapters
    for name, parameter in policy.named_parameters():
        path, _, factor = name.rpartition(".lora_")
        layer = policy.get_submodule(path)
        plain = layer is not head and _is_plain(layer)
        if parameter.requires_grad and not (plain and factor[1:] == f".{adapter}.weight"):
            return f"{name} is not a factor of plain LoRA on a linear layer of the body"
    return None


def _is_plain(layer: Any) -> bool:
    """Return whether a module is PEFT's LoRA on a layer that is linear in vLLM."""
    from peft.tuners import lora

    if is_bitsandbytes_available() and type(layer) in (lora.Linear4bit, lora.Linear8bitLt):
        return not layer.lora_variant
    on_linear = type(layer) is lora.Linear and type(layer.get_base_layer()) is nn.Linear
    return on_linear and not layer.lora_variant


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield dictionaries of about _FILE_BYTES in CPU memory, without tensors that share memory."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in weights:
        part[name] = value.detach().to("cpu", copy=True).contiguous()
        size += part[name].nbytes
        if size >= _FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part
