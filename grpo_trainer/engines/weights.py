"""The policy's weights as a checkpoint has them: plain names, tied heads, adapters merged in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, groupby
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from grpo_trainer.policy import WHOLE, Placement, base_policy

_BLOCK = re.compile(r".*?\.\d+\.|")  # up to the first number: a block of the model, or nothing


def parameter_versions(policy: nn.Module, placement: Placement = WHOLE) -> list[tuple[int, int]]:
    """Return what is equal as long as no trainable parameter is replaced or written to.

    A fused optimizer's writing does not show: it does not count up what autograd watches.
    """
    placement.at_rest(policy)
    trained = (placement.local(p) for p in policy.parameters() if p.requires_grad)
    return [(parameter.data_ptr(), parameter._version) for parameter in trained]


def policy_weights(
    policy: PreTrainedModel, placement: Placement = WHOLE
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the checkpoint that ``policy`` would be, one after the other.

    Tensors are the policy's own where nothing is sharded, merged or converted. A tied LM head comes
    under its name as well, since an engine may keep a copy of it. Shards are gathered one parameter
    at a time, which all processes do together, and adapters are merged one layer at a time, in a
    copy of that layer, so there is never a second model in memory.

    Raises:
        ValueError: the policy's base is quantised, which cannot be merged exactly.
    """
    base = base_policy(policy)
    if is_peft_model(policy):
        if getattr(base, "is_quantized", False):
            raise ValueError(
                "use_vllm: expected a policy in full precision, got adapters on a quantised base, "
                "which cannot be merged into it exactly"
            )
        weights = _merged(policy, placement)
    else:
        weights = placement.weights(policy)
    shapes = placement.described(base)
    saved = revert_weight_conversion(base, shapes)
    if all(saved.get(name) is value for name, value in shapes.items()):
        return weights
    # the model is held in another layout (experts as a stack): one block is copied at a time
    blocks = groupby(weights, key=lambda item: _BLOCK.match(item[0])[0])  # type: ignore[index]
    return chain.from_iterable(
        revert_weight_conversion(base, dict(block)).items() for _, block in blocks
    )


def _merged(policy: PreTrainedModel, placement: Placement) -> Iterator[tuple[str, Tensor]]:
    base = base_policy(policy)
    [adapter] = policy.active_adapters
    adapted = _adapted_modules(base)
    prefixes = tuple(f"{name}." for name in adapted)
    yield from placement.weights(base, lambda name: not name.startswith(prefixes))
    for name, module in adapted.items():
        if hasattr(module, "modules_to_save"):
            weights = placement.weights(module.modules_to_save[adapter])
        else:
            layer = placement.whole_copy(module)
            layer.merge(adapter_names=[adapter])
            weights = iter(layer.get_base_layer().state_dict().items())
            del layer  # or it would live as long as the next one is copied
        for key, value in weights:
            yield f"{name}.{key}", value


def _adapted_modules(base: PreTrainedModel) -> dict[str, Any]:
    """Return what PEFT put into the model, by the name of the module it replaced, if it can be
    merged and an engine that ties the head could hold it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, kinds)}
    for name, module in adapted.items():
        nested = name.rpartition(".")[0] in adapted
        other = isinstance(module, AuxiliaryTrainingWrapper)
        if nested or (other and not isinstance(module, ModulesToSaveWrapper)):
            raise ValueError(f"peft_config: expected whole layers for use_vllm, got {name}")
    if base.config.get_text_config().tie_word_embeddings:
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        tied = [name for name, module in adapted.items() if module in ends]
        if tied:
            raise ValueError(
                "peft_config: expected no adapter on tied embeddings, whose ends then differ (an "
                f"engine has one weight for both), got one on {', '.join(tied)}"
            )
    return adapted
