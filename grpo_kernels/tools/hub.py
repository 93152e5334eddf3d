"""Models and datasets on a hub, by name."""

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
    """Load ``name`` from the hub, or directly from its cache if no hub answers.

    Without this the hub's client tries every file six times, for more than a minute. A local file
    or folder makes no request.
    """
    if Path(name).expanduser().exists():
        yield
        return
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # an error of the client's HTTP library, or its offline variable is set
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def read_config(model: str) -> Any:
    """Read the config of a model from a folder, the hub or its cache.

    Raises:
        ValueError: there is no config, it does not describe a model with a head, or transformers
            is not installed.
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
    except Exception as error:  # of many kinds, all about the file's contents
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"model: transformers cannot read {model!r}: {reason}") from error
    text = config.get_text_config()
    for name in ("hidden_size", "vocab_size"):
        size = getattr(text, name, None)
        if size is None or size < 1:
            raise ValueError(f"model: expected {name} > 0 in the config of {model!r}; got {size}")
    return config


def head_of(config: Any) -> dict[str, Any]:
    """Return the sizes and dtype of a model's head, from its config."""
    text = config.get_text_config()
    return {
        "hidden": text.hidden_size,
        "vocabulary": text.vocab_size,
        "dtype": getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16,
        "softcap": getattr(text, "final_logit_softcapping", None) is not None,
    }


def loaded_from(model: str) -> str:
    """Return the name to load the model from: the folder, if ``model`` is its config file."""
    path = Path(model)
    return str(path.parent) if path.expanduser().is_file() else model


def name_of(model: str) -> str:
    """Return a model's short name: the last part of its folder or hub id."""
    path = Path(model).expanduser().resolve()
    return (path.parent if path.is_file() else path).name
