"""Names that nobody knows, and the ones that were meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# what other versions and tools call an argument, where its name is not alike
_ALSO_CALLED = {
    "attn_impl": "attn_implementation",
    "config_name": "dataset_config",
    "dataset": "dataset_name",
    "dataset_split": "dataset_train_split",
    "evaluation_strategy": "eval_strategy",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "no_cuda": "use_cpu",
    "revision": "model_revision",
    "reward_model": "reward_model_name_or_path",
    "reward_model_path": "reward_model_name_or_path",
    "split": "dataset_train_split",
    "torch_dtype": "dtype",
    "vllm_dtype": "vllm_engine_kwargs",
}


def hint(name: str, known: Collection[str]) -> str:
    """Return a remark on the one of ``known`` that ``name`` stands for; empty if none does."""
    other = _ALSO_CALLED.get(name)
    found = [other] if other in known else difflib.get_close_matches(name, known, n=1)
    return f" (is it {found[0]}?)" if found else ""


def name_of(word: str) -> str:
    """Return the field that a word of a command line names, as ``lr`` for ``--lr=1``."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def no_such_option(word: str, known: Collection[str]) -> str:
    """Say of a word of a command line that it names none of the ``known`` fields."""
    option = word.partition("=")[0]
    return f"{option}: there is no such argument{hint(name_of(word), known)}"
