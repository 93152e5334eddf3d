"""One task for every trainer that is compared: a small real-shaped model, settings and a batch."""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM

from benchmarks.check import StepResult, take_gradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer

PAD, EOS, FIRST_WORD = 0, 1, 2
SEED = 0
_POSITIONS = 32768  # of the real model
_MICRO_BATCHES = 2  # of a step
_NOISE = 0.1  # of the old log-probabilities: no ratio comes near its bound, where rounding decides
Batch = dict[str, Tensor]  # a prepared micro-batch, as TRL's ``compute_loss`` takes it
Step = tuple[Callable[[], Tensor], Sequence[Tensor]]  # a loss (), and the leaves


@dataclass(frozen=True)
class TrainingConfig:
    """Shapes of the model and of one optimisation step, as a case of a benchmark."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompts: int  # different prompts of a step
    group: int  # completions of a prompt
    prompt_tokens: int
    completion_tokens: int  # of every completion, so that all trainers have the same work
    dtype: str = "fp32"

    @property
    def sequences(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    @property
    def micro_batch(self) -> int:
        """Completions of a micro-batch."""
        return self.sequences // _MICRO_BATCHES

    @property
    def tokens(self) -> int:
        """Completion tokens of a step: those in the loss."""
        return self.sequences * self.completion_tokens

    @property
    def model(self) -> str:
        return (
            f"qwen2-shaped, {self.layers} layers, hidden {self.hidden}, "
            f"vocabulary {self.vocabulary}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the facts as a result file holds them."""
        names = ("model", "dtype", "sequences", "prompt_tokens", "completion_tokens")
        found = {name: getattr(self, name) for name in names}
        return {**found, "micro_batches": _MICRO_BATCHES, "tokens": self.tokens}

    def __str__(self) -> str:
        return self.name


SIZES = {
    config.name: config
    for config in (
        TrainingConfig("tiny", 1, 32, 64, 2, 1, 512, 2, 4, 4, 8),
        TrainingConfig("quick", 2, 128, 512, 4, 2, 8192, 2, 4, 16, 32),
        # the width, the head and the tied embeddings of Qwen2.5-0.5B, which has 24 layers
        TrainingConfig("full", 2, 896, 4864, 14, 2, 151936, 2, 4, 32, 64),
        TrainingConfig("full-gpu", 4, 896, 4864, 14, 2, 151936, 8, 8, 64, 256),
        # what an update of an engine's weights costs depends on the size
        TrainingConfig("middle", 4, 512, 2048, 8, 2, 32000, 2, 4, 32, 32),
        TrainingConfig("large", 2, 896, 4864, 14, 2, 151936, 2, 4, 32, 32),
        TrainingConfig("middle-gpu", 12, 896, 4864, 14, 2, 151936, 8, 8, 64, 256),
        # all of Qwen2.5-0.5B's shape
        TrainingConfig("qwen2.5-0.5b-gpu", 24, 896, 4864, 14, 2, 151936, 8, 8, 64, 64),
        # the width of Qwen2.5-1.5B
        TrainingConfig("large-gpu", 14, 1536, 8960, 12, 2, 151936, 8, 8, 64, 256),
    )
}


def sized(name: str, device: str) -> TrainingConfig:
    """Return a size in fp32, or in bf16 autocast over fp32 weights where the GPU has it."""
    wide = device != "cuda" or not torch.cuda.is_bf16_supported()
    return replace(SIZES[name], dtype="fp32" if wide else "bf16")


def make_model(config: TrainingConfig) -> PreTrainedModel:
    """Return the initial policy: fp32, the same random weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=config.vocabulary,
                hidden_size=config.hidden,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=_POSITIONS,
                tie_word_embeddings=True,
                pad_token_id=PAD,
                eos_token_id=EOS,
                bos_token_id=None,
            )
        )


def make_tokenizer(config: TrainingConfig) -> PreTrainedTokenizerFast:
    """Return one word per entry of the vocabulary: ``w0 w1 w2 ...``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    unknown = f"w{FIRST_WORD}"
    words = {f"w{index}": index for index in range(config.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}", unk_token=unknown
    )


def make_texts(config: TrainingConfig, count: int, length: int, seed: int) -> list[str]:
    """Return so many random texts of one length."""
    generator = torch.Generator().manual_seed(seed)
    shape = count, length
    ids = torch.randint(FIRST_WORD, config.vocabulary, shape, generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def _reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward differently within a group, so that hardly any advantage is 0."""
    return [sum(ids) % 1009 / 1009 for ids in completion_ids]


def build(
    package: str,
    config: TrainingConfig,
    device: str,
    steps: int,
    trainer: Any = None,
    peft_config: Any = None,
    **changes: Any,
) -> Trainer:
    """Build the GRPOTrainer of a package, or a class that stands for it, with data for ``steps``.

    ``changes``: other values for some of the settings.
    """
    from datasets import Dataset

    library = importlib.import_module(package)
    folder = tempfile.TemporaryDirectory()
    settings = {
        "output_dir": folder.name,
        "use_cpu": device == "cpu",
        "bf16": config.dtype == "bf16",
        "gradient_checkpointing": False,
        "optim": "adamw_torch",
        "learning_rate": 1e-6,
        "max_steps": steps,
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "num_generations": config.group,
        "max_completion_length": config.completion_tokens,
        # no completion ends early
        "generation_kwargs": {"min_new_tokens": config.completion_tokens},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "num_iterations": 1,
        "scale_rewards": "group",
        "shuffle_dataset": False,
        "logging_steps": 1,  # whose cost belongs to a step
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": SEED,
    }
    prompts = make_texts(config, config.prompts * steps, config.prompt_tokens, SEED)
    built = (trainer or library.GRPOTrainer)(
        peft_config=peft_config,
        model=make_model(config),
        reward_funcs=_reward,
        args=library.GRPOConfig(**{**settings, **changes}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(config),
    )
    built.remove_callback(PrinterCallback)
    built.current_gradient_accumulation_steps = _MICRO_BATCHES  # also before it trains
    built.folder = folder  # it goes when the trainer does
    return built


def step_of(trainer: Any, inputs: Any) -> Step:
    """Return the step of a trainer on a prepared micro-batch; it needs no ``train``."""

    def loss() -> Tensor:
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(trainer.model_wrapped, copy.copy(inputs))

    return loss, [x for x in trainer.model.parameters() if x.requires_grad]


def take_step(step: Step) -> StepResult:
    """Return the loss and the gradient; the leaves are left without."""
    loss, leaves = step
    value = loss()
    value.backward()
    return value.detach(), take_gradient(leaves)


def make_batch(config: TrainingConfig, model: PreTrainedModel, device: str) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    rows, prompt = config.micro_batch, config.prompt_tokens
    shape = rows, prompt + config.completion_tokens
    ids = torch.randint(FIRST_WORD, config.vocabulary, shape, generator=generator).to(device)
    prompts, completions = ids[:, :prompt], ids[:, prompt:]
    with torch.no_grad():
        logprobs = logprobs_of(model, ids, prompt)
    noise = (2 * torch.rand(logprobs.shape, generator=generator) - 1) * _NOISE
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-0.7, 1.7, rows, device=device),  # no mean of 0: no loss of 0
        "old_per_token_logps": logprobs + noise.to(device),
        "num_items_in_batch": torch.tensor(float(config.tokens), device=device),  # of the step
    }


def logprobs_of(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:  # (B, L) -> (B, C)
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)
