"""Which tokens end a completion."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.model import base_policy

logger = logging.getLogger(__name__)


def end_token_ids(
    options: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel | None = None,
) -> frozenset[int]:
    """Take ``eos_token_id`` and ``stop_token_ids`` out of ``options``, and return all ends.

    The first replaces what tokenizer and model name, the second adds to it. Of tokenizer and model
    both count: a chat model ends its turn with another token than a document ends with.

    Raises:
        ValueError: ``options`` has something else than ids of tokens.
    """
    size = len(tokenizer) if model is None else _text_config(model).vocab_size
    more = _checked("stop_token_ids", options.pop("stop_token_ids", None), size)
    if "eos_token_id" in options:
        return frozenset(_checked("eos_token_id", options.pop("eos_token_id"), size) + more)
    named = _listed(tokenizer.eos_token_id) + ([] if model is None else _named_by(model))
    unknown = [token for token in named if not 0 <= token < size]
    if unknown:
        logger.warning("eos_token_id: %s end nothing, the model has %d tokens", unknown, size)
    return frozenset(token for token in named + more if token not in unknown)


def _named_by(model: PreTrainedModel) -> list[int]:
    generation = getattr(base_policy(model), "generation_config", None)
    named = _listed(getattr(generation, "eos_token_id", None))
    return named or _listed(getattr(_text_config(model), "eos_token_id", None))


def _text_config(model: PreTrainedModel) -> Any:
    return base_policy(model).config.get_text_config()


def _listed(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _checked(name: str, ids: Any, size: int) -> list[int]:
    found = _listed(ids)
    if not all(type(token) is int and 0 <= token < size for token in found):
        raise ValueError(
            f"generation_kwargs[{name!r}]: expected ids of tokens, below {size}, got {ids!r}"
        )
    return found
