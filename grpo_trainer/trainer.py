"""GRPOTrainer: generate, score, compare within groups, and take fused policy-gradient steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, set_seed

from grpo_kernels import LossConfig, linear_policy_loss
from grpo_kernels.losses import Metrics
from grpo_trainer.agents import EnvironmentFactory
from grpo_trainer.assemble import (
    MakePrompts,
    assemble_models,
    assemble_rollouts,
    check_inputs,
    check_policy,
    make_callbacks,
    make_prompts,
)
from grpo_trainer.base import BaseTrainer
from grpo_trainer.config import GRPOConfig, Settings, backward_options, check_arguments
from grpo_trainer.data import (
    Column,
    Media,
    MicroBatch,
    ProcessingClass,
    PromptDataset,
    RolloutBuffer,
    Row,
    Sample,
    Scored,
    Term,
    own_copy,
)
from grpo_trainer.engines import RolloutEngine
from grpo_trainer.experience import (
    AdaptiveEntropy,
    AdvantageFunction,
    Plan,
    RolloutFunction,
    align_columns,
    any_process,
    check_samples,
    deal,
    fill,
    fill_columns,
    leave_out_inactive,
    measure,
    rollout_metrics,
    samples_of,
    share,
)
from grpo_trainer.monitor import (
    CompletionLog,
    MetricLog,
    Recipe,
    close_progress,
    phase,
    show_progress,
    value_metric,
)
from grpo_trainer.policy import (
    OptimizerClass,
    Packing,
    TeacherSource,
    load_policy,
    load_processing_class,
    policy_loss_of,
    with_learning_rate,
)
from grpo_trainer.rewards import RewardLog, RewardSource, Tokenizers, columns_of, score
from grpo_trainer.trl_names import ALIASES, TrlNames, check_overrides


class GRPOTrainer(TrlNames, BaseTrainer):
    """Trains a causal language model with a GRPO-family loss.

    Args:
        model: a model, or its name or folder.
        reward_funcs: callables ``(prompts, completions, completion_ids, **columns,
            trainer_state, log_extra, log_metric) -> list of numbers or None``, plain or ``async``,
            reward models (modules, folders, hub ids), names of built-in rewards, import paths
                ``package.module.function``, or a list of these. None: the environments' rewards.
        args: the configuration.
        train_dataset: rows with a ``prompt`` (text, or messages for the chat template); reward
            functions get the other columns. A streaming dataset needs ``max_steps`` and is read
            repeatedly; ``shuffle_dataset`` shuffles it in a buffer. With environments, ``prompt``
            is optional; with one kind of environment and ``max_steps``, so is the dataset.
        eval_dataset: the same for evaluation, or a dictionary of datasets.
        processing_class: the tokenizer, or the processor of a model that accepts images. Default:
            the model's.
        reward_processing_classes: tokenizers of reward models, one per reward function. Default,
            and for each None: the reward model's own.
        callbacks, optimizers, optimizer_cls_and_kwargs: as in ``transformers.Trainer``; the last
            one uses ``learning_rate`` unless it sets ``lr``.
        quantization_config: how a model given by name is quantized; needs ``peft_config``.
        peft_config: a new adapter, such as ``peft.LoraConfig``; only the adapter is trained and
            saved.
        tools: functions, plain or ``async``, that the model can call; with type hints and a
            docstring that describes each argument.
        rollout_func: a function ``(prompts, trainer)`` that returns the completions in a
            dictionary.
        environment_factory: creates an environment for each completion: an object with a method
            ``reset`` and public methods that the model can call; or a dictionary of factories.
        rollout_engine: samples the completions. Default: the engine that ``args`` selects.
        advantages: compares the completions, instead of ``scale_rewards`` and
            ``multi_objective_aggregation``: a name (``rloo``, ``reinforce_plus_plus``, ``maxrl``,
                or
            ``pass_at_K`` with a number K), or a callable of ``rewards`` (N, F), ``weights`` (F,)
            and ``group_size``, plus, if it accepts them, ``prompts``, ``completions`` and
            ``completion_ids``, lists of N. Groups are consecutive. It returns N numbers, or one
            list per completion with a number per token.
        teacher: the teacher for ``args.distillation``, instead of ``args.teacher``: a model, its
            name or folder, the name of an adapter of the policy, the address of a vLLM server, or
            a function of lists of token ids that returns the log-probability of every token except
            the first. With a teacher, reward functions are optional.
        prompts: chooses the training prompts: a class or function that is called with the
            dataset's :class:`Prompts` (None without a dataset) when training starts, and returns
            the run's.
        columns: functions of a :class:`MicroBatch` and the policy that set fields of the batch
            before its loss; see :class:`Column`.
        terms: instances of subclasses of :class:`Term`; their losses are added.

    Raises:
        ValueError: an argument is wrong, or a combination is not supported.
    """

    _buffer: RolloutBuffer  # holds the current generation batch
    _columns: list[Column] | None = None  # in order; None until the policy is checked
    _entropy: AdaptiveEntropy | None = None
    _completions: CompletionLog | None = None
    _completed_at: float | None = None  # when the last generation batch was complete
    _reward_log: RewardLog  # for the completions that are being scored

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardSource | Sequence[RewardSource] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: PromptDataset | None = None,
        eval_dataset: PromptDataset | dict[str, PromptDataset] | None = None,
        processing_class: ProcessingClass | None = None,
        reward_processing_classes: Tokenizers = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        quantization_config: Any | None = None,
        peft_config: Any | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: EnvironmentFactory | None = None,
        rollout_engine: RolloutEngine | None = None,
        advantages: AdvantageFunction | str | None = None,
        teacher: TeacherSource | None = None,
        prompts: MakePrompts | None = None,
        columns: Sequence[Column] = (),
        terms: Sequence[Term] = (),
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
    ) -> None:
        check_overrides(type(self), GRPOTrainer)
        args = args if args is not None else GRPOConfig()
        check_arguments(args, processing_class)
        self._inputs = inputs = check_inputs(
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            tools=tools,
            environment_factory=environment_factory,
            rollout_func=rollout_func,
            rollout_engine=rollout_engine,
            advantages=advantages,
            teacher=teacher,
            prompts=prompts,
            columns=columns,
            terms=terms,
        )
        optimizer_class = with_learning_rate(optimizer_cls_and_kwargs, optimizers, args)
        self.settings = Settings(args)
        set_seed(args.seed)  # Trainer also does, but only after an adapter has its random weights
        policy = load_policy(model, args, peft_config, quantization_config)
        super().__init__(
            model=policy,
            args=args,
            data_collator=list,
            train_dataset=inputs.train_dataset,
            eval_dataset=inputs.eval_dataset,
            processing_class=processing_class or load_processing_class(policy, args),
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_class,
            # tells Trainer that our loss is already scaled for gradient accumulation
            compute_loss_func=linear_policy_loss,
        )
        self._models = models = assemble_models(self, inputs, peft_config)
        self._placement = models.placement
        if not models.placement.late:
            self._columns = check_policy(self, models)
        self._rollouts = assemble_rollouts(self, inputs, models)
        self.rollouts = self._rollouts.sampler
        # as loaded: under FSDP2 and DeepSpeed, mixed precision casts weights when they are placed
        dtypes = sorted({str(weight.dtype) for weight in policy.parameters()})
        self.recipe = Recipe(
            rewards=self._rollouts.compare.weight_of,
            engine=self.rollouts.name,
            hooks=inputs.hooks
            | {"dtypes of the model": dtypes, "optimizer_cls_and_kwargs": optimizer_class},
        )
        if args.log_completions:  # before other callbacks, which may read the files
            self._completions = CompletionLog(args)
            self.callback_handler.callbacks.insert(0, self._completions)
        for callback in make_callbacks(self, models):
            self.add_callback(callback)
        show_progress(self)
        self._start()

    @property
    def loss_config(self) -> LossConfig:
        """The loss of the current generation batch."""
        return self.settings.loss

    def change(self, **values: Any) -> None:
        """Change settings during a run: ``trainer.change(beta=0.02)``.

        You can change settings of sampling (``temperature``, ``top_p``, ``top_k``, ``min_p``,
        ``repetition_penalty``) and of the loss (``beta``, ``epsilon``, ``epsilon_high``,
        ``entropy_coef``, ``off_policy_mask_threshold``, ``top_entropy_quantile``). Changes take
        effect with the next generation batch, and checkpoints store them.

        Raises:
            ValueError: the run cannot continue with a value, or a setting cannot change.
        """
        self.settings.change(**{ALIASES.get(name, name): value for name, value in values.items()})

    # Experience: prompts, completions, rewards, advantages, micro-batches. A generation batch is
    # computed once; its micro-batches are used num_iterations times.

    def _batches_of(self, inputs: Any) -> Any:
        """Return the micro-batches of a training or evaluation step."""
        if isinstance(inputs, MicroBatch):
            return inputs
        if self.model.training:
            return self._buffer.current(self._generation_batch)
        return self._evaluation_batch(inputs)

    def _generation_batch(self) -> list[MicroBatch]:
        """Return the micro-batches of the next prompts."""
        args, metrics, prompts = self.args, self._metrics[True], self._prompts
        assert prompts is not None  # without prompts the loop would not have started
        self._follow_settings()

        def next_scored(count: int) -> Scored:
            samples = prompts.next(count)
            if self._inputs.prompts is not None:
                expected = count * args.num_generations // self.accelerator.num_processes
                environments = self._inputs.environments is not None
                check_samples(samples, expected, self.rollouts, environments)
            return self._scored(samples, args.num_generations)

        with phase("score"):
            batch = next_scored(args.prompts_per_generation)
            if args.dynamic_sampling:
                compare = self._rollouts.compare
                batch, counts = fill(batch, next_scored, compare, args, self.accelerator)
                metrics.add(counts)
            prompts.scored(batch)
            metrics.add(self._rate(batch.samples))
        self.state.num_input_tokens_seen += int(batch.num_tokens)
        return self._micro_batches(batch, self._rollouts.plan)

    def _evaluation_batch(self, rows: list[Row]) -> MicroBatch:
        """Return one micro-batch of this process's rows; groups may span processes."""
        if not self.is_in_train:
            self._follow_settings()
        size = self.args.eval_group_size
        batch = self._scored(samples_of(rows, Media.of(self.args)), size)
        plan = replace(self._rollouts.plan, steps=1, accumulated=1, budget=None, group_size=size)
        [micro_batch] = self._micro_batches(batch, plan)
        return micro_batch

    def _follow_settings(self) -> None:
        self.settings.take_effect()
        self.rollouts.follow(self.settings.in_effect)

    def _scored(self, samples: list[Sample], group_size: int) -> Scored:
        """Complete the samples that are not complete, score all, and compare within groups."""
        accelerator, metrics = self.accelerator, self._metrics[self.model.training]
        new = [sample for sample in samples if not sample.completion_ids]
        for sample in samples:
            if not sample.inputs and sample.row is not None:  # the user's own sample, or replayed
                sample.inputs = own_copy(sample.row) | sample.columns
        if any_process(bool(new), accelerator):
            metrics.add(self._rollouts.complete(new))
        if self._inputs.prompts is not None:
            align_columns(samples, self.args.use_sampling_mask, accelerator)
        self._reward_log = log = RewardLog(len(samples))
        environments = self._inputs.environments
        with nullcontext() if environments is None else environments.scoring(samples):
            rewards = self._calculate_rewards(
                [sample.inputs for sample in samples],
                [sample.prompt for sample in samples],
                [sample.completion for sample in samples],
                [sample.completion_ids for sample in samples],
            )
        rewards = self._rollouts.compare.checked(rewards, len(samples))
        for index, sample in enumerate(samples):
            sample.inputs = {}
            sample.extra = {name: values[index] for name, values in log.columns.items()}
            sample.left_out = self.args.mask_truncated_completions and sample.truncated
        prompts, lengths, truncated = measure(samples, accelerator).unbind(1)
        compared = self._rollouts.compare(rewards, samples, group_size)
        names = self.reward_func_names
        metrics.add(rollout_metrics(names, rewards, compared, lengths, truncated))
        metrics.add(log.metrics(accelerator))
        own = share(len(rewards), accelerator)
        return Scored(samples, rewards, compared, prompts.sum() + lengths.sum(), own)

    def _calculate_rewards(
        self,
        inputs: list[Row],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:  # (N, F)
        """Return the rewards of all processes' completions by each function; NaN: not applicable.
        A subclass may change them. The arguments belong to this process."""
        arguments = columns_of(inputs) | {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids_list,
            "trainer_state": self.state,
            "log_extra": self._reward_log.log_extra,
            "log_metric": self._reward_log.log_metric,
        }
        rewards = score(self._inputs.rewards, len(inputs), arguments)
        return self.accelerator.gather(rewards.to(self.accelerator.device))

    def _micro_batches(self, batch: Scored, plan: Plan) -> list[MicroBatch]:
        """Split a scored batch into micro-batches, and compute their columns."""
        metrics = self._metrics[self.model.training]
        if self._completions is not None:
            self._completions.add(batch, self.reward_func_names, self.model.training)
        assert self._columns is not None  # set when the policy is checked
        packing = next((one for one in self._columns if isinstance(one, Packing)), None)
        with phase("score"):
            batches, dealt = deal(batch, plan, self.accelerator, packing)
        metrics.add(dealt)
        for micro_batch in batches:
            metrics.add(fill_columns(micro_batch, self._columns, self.model))
        if self.loss_config.exclude_zero_variance:
            leave_out_inactive(batches, plan, self.accelerator)
        return batches

    def _rate(self, samples: list[Sample]) -> Metrics:
        """Return the completions' tokens per second since the previous generation batch."""
        before, self._completed_at = self._completed_at, time.perf_counter()
        if before is None:
            return Metrics({})
        tokens = self.accelerator.num_processes * sum(sum(one.by_policy) for one in samples)
        rate = tokens / (self._completed_at - before)
        return value_metric("completions/tokens_per_second", rate, self.accelerator.device)

    # The loss, and the step.

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        if return_outputs:
            raise ValueError("return_outputs: expected False (there are no logits), got True")
        return self._compute_loss(model, inputs)

    def _compute_loss(self, model: nn.Module, inputs: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch, scaled for gradient accumulation; subclasses may add to
        it."""
        training = model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        scale = self._entropy.scale if self._entropy is not None else None
        loss, metrics = policy_loss_of(
            model,
            inputs,
            inputs.token_batch(steps, scale),
            self.loss_config,
            options=backward_options(self.args),
            terms=self._models.terms,
            policy=self.model,
        )
        self._metrics[training].add(metrics)
        if self._entropy is not None and training:
            self._entropy.add(metrics)
        return loss

    def training_step(
        self, model: nn.Module, inputs: list[int], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        metrics, step = self._metrics[True], super().training_step
        model.train()  # like Trainer, but before completions are sampled
        self.optimizer.train()
        with metrics.timing(), phase("loss"):
            *others, last = self._prepare_inputs(inputs)
            with self._placement.accumulating(model):
                losses = [step(model, batch, num_items_in_batch) for batch in others]
            loss = torch.stack([*losses, step(model, last, num_items_in_batch)]).sum()
        self._buffer.position += 1
        stepping = self.accelerator.sync_gradients  # whether the optimizer steps now
        metrics.add(value_metric("loss", loss, loss.device, count=int(stepping)))
        if stepping:
            metrics.end_step()
            if self._entropy is not None:
                metrics.add(self._entropy.step())
            elif self.loss_config.entropy_coef != 0:
                coef = self.loss_config.entropy_coef
                metrics.add(value_metric("entropy_coef", coef, loss.device))
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: list[Row], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch)
        # Trainer's own mean uses the dataset's length as the number of completions
        self._metrics[False].add(value_metric("loss", loss, loss.device))
        return loss, None, None

    # A run.

    def _start(self) -> None:
        args, models = self.args, self._models
        self._metrics = {True: MetricLog(self.accelerator), False: MetricLog(self.accelerator)}
        self._completed_at = None
        self._buffer = RolloutBuffer(self._rollouts.plan.steps, args.num_iterations)
        self._states = {
            "slices": self._buffer,
            "metrics": self._metrics[True],
            "settings": self.settings,
        }
        self._shared_states = {}
        if self._completions is not None:
            self._completions.clear()
            self._states["completions"] = self._completions
        if models.reference is not None:
            states = self._states if models.placement.sharded else self._shared_states
            states["reference"] = models.reference
        if args.use_adaptive_entropy:
            self._states["entropy"] = self._entropy = AdaptiveEntropy(args, self.accelerator)
        self._prompts = make_prompts(self, self._inputs, self._rollouts, self._batches_left)
        if self._prompts is not None:
            self._states["prompts"] = self._prompts

    def _batches_left(self) -> int:
        """Return the number of generation batches after the current one."""
        current = self._buffer.position // self.args.micro_steps_per_generation
        return self._generation_batches() - current - 1

    def _stop(self) -> None:
        close_progress(self)
        self.rollouts.cancel()  # pending completions are not trained on

    def _placed(self) -> None:
        self.rollouts.outdated()
        if self._columns is None:
            self._columns = check_policy(self, self._models)
