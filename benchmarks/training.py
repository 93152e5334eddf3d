"""One task for all trainers: a small model with real shapes, settings, and a batch."""

from __future__ import annotations

import copy
import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.models.qwen2 import modeling_qwen2

from benchmarks.check import StepResult, take_gradient
from benchmarks.providers.base import Provider

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer

PAD, EOS, FIRST_WORD = 0, 1, 2
SEED = 0
_POSITIONS = 32768  # of the real model
_MICRO_BATCHES = 2  # of a step
_NOISE = (
    0.1  # of the old log-probabilities, so that no ratio is near its bound, where rounding decides
)
# of every run that is measured
QUIET = {
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "logging_steps": 1,  # the cost of which belongs to a step
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
Batch = dict[str, Tensor]  # a prepared micro-batch, as TRL's ``compute_loss`` expects it
Step = tuple[Callable[[], Tensor], Sequence[Tensor]]  # a loss (), and the leaves


@dataclass(frozen=True)
class TrainingConfig:
    """Shapes of the model and of one optimizer step, as a case of a benchmark."""

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
        """Completion tokens of a step, all of them in the loss."""
        return self.sequences * self.completion_tokens

    @property
    def model(self) -> str:
        return (
            f"qwen2-shaped, {self.layers} layers, hidden {self.hidden}, "
            f"vocabulary {self.vocabulary}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the facts for a result file."""
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
        # the cost of updating an engine's weights depends on the size
        TrainingConfig("middle", 4, 512, 2048, 8, 2, 32000, 2, 4, 32, 32),
        TrainingConfig("large", 2, 896, 4864, 14, 2, 151936, 2, 4, 32, 32),
        TrainingConfig("middle-gpu", 12, 896, 4864, 14, 2, 151936, 8, 8, 64, 256),
        # the whole shape of Qwen2.5-0.5B
        TrainingConfig("qwen2.5-0.5b-gpu", 24, 896, 4864, 14, 2, 151936, 8, 8, 64, 64),
        # the width of Qwen2.5-1.5B
        TrainingConfig("large-gpu", 14, 1536, 8960, 12, 2, 151936, 8, 8, 64, 256),
    )
}


def sized(name: str, device: str) -> TrainingConfig:
    """Return a size in fp32, or in bf16 autocast over fp32 weights if the GPU has bf16."""
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
    """Return one word per entry of the vocabulary, after two special ones: ``w2 w3 w4 ...``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(FIRST_WORD, config.vocabulary)}
    # a special word must not be the beginning of another word, which would be split
    words |= {"<pad>": PAD, "<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"w{FIRST_WORD}"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_texts(config: TrainingConfig, count: int, length: int, seed: int) -> list[str]:
    """Return random texts of one length."""
    generator = torch.Generator().manual_seed(seed)
    shape = count, length
    ids = torch.randint(FIRST_WORD, config.vocabulary, shape, generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def _reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Give different rewards in a group, so that few advantages are 0."""
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
    """Build the GRPOTrainer of a package, or the class ``own``, with data for ``steps``.

    ``changes``: changed settings.
    """
    from datasets import Dataset

    library = importlib.import_module(package)
    folder = tempfile.TemporaryDirectory()
    settings = QUIET | {
        "output_dir": folder.name,
        "use_cpu": device == "cpu",
        "bf16": config.dtype == "bf16",
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
    built.folder = folder  # deleted with the trainer
    return built


_BODY = "Liger's norms, rotary embedding, and MLP in the body"  # off the head in both


def _trainer(name: str, note: str, package: str, liger: bool = False) -> Provider:
    """Return a provider that builds a trainer for a size, a device, and a number of steps."""
    requires = [*["trl"] * (package == "trl"), *["liger-kernel"] * liger]
    return Provider(
        name=name,
        note=note,
        run=partial(build, package, **{"use_liger_kernel": True} if liger else {}),
        packages=("transformers", "accelerate", "datasets", *requires),
        gpu=liger,
    )


TRAINERS = {
    provider.name: provider
    for provider in (
        _trainer("ours", "grpo_trainer.GRPOTrainer", "grpo_trainer"),
        _trainer("ours-liger", f"the same with {_BODY}", "grpo_trainer", liger=True),
        _trainer("trl", "trl.GRPOTrainer, its chunked head", "trl"),
        _trainer("trl-liger", f"the same with use_liger_kernel: {_BODY}", "trl", liger=True),
    )
}


class Watch(TrainerCallback):
    """Records each step of a trainer: its logs, its time, and the peak of GPU memory."""

    def __init__(self, trainer: Any, device: str, seed: int = 0) -> None:
        self.logs: list[dict[str, Any]] = []
        self.seconds: list[float] = []  # of a step with its generation and logging
        self.generate: list[float] = []  # the part of rollout and scoring
        self.peak = 0  # bytes of the GPU
        self.train_peak = 0  # extra memory of the rest of the last step
        self._cuda, self._seed = device == "cuda", seed
        self._start = self._generated = 0.0
        # generates at a step's first call
        self._prepare, trainer._prepare_inputs = trainer._prepare_inputs, self._timed
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(
            1000 * self._seed + state.global_step
        )  # all trainers sample the same completions
        self._start, self._generated = self._clock(), 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "grad_norm" not in logs:  # the log of the end, or of an evaluation
            return
        self.seconds.append(self._clock() - self._start)
        self.generate.append(self._generated)
        self.logs.append(dict(logs))
        if self._cuda:
            most = torch.cuda.max_memory_allocated()
            self.peak, self.train_peak = max(self.peak, most), most - self._before

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del self._prepare  # it keeps the trainer's memory

    def _timed(self, inputs: Any) -> Any:
        start, first = self._clock(), self._generated == 0.0
        prepared = self._prepare(inputs)
        self._generated += self._clock() - start
        if self._cuda and first:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return prepared

    def _clock(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def train(
    provider: Provider, config: TrainingConfig, device: str, steps: int, **changes: Any
) -> Watch:
    """Build a trainer and train for some steps, so that trainers run their real loops in turns."""
    with patch.dict(vars(modeling_qwen2)):  # Liger replaces names of the model's module
        torch.manual_seed(SEED)  # of an adapter's factors
        trainer = provider.run(config, device, steps, **changes)
        watch = Watch(trainer, device)
        trainer.train()
    return watch


def step_of(trainer: Any, inputs: Any) -> Step:
    """Return the step of a trainer on a prepared micro-batch, without ``train``."""

    def loss() -> Tensor:
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(trainer.model_wrapped, copy.copy(inputs))

    return loss, [x for x in trainer.model.parameters() if x.requires_grad]


def take_step(step: Step) -> StepResult:
    """Return the loss and the gradient, and clear the gradients of the leaves."""
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
        "advantages": torch.linspace(
            -0.7, 1.7, rows, device=device
        ),  # the mean isn't 0, so the loss isn't 0
        "old_per_token_logps": logprobs + noise.to(device),
        "num_items_in_batch": torch.tensor(float(config.tokens), device=device),  # of the step
    }


def logprobs_of(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:  # (B, L) -> (B, C)
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)
