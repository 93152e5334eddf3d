"""GRPOTrainer: generate, score, compare within groups, and take fused policy-gradient steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from grpo_kernels import linear_logprobs, linear_policy_loss
from grpo_kernels.modeling import HeadFn, LMHead, add_fused_head
from grpo_trainer.completions import CompletionLog
from grpo_trainer.config import GRPOConfig, loss_config
from grpo_trainer.data import check_datasets
from grpo_trainer.experience import Collector
from grpo_trainer.metrics import MetricLog, value_metric
from grpo_trainer.microbatch import MicroBatch
from grpo_trainer.policy import load_policy, load_tokenizer
from grpo_trainer.reference import frozen_reference
from grpo_trainer.rewards import resolve_rewards
from grpo_trainer.rewards.resolve import RewardSource
from grpo_trainer.rollout import TransformersEngine
from grpo_trainer.sampling import RepeatSampler

Rows = list[dict[str, Any]]


class GRPOTrainer(Trainer):
    """Trains a causal language model with a GRPO-family loss.

    Args:
        model: a model, or its name or folder.
        reward_funcs: callables ``(prompts, completions, completion_ids, **columns,
            trainer_state) -> list of numbers or None``, names of built-in rewards, import paths
            ``package.module.function``, or several of them.
        args: the configuration.
        train_dataset: rows with a ``prompt`` (text, or messages for the chat template); reward
            functions get the other columns.
        eval_dataset: the same, or a dictionary of them.
        processing_class: the tokenizer. Default: the one that belongs to the model.
        callbacks, optimizers: as in ``transformers.Trainer``.

    Raises:
        ValueError: an argument is wrong, or an unsupported combination is asked for.
    """

    _position: int  # micro-steps taken; says which slice is next and when to generate
    _buffer: list[MicroBatch] | None  # the slices of the current generation batch
    _seconds: float  # of the optimizer step so far

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardSource | Sequence[RewardSource],
        args: GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
    ) -> None:
        args = args if args is not None else GRPOConfig()
        check_datasets(train_dataset, eval_dataset, args.prompts_per_generation)
        rewards = resolve_rewards(reward_funcs)
        self.loss_config = loss_config(args)
        policy = load_policy(model, args)
        self.ref_model = frozen_reference(policy) if self.loss_config.beta != 0 else None
        add_fused_head(policy)
        super().__init__(
            model=policy,
            args=args,
            data_collator=_rows,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class or load_tokenizer(policy, args),
            callbacks=callbacks,
            optimizers=optimizers,
            # our loss is already scaled for gradient accumulation; Trainer takes that from here
            compute_loss_func=linear_policy_loss,
        )
        self._check_placement()
        if self.ref_model is not None:
            self.ref_model = self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)
        engine = TransformersEngine(lambda: self.model, self.processing_class, args)
        self._collector = Collector(args, self.accelerator, self.processing_class, engine, rewards)
        self._metrics = {True: MetricLog(self.accelerator), False: MetricLog(self.accelerator)}
        folder = Path(args.output_dir) / "completions"
        to_print = args.num_completions_to_print
        self._completions = CompletionLog(folder, to_print) if args.log_completions else None
        self._reset_position()

    # The data: a loader batch is this process's share of a whole generation batch.

    def get_train_dataloader(self) -> DataLoader:
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size * self.args.steps_per_generation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> RepeatSampler:
        args = self.args
        return RepeatSampler(
            len(train_dataset if train_dataset is not None else self.train_dataset),
            args.num_generations,
            prompts_per_batch=args.prompts_per_generation,
            repeats=args.micro_steps_per_generation,
            seed=args.seed if args.shuffle_dataset else None,
            epoch=lambda: int(self.state.epoch or 0),
        )

    def _get_eval_sampler(self, eval_dataset: Dataset) -> RepeatSampler:
        self.args.check_eval_batch()
        return RepeatSampler(len(eval_dataset), self.args.eval_group_size)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["prompt"]  # what remove_unused_columns keeps

    # The step. A generation batch is made once, then its slices are used num_iterations times.

    def training_step(
        self, model: nn.Module, inputs: Rows, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._position += 1
        self._seconds += time.perf_counter() - start
        if self.accelerator.sync_gradients:  # the optimizer steps now
            metric = value_metric("step_time", self._seconds, self.accelerator.device)
            self._metrics[True].add(metric)
            self._seconds = 0.0
        return loss

    def _prepare_inputs(self, inputs: Rows) -> MicroBatch:
        args = self.args
        if not self.model.training:
            return self._experience(inputs, args.eval_group_size, slices=1)[0]
        slices = args.steps_per_generation
        if self._buffer is None or self._position % args.micro_steps_per_generation == 0:
            self._buffer = self._experience(inputs, args.num_generations, slices)
        return self._buffer[self._position % slices]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        if return_outputs:
            raise ValueError("return_outputs: expected False (there are no logits), got True")
        training = model.training
        batch = inputs.token_batch(self.current_gradient_accumulation_steps if training else 1)

        def head_fn(hidden: Tensor, head: LMHead) -> Tensor:
            loss, metrics = linear_policy_loss(
                hidden, head.weight, batch, self.loss_config, **_head_options(head)
            )
            self._metrics[training].add(metrics)
            return loss

        return _forward(model, inputs, head_fn)

    def prediction_step(
        self, model: nn.Module, inputs: Rows, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, batch), None, None

    def _experience(self, rows: Rows, group_size: int, slices: int) -> list[MicroBatch]:
        training = self.model.training
        batches, num_tokens = self._collector.collect(
            rows,
            group_size,
            slices,
            self.state,
            self._metrics[training],
            self._completions if training else None,
        )
        if training:
            self.state.num_input_tokens_seen += num_tokens
        for batch in batches:
            if training and self._policy_moves_within_generation():
                batch.old_logprobs = self._logprobs(self.model, batch)
            if self.ref_model is not None:
                batch.ref_logprobs = self._logprobs(self.ref_model, batch)
        return batches

    def _policy_moves_within_generation(self) -> bool:
        """Whether a slice can be used by a later policy than the one that generated it."""
        return self.args.gradient_accumulation_steps % self.args.micro_steps_per_generation != 0

    def _logprobs(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the batch's targets, (B, L), without dropout or gradient."""

        def head_fn(hidden: Tensor, head: LMHead) -> Tensor:
            temperature = self.loss_config.temperature
            options = _head_options(head)
            logprobs = linear_logprobs(
                hidden, head.weight, batch.target, temperature=temperature, **options
            ).logprobs
            assert logprobs is not None  # the default output
            return logprobs

        was_training = model.training
        model.eval()
        with torch.no_grad():
            logprobs = _forward(model, batch, head_fn)
        model.train(was_training)
        return logprobs

    # Logs and checkpoints.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training step's, neither an evaluation's nor the summary
            logs |= self._metrics[True].drain()
            logs["num_tokens"] = self.state.num_input_tokens_seen
            if self._completions is not None:
                self._completions.flush(self.state.global_step, self.is_world_process_zero())
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        drained = self._metrics[False].drain()
        output.metrics.update({f"{prefix}_{name}": value for name, value in drained.items()})
        return output

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._reset_position()
        return super().train(*args, **kwargs)

    def _reset_position(self) -> None:
        self._position = 0
        self._buffer = None
        self._seconds = 0.0

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial))
            folder = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            buffer = [asdict(batch) for batch in self._buffer or []]
            torch.save({"position": self._position, "buffer": buffer}, self._rollout_file(folder))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = self._rollout_file(Path(checkpoint))
        if not file.exists():
            raise ValueError(
                f"resume_from_checkpoint: expected {file.name} in {checkpoint} (written by a run "
                "with as many processes), got none"
            )
        saved = torch.load(file, map_location=self.accelerator.device, weights_only=True)
        self._position = saved["position"]
        self._buffer = [MicroBatch(**fields) for fields in saved["buffer"]]

    def _rollout_file(self, folder: Path) -> Path:
        return folder / f"rollouts_{self.accelerator.process_index}.pt"

    def _check_placement(self) -> None:
        if self.args.n_gpu > 1:
            raise ValueError(
                f"expected one GPU per process, got {self.args.n_gpu}; start with "
                "`accelerate launch` or set CUDA_VISIBLE_DEVICES"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("fsdp, deepspeed: expected neither (rollouts need whole parameters)")


def _rows(rows: Rows) -> Rows:
    return rows


def _forward(model: nn.Module, batch: MicroBatch, head_fn: HeadFn) -> Tensor:
    """What ``head_fn`` makes of the hidden states, computed inside the model's own forward."""
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, head_fn=head_fn)
    return output.head


def _head_options(head: LMHead) -> dict[str, Any]:
    return {"bias": head.bias, "logit_scale": head.logit_scale, "softcap": head.softcap}
