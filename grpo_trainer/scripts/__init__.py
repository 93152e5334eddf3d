"""What training scripts are made of, under TRL's names: a parser, and arguments for it to read.

May know ``common``, ``config`` and ``data``.
"""

from grpo_trainer.scripts.datasets import (
    DatasetConfig,
    DatasetMixtureConfig,
    ScriptArguments,
    get_dataset,
)
from grpo_trainer.scripts.model_config import (
    ModelConfig,
    get_peft_config,
    get_quantization_config,
    loading_options,
)
from grpo_trainer.scripts.parser import TrlParser
from grpo_trainer.scripts.run_file import RunFile
