"""Arguments of the command line, under TRL's names: datasets, models, adapters."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets
from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available, is_peft_available

from grpo_kernels.arguments import check_name
from grpo_kernels.tools import install_command
from grpo_trainer.common import describe_fields, load_module
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import PromptDataset, load_prompts


@dataclass
class ScriptArguments:
    """The dataset of a script."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class DatasetConfig:
    """One dataset of a mixture, in the words of ``datasets.load_dataset``.

    Args:
        path: a file, a folder, a hub id or a format such as ``json``.
        name: configuration of a hub dataset.
        data_dir, data_files: what of it is read.
        split: which of its splits.
        columns: the columns that are kept. Default: all.
        fraction: its share of the mixture; all of a mixture have one, or none.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: int | float | None = None


@dataclass
class DatasetMixtureConfig:
    """Datasets that are trained on as one, in place of ``dataset_name``.

    Raises:
        ValueError: one is described by unknown names, or the shares cannot be.
    """

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [_described(item) for item in self.datasets]
        given = [item.fraction for item in self.datasets if item.fraction is not None]
        if not given:
            return
        if len(given) < len(self.datasets) or min(given) < 0 or not any(given):
            shown = [item.fraction for item in self.datasets]
            raise ValueError(
                "datasets: expected a fraction > 0 for all of them or for none, got "
                f"{', '.join(map(str, shown))}"
            )
        if self.streaming:
            raise ValueError("datasets: expected no fraction with streaming, got one")


def _described(item: DatasetConfig | dict[str, Any]) -> DatasetConfig:
    if isinstance(item, DatasetConfig):
        return item
    try:
        described = DatasetConfig(**item)
    except TypeError as error:
        known = ", ".join(DatasetConfig.__dataclass_fields__)
        raise ValueError(
            f"datasets: expected a path, and beside it some of {known}; got {item!r}"
        ) from error
    for name, hint in get_type_hints(DatasetConfig).items():
        kinds = tuple(get_origin(kind) or kind for kind in get_args(hint) or (hint,))
        if not isinstance(getattr(described, name), kinds):
            raise ValueError(
                f"datasets: expected {hint} as {name}, got {getattr(described, name)!r}"
            )
    return described


def get_dataset(mixture_config: DatasetMixtureConfig, seed: int = 0) -> DatasetDict:
    """Load the datasets, one after the other, as ``train``, and with ``test_split_size`` ``test``.

    ``seed`` draws the rows of ``test``: the same ones on every process and in a resumed run. With
    fractions each gives its first rows, as many as the largest mixture has in which no row
    comes twice.

    Raises:
        ValueError: there is none, or one of them cannot be loaded or has no such columns.
    """
    if not mixture_config.datasets:
        raise ValueError("datasets: expected at least one, got none")
    loaded = [_load(item, mixture_config.streaming) for item in mixture_config.datasets]
    fractions = [item.fraction for item in mixture_config.datasets]
    if fractions[0] is not None:
        loaded = _mixed(loaded, [float(fraction or 0) for fraction in fractions])
    try:
        joined = concatenate_datasets(loaded)
    except ValueError as error:
        raise ValueError(f"datasets: expected columns of the same types: {error}") from error
    size = mixture_config.test_split_size
    if size is None:
        return DatasetDict({"train": joined})
    if isinstance(joined, IterableDataset):
        raise ValueError(f"test_split_size: expected None with streaming, got {size}")
    return joined.train_test_split(test_size=size if size < 1 else int(size), seed=seed)


def _load(item: DatasetConfig, streaming: bool) -> PromptDataset:
    options = {"data_dir": item.data_dir, "data_files": item.data_files}
    given = {name: value for name, value in options.items() if value is not None}
    dataset = load_prompts(item.path, item.split, item.name, streaming=streaming, **given)
    if item.columns is None:
        return dataset
    missing = [name for name in item.columns if name not in (dataset.column_names or [name])]
    if missing:
        raise ValueError(f"datasets: expected columns of {item.path!r}, got {', '.join(missing)}")
    return dataset.select_columns(item.columns)


def _mixed(datasets: list[Any], fractions: list[float]) -> list[Dataset]:
    shares = [fraction / sum(fractions) for fraction in fractions]
    pairs = list(zip(datasets, shares, strict=True))
    size = min(len(dataset) / share for dataset, share in pairs if share > 0)
    return [dataset.select(range(round(share * size))) for dataset, share in pairs]


@dataclass
class ModelConfig:
    """The model, what is trained of it, and how the rest is stored.

    Raises:
        ValueError: an argument has no effect without another one, or a package is missing.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(
        default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]}
    )
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        changed = [f.name for f in fields(ModelConfig) if getattr(self, f.name) != f.default]
        needs_peft = ("lora_", "use_rslora", "use_dora", "load_in_")
        for needed, starts in (("use_peft", needs_peft), ("load_in_4bit", ("bnb_", "use_bnb_"))):
            names = [name for name in changed if name.startswith(starts)]
            if names and not getattr(self, needed):
                raise ValueError(
                    f"{', '.join(names)}: expected {needed} with it, got {needed}=False"
                )
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit, load_in_4bit: expected at most one of them, got both")
        check_name("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("nf4", "fp4"))
        if self.use_peft and not is_peft_available():
            raise ValueError(
                f"use_peft: expected the package peft to be installed; {install_command('peft')}"
            )
        if (self.load_in_4bit or self.load_in_8bit) and not is_bitsandbytes_available():
            raise ValueError(
                "load_in_4bit, load_in_8bit: expected the package bitsandbytes to be installed"
            )


def loading_options(model_args: ModelConfig) -> dict[str, Any]:
    """Return arguments of ``from_pretrained``: those that are not its defaults here."""
    given = {
        "revision": (model_args.model_revision, "main"),
        "dtype": (model_args.dtype, "float32"),
        "attn_implementation": (model_args.attn_implementation, None),
    }
    return {name: value for name, (value, default) in given.items() if value != default}


def get_peft_config(model_args: ModelConfig) -> Any | None:
    """Return the adapter's configuration; None without ``use_peft``."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    modules: Any = model_args.lora_target_modules
    if modules is not None and len(modules) == 1:
        [modules] = modules  # "all-linear" is a name of peft's only outside a list
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(
    model_args: ModelConfig, args: GRPOConfig | None = None
) -> BitsAndBytesConfig | None:
    """Return how the base model is quantised; None if it is not.

    4-bit weights are multiplied in the dtype of all layers: bf16 with ``args.bf16``, else the
    model's.
    """
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        return None
    own = {} if args is None else options("model_init_kwargs", args.model_init_kwargs)
    dtype = own.get("dtype", model_args.dtype)
    in_bf16 = args is not None and args.bf16
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype="bfloat16" if in_bf16 else None if dtype == "auto" else dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


@dataclass
class RunArguments(ScriptArguments, DatasetMixtureConfig, ModelConfig):
    """Rewards, tools and modules of a run, beside its model and its dataset.

    Construction imports ``import_modules``, so it comes before that of GRPOConfig, which knows only
    the losses that are registered by then.
    """

    reward_funcs: list[str] | None = None
    reward_model_name_or_path: str | None = None
    tools: list[str] | None = None
    environment_factory: str | None = None
    rollout_func: str | None = None
    advantages: str | None = None
    import_modules: list[str] | None = None
    eval_dataset_name: str | None = None

    def __post_init__(self) -> None:
        alone = bool(self.environment_factory)  # which may have prompts and a reward
        for name, given in {
            "model_name_or_path": bool(self.model_name_or_path),
            "dataset_name": bool(self.dataset_name or self.datasets) or alone,
        }.items():
            if not given:
                raise ValueError(f"--{name} is required")
        if self.ignore_bias_buffers:
            raise ValueError(
                "ignore_bias_buffers: expected False, no model here needs it, got True"
            )
        if not self.datasets and (self.streaming or self.test_split_size is not None):
            name = "streaming" if self.streaming else "test_split_size"
            raise ValueError(
                f"{name}: expected it with datasets, got {getattr(self, name)} without; of "
                "dataset_name there are dataset_streaming and eval_dataset_name"
            )
        ModelConfig.__post_init__(self)
        DatasetMixtureConfig.__post_init__(self)
        if os.getcwd() not in sys.path:
            # modules beside the user's data; at the end: a file there replaces no installed module
            sys.path.append(os.getcwd())
        for name in self.import_modules or ():
            load_module(name, "--import_modules")

    @property
    def rewards(self) -> list[str]:
        """Reward functions and models, by name."""
        first = self.reward_model_name_or_path
        return ([first] if first else []) + (self.reward_funcs or [])


describe_fields(RunArguments)
