"""Models and datasets by their names on a hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.tools.machine import install_command


@contextmanager
def hub_or_cache(name: str) -> Iterator[None]:
    """Load ``name`` from the hub, or at once from its cache where no hub answers.

    The hub's client would try every file six times first, which takes a minute and more. Nothing
    is asked for what is a file or a folder here.
    """
    if Path(name).expanduser().exists():
        yield
        return
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of the HTTP library that the client has, or it is offline by its variable
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def read_config(model: str) -> Any:
    """Read the config of a model, in a folder, on the hub or in its cache.

    Raises:
        ValueError: there is no config, or none of a model with a head; or no transformers.
    """
    if find_spec("transformers") is None:
        advice = install_command("tools")
        raise ValueError(f"model: expected the package transformers to be installed; {advice}")
    from transformers import AutoConfig

    path = Path(model).expanduser()
    if not path.exists() and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        raise ValueError(f"model: no folder or file {model!r}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model: no config.json in folder {model!r}")
    source = path if path.exists() else model
    try:
        with hub_or_cache(model):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of many kinds, each about what stands in the file
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"model: transformers cannot read {model!r}: {reason}") from error
    text = config.get_text_config()
    for name in ("hidden_size", "vocab_size"):
        size = getattr(text, name, None)
        if size is None or size < 1:
            raise ValueError(f"model: expected {name} > 0 in the config of {model!r}; got {size}")
    return config


def head_of(config: Any) -> dict[str, Any]:
    """Return what the head of a model is, by its config."""
    text = config.get_text_config()
    return {
        "hidden": text.hidden_size,
        "vocabulary": text.vocab_size,
        "dtype": getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16,
        "softcap": getattr(text, "final_logit_softcapping", None) is not None,
    }


def loaded_from(model: str) -> str:
    """Return what loads the model with its weights: the folder, where its config is named."""
    path = Path(model)
    return str(path.parent) if path.expanduser().is_file() else model


def name_of(model: str) -> str:
    """Return the name of a model: the last part of its folder, or of its hub id."""
    path = Path(model).expanduser().resolve()
    return (path.parent if path.is_file() else path).name
