"""The head of a model, from its ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class ModelHead:
    """What a config says about its head; None where it is silent."""

    name: str | None
    hidden: int
    vocabulary: int
    dtype: torch.dtype | None
    softcap: bool


def read_model(model: str) -> ModelHead:
    """The head of the model in a folder, or of a config file.

    Raises:
        ValueError: there is no config, transformers does not know it, or it describes no head.
    """
    from transformers import AutoConfig

    path = Path(model).expanduser()
    if not path.exists():
        raise ValueError(f"no folder or file {model!r}; models are read from local files only")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"no config.json in folder {model!r}")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, each about what stands in the file
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"transformers cannot read {model!r}: {reason}") from error
    text = config.get_text_config()
    absent = [name for name in ("hidden_size", "vocab_size") if getattr(text, name, 0) < 1]
    if absent:
        raise ValueError(f"the config of {model!r} has no {' and no '.join(absent)}")
    return ModelHead(
        name=path.resolve().parent.name if path.is_file() else path.resolve().name,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        dtype=_dtype(text) or _dtype(config),
        softcap=getattr(text, "final_logit_softcapping", None) is not None,
    )


def _dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
