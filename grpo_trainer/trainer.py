"""GRPOTrainer: generate, score, compare within groups, and take fused policy-gradient steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, ProcessorMixin, TrainerCallback, set_seed

from grpo_kernels import LossConfig, linear_policy_loss
from grpo_kernels.hf import add_fused_head, check_fused_head
from grpo_kernels.losses import Metrics
from grpo_trainer.agents import (
    EnvironmentFactory,
    Environments,
    ToolLoop,
    make_toolbox,
    prompts_by_reset,
)
from grpo_trainer.checkpoint import ResumableTrainer
from grpo_trainer.config import GRPOConfig, backward_options, check_arguments, loss_config
from grpo_trainer.data import (
    MicroBatch,
    ProcessingClass,
    PromptDataset,
    PromptStream,
    RolloutBuffer,
    Row,
    Sample,
    check_datasets,
    check_images,
    tokenizer_of,
    unopened,
)
from grpo_trainer.engines import (
    EngineContext,
    RolloutEngine,
    Sampling,
    Source,
    make_sampler,
)
from grpo_trainer.experience import (
    AdaptiveEntropy,
    AdvantageFunction,
    BatchesAhead,
    Collector,
    Curriculum,
    RolloutFunction,
    Scored,
    check_rollout_func,
    rollout_metrics,
    samples_by,
    training_prompts,
)
from grpo_trainer.monitor import (
    REWARD_PREFIX,
    LogsRun,
    Recipe,
    close_progress,
    phase,
    show_progress,
    value_metric,
)
from grpo_trainer.policy import (
    Pack,
    Teacher,
    TeacherSource,
    base_policy,
    check_images_run,
    check_placement,
    check_processor,
    load_policy,
    load_processing_class,
    load_saved,
    make_pack,
    make_reference,
    placement_of,
    policy_loss_of,
    router_coef,
    target_logprobs,
)
from grpo_trainer.report import ReportWriter
from grpo_trainer.rewards import (
    RewardLog,
    RewardSource,
    Tokenizers,
    no_reward,
    resolve_rewards,
    score,
)
from grpo_trainer.trl_names import Settings, TrainerAttributes, check_overrides
from grpo_trainer.vllm import VLLMClient

# passed to reward functions under other names
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class GRPOTrainer(LogsRun, TrainerAttributes, ResumableTrainer):
    """Trains a causal language model with a GRPO-family loss.

    Args:
        model: a model, or its name or folder.
        reward_funcs: callables ``(prompts, completions, completion_ids, **columns,
            trainer_state, log_extra, log_metric) -> list of numbers or None``, plain or ``async``,
            reward models (modules, folders, hub ids), names of built-in rewards, import paths
            ``package.module.function``, or several of them. None: environments have them.
        args: the configuration.
        train_dataset: rows with a ``prompt`` (text, or messages for the chat template); reward
            functions get the other columns. A streaming dataset needs ``max_steps`` and comes again
            and again; ``shuffle_dataset`` shuffles it in a buffer. Environments need no
            ``prompt``, and with ``max_steps`` those of one kind no dataset.
        eval_dataset: the same, or a dictionary of them.
        processing_class: the tokenizer, or the processor of a model that takes images. Default:
            the one that belongs to the model.
        reward_processing_classes: tokenizers of reward models, one per reward function. Default,
            and None among them: the one that belongs to the model.
        callbacks, optimizers: as in ``transformers.Trainer``.
        quantization_config: how a model given by name is quantised; needs ``peft_config``.
        peft_config: a new adapter, such as ``peft.LoraConfig``: only that is trained and saved.
        tools: functions, plain or ``async``, that the model can call; with type hints, and a
            docstring that describes each argument.
        rollout_func: makes the completions: ``(prompts, trainer)`` to a dictionary.
        environment_factory: makes an environment for each completion: an object with a method
            ``reset``, whose other public methods the model can call; or a dictionary of such.
        rollout_engine: samples the completions. Default: what ``args`` asks for.
        advantages: compares the completions, in place of ``scale_rewards`` and
            ``multi_objective_aggregation``: a name (``rloo``, ``reinforce_plus_plus``, ``maxrl``,
            ``pass_at_4`` and the like), or a function, or an object to call, of ``rewards``
            (N, F), ``weights`` (F,) and ``group_size``, and, if it takes them, of ``prompts``,
            ``completions`` and ``completion_ids``, lists of N; groups are consecutive. It returns
            N numbers, or for each completion a list of one number per token.
        teacher: what ``args.distillation`` learns from, in place of ``args.teacher``: a model, its
            name or folder, the name of an adapter of the policy, the address of a vLLM server, or
            a function of lists of token ids that gives log-probabilities of all but the first.
            With one no reward function is needed.

    Raises:
        ValueError: an argument is wrong, or an unsupported combination is asked for.
    """

    _prompts: PromptStream | Curriculum  # where training takes its prompts from
    _buffer: RolloutBuffer  # of the current generation batch
    _entropy: AdaptiveEntropy | None = None
    _ahead: BatchesAhead | None = None
    _completed_at: float | None = None  # when the last generation batch was there
    _reward_log: RewardLog  # of the completions that are being scored
    _pack: Pack | None = None  # once the policy is checked

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
    ) -> None:
        check_overrides(type(self), GRPOTrainer)
        args = args if args is not None else GRPOConfig()
        check_arguments(args, processing_class)
        if train_dataset is None and environment_factory is not None:
            train_dataset = prompts_by_reset(environment_factory, args)
        train_dataset, eval_dataset = unopened(train_dataset, args), unopened(eval_dataset, args)
        check_datasets(train_dataset, eval_dataset, args, environment_factory is not None)
        self._tools = make_toolbox(tools or ())
        self._environments = None
        if environment_factory is not None:
            self._environments = Environments(environment_factory, self._tools)
        check_rollout_func(rollout_func, args, bool(self._tools or self._environments))
        self._rollout_func = rollout_func
        own = self._environments.rewards if self._environments is not None else []
        self._rewards = own
        teacher = args.teacher if teacher is None else teacher
        if teacher is not None and not (reward_funcs or own):
            reward_funcs = [no_reward]
        if reward_funcs or not own:
            given = resolve_rewards(reward_funcs or [], reward_processing_classes, args)
            self._rewards = given + own
        self._settings = Settings(args, self._go_by)
        self.loss_config = self._loss(args)
        set_seed(args.seed)  # Trainer does so too, but only after an adapter has its random weights
        policy = load_policy(model, args, peft_config, quantization_config)
        super().__init__(
            model=policy,
            args=args,
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class or load_processing_class(policy, args),
            callbacks=callbacks,
            optimizers=optimizers,
            # our loss is already scaled for gradient accumulation; Trainer takes that from here
            compute_loss_func=linear_policy_loss,
        )
        check_placement(args, self.accelerator)
        check_processor(self.processing_class, policy)
        check_images(train_dataset, eval_dataset, self.processing_class)
        self._placement = placement_of(self.accelerator)
        self._reference = make_reference(policy, args, peft_config, self._placement)
        add_fused_head(base_policy(policy))
        self._teacher = None
        if teacher is not None:
            served = isinstance(teacher, str) and teacher.startswith(("http://", "https://"))
            source = VLLMClient(str(teacher)).prompt_logprobs if served else teacher
            tokens = tokenizer_of(self.processing_class)
            self._teacher = Teacher(source, policy, args, self._placement, len(tokens))
        self._router_coef = router_coef(base_policy(policy), args)
        if not self._placement.late:
            self._check_policy()
        if self._reference is not None and args.sync_ref_model:
            self.add_callback(self._reference)
        text = policy.config.get_text_config()
        context = EngineContext(
            policy=lambda: self.model,
            processing_class=self.processing_class,
            args=args,
            accelerator=self.accelerator,
            placement=self._placement,
            positions=getattr(text, "max_position_embeddings", None),
            vocab_size=self._teacher.vocab_size if self._teacher else text.vocab_size,
        )
        self.rollouts = make_sampler(context, lambda: self.state.global_step, rollout_engine)
        names = self.reward_func_names
        self._collector = Collector(self.rollouts, names, self._source(), advantages)
        self.interaction_settings = {  # by which a resumed run knows them
            "tools": tools,
            "environment_factory": environment_factory,
            "rollout_func": rollout_func,
            "advantages": advantages,
            "teacher": getattr(teacher, "name_or_path", teacher),  # of a model
        }
        self.recipe = Recipe(rewards=self._collector.weight_of, engine=self.rollouts.name)
        if args.write_report:
            self.add_callback(ReportWriter(self))
        show_progress(self)
        self.start()

    def _loss(self, args: GRPOConfig) -> LossConfig:
        loss = loss_config(args)
        # with adaptive entropy the coefficient comes with each batch: no config changes
        return replace(loss, entropy_coef=1.0) if args.use_adaptive_entropy else loss

    def _go_by(self, args: GRPOConfig) -> None:
        """Train and sample by other arguments than the run began with."""
        self.loss_config = self._loss(args)
        context = self.rollouts.context
        self.rollouts.sampling = Sampling.from_config(
            args, context.tokenizer, self.model, context.vocab_size
        )

    def _source(self) -> Source | None:
        """Return what makes the completions; None: one call of the engine."""
        if (function := self._rollout_func) is not None:
            return partial(samples_by, lambda prompts: function(prompts, self), self.rollouts)
        if self._tools or self._environments is not None:
            return ToolLoop(self.rollouts, self._tools, self._environments)
        return None

    # The experience: draw, generate, score, compare, slice. A generation batch is made once, its
    # slices are used num_iterations times.

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the micro-batches of a micro-step, or that of an evaluation; one is ready."""
        if isinstance(inputs, MicroBatch):
            return inputs
        if self.model.training:
            return self._buffer.current(self._generation_batch)
        return self._evaluation_batch(inputs)

    def _generation_batch(self) -> list[MicroBatch]:
        """Return the micro-batches of the next prompts."""
        args, metrics = self.args, self._metrics[True]
        taken = self._buffer.position // args.micro_steps_per_generation
        left = self.generation_batches() - taken - 1
        self._settings.take_effect()
        with phase("score"):
            if self._ahead is None:
                scored = self._draw_and_score(args.prompts_per_generation)
            else:
                samples = self._ahead.take(left, metrics)
                scored = self._score(samples, args.num_generations)
            if args.dynamic_sampling:
                scored, counts = self._collector.fill(scored, self._draw_and_score)
                metrics.add(counts)
                if self._ahead is not None:  # the engine was needed until now
                    self._ahead.begin(left)
            if isinstance(self._prompts, Curriculum):
                totals = scored.compared.rewards
                self._prompts.rewrite(scored.samples, totals, args.num_generations)
            self._keep_completions(scored)
            metrics.add(self._rate(scored.samples))
            assert args.steps_per_generation is not None  # set on construction
            budget = args.max_tokens_per_micro_batch
            batches, cut = self._collector.slices(scored, args.steps_per_generation, budget)
            metrics.add(cut)
        self.state.num_input_tokens_seen += int(scored.num_tokens)
        moves = args.policy_moves_within_generation and not self.loss_config.bypasses
        batches = [self._with_logprobs(batch, old=moves) for batch in batches]
        if self.loss_config.exclude_zero_variance:
            self._collector.count_active(batches, args.steps_per_generation)
        return batches

    def _rate(self, samples: list[Sample]) -> Metrics:
        """Return the completions' tokens per second since the generation batch before."""
        before, self._completed_at = self._completed_at, time.perf_counter()
        if before is None:
            return Metrics({})
        tokens = self.accelerator.num_processes * sum(sum(one.by_policy) for one in samples)
        rate = tokens / (self._completed_at - before)
        return value_metric("completions/tokens_per_second", rate, self.accelerator.device)

    def _evaluation_batch(self, rows: list[Row]) -> MicroBatch:
        """Return one micro-batch of this process's rows, a prompt's group in a row over all."""
        if not self.is_in_train:
            self._settings.take_effect()
        scored = self._generate_and_score(rows, self.args.eval_group_size)
        self._keep_completions(scored)
        [batch], _ = self._collector.slices(scored, 1)
        batch = self._with_logprobs(batch)
        if self.loss_config.exclude_zero_variance:
            self._collector.count_active([batch], 1)
        return batch

    def _draw_and_score(self, count: int) -> Scored:
        rows = self._collector.draw(self._prompts, count)
        return self._generate_and_score(rows, self.args.num_generations)

    def _generate_and_score(self, rows: list[Row], group_size: int) -> Scored:
        """Generate a completion per row, score it, and compare it with those of its group."""
        samples = self._collector.read(rows)
        self._metrics[self.model.training].add(self._collector.generate(samples))
        return self._score(samples, group_size)

    def _score(self, samples: list[Sample], group_size: int) -> Scored:
        collector, metrics = self._collector, self._metrics[self.model.training]
        self._reward_log = log = RewardLog(len(samples))
        rewards = self._calculate_rewards(
            [sample.inputs for sample in samples],
            [sample.prompt for sample in samples],
            [sample.completion for sample in samples],
            [sample.completion_ids for sample in samples],
        )
        rewards = collector.checked(rewards, len(samples))
        for index, sample in enumerate(samples):
            sample.inputs = {}
            sample.extra = {name: values[index] for name, values in log.columns.items()}
            sample.left_out = self.args.mask_truncated_completions and sample.truncated
        prompts, lengths, truncated = collector.measure(samples).unbind(1)
        compared = collector.compare(rewards, samples, group_size)
        names = self.reward_func_names
        metrics.add(rollout_metrics(names, rewards, compared, lengths, truncated))
        metrics.add(log.metrics(self.accelerator))
        return Scored(samples, rewards, compared, prompts.sum() + lengths.sum())

    def _calculate_rewards(
        self,
        inputs: list[Row],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:  # (N, F)
        """Return the rewards of all processes' completions by each function; NaN: it does not
        apply. A subclass may change them; what it is given is this process's."""
        names = [name for name in inputs[0] if name not in _NOT_COLUMNS]
        columns: dict[str, Any] = {name: [row[name] for row in inputs] for name in names}
        arguments = columns | {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids_list,
            "trainer_state": self.state,
            "log_extra": self._reward_log.log_extra,
            "log_metric": self._reward_log.log_metric,
        }
        rewards = score(self._rewards, len(inputs), arguments)
        return self.accelerator.gather(rewards.to(self.accelerator.device))

    def _keep_completions(self, scored: Scored) -> None:
        """Add this process's completions to the table, if there is one."""
        table = self._completions.get(self.model.training)
        if table is None:
            return
        own = self._collector.own(scored)
        advantages = scored.compared.advantages[own]
        if advantages.dim() == 2:  # of a completion's tokens their mean
            lengths = [len(sample.completion_ids) for sample in scored.samples]
            advantages = advantages.sum(1) / torch.tensor(lengths, device=advantages.device)
        names = [f"{REWARD_PREFIX}{name}" for name in self.reward_func_names]
        columns = [*scored.rewards[own].T, scored.compared.rewards[own], advantages]
        values = torch.stack(columns).tolist()
        table.add(scored.samples, dict(zip([*names, "reward", "advantage"], values, strict=True)))

    def _with_logprobs(self, batch: MicroBatch, old: bool = False) -> MicroBatch:
        assert self._pack is not None  # the policy is checked before it runs
        batch.packed, batch.shares_prompts = self._pack(batch)
        temperature = self.loss_config.temperature
        teacher = self._teacher if self._teacher and self._teacher.by_logprobs else None
        if old or teacher is not None:
            with phase("old"):
                policy = self._placement.runs(self.model)
                batch.old_logprobs = target_logprobs(policy, batch, temperature)
        if self._reference is not None:
            with phase("ref"), self._reference.running(self.model) as reference:
                batch.ref_logprobs = target_logprobs(reference, batch, temperature)
        if teacher is not None:
            with phase("ref"):
                apart = teacher.add_to_advantages(batch, self.model)
            self._metrics[self.model.training].add(apart)
        return batch

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
        """Return the loss of a micro-batch, scaled for gradient accumulation. A subclass may add to
        it."""
        training = model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        scale = self._entropy.scale if self._entropy is not None else None
        teacher = self._teacher
        divergence = teacher.divergence(inputs, self.model, steps) if teacher is not None else None
        loss, metrics, routers = policy_loss_of(
            model,
            inputs,
            inputs.token_batch(steps, scale),
            self.loss_config,
            backward_options(self.args),
            with_router_loss=self._router_coef != 0,
            divergence=divergence,
        )
        self._metrics[training].add(metrics)
        if self._entropy is not None and training:
            self._entropy.add(metrics)
        if routers is None:
            return loss
        self._metrics[training].add(value_metric("aux_loss", routers, self.accelerator.device))
        return loss + self._router_coef * inputs.share / steps * routers

    def training_step(
        self, model: nn.Module, inputs: list[int], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        metrics, step = self._metrics[True], super().training_step
        model.train()  # as Trainer does, but before completions are sampled
        self.optimizer.train()
        with metrics.timing(), phase("loss"):
            *others, last = self._prepare_inputs(inputs)
            with self._placement.accumulating(model):
                losses = [step(model, batch, num_items_in_batch) for batch in others]
            loss = torch.stack([*losses, step(model, last, num_items_in_batch)]).sum()
        self._buffer.position += 1
        stepping = self.accelerator.sync_gradients  # the optimizer steps now
        metrics.add(value_metric("loss", loss, loss.device, count=int(stepping)))
        if stepping:
            metrics.end_step()
            if self._entropy is not None:
                metrics.add(self._entropy.step())
            elif self.entropy_coef != 0:
                metrics.add(value_metric("entropy_coef", self.entropy_coef, loss.device))
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: list[Row], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch)
        # Trainer's own mean takes the dataset's length for the number of completions
        self._metrics[False].add(value_metric("loss", loss, loss.device))
        return loss, None, None

    # Checkpoints.

    def start(self) -> None:
        args = self.args
        assert args.steps_per_generation is not None  # set on construction
        self.start_logs()
        self._completed_at = None
        self._buffer = RolloutBuffer(args.steps_per_generation, args.num_iterations)
        self._parts = {
            "slices": self._buffer,
            "metrics": self._metrics[True],
            "settings": self._settings,
        }
        if self._completions:
            self._parts["completions"] = self._completions[True]
        self._shared = {}
        if self._reference is not None:
            parts = self._parts if self._placement.sharded else self._shared
            parts["reference"] = self._reference
        if args.use_adaptive_entropy:
            self._parts["entropy"] = self._entropy = AdaptiveEntropy(args, self.accelerator)
        if self.train_dataset is not None:
            self._prompts = training_prompts(self.train_dataset, args, self.accelerator)
            self._parts["prompts"] = self._prompts
            if args.generation_batches_ahead:
                assert isinstance(self._prompts, PromptStream)  # a curriculum needs rewards first
                self._parts["ahead"] = self._ahead = BatchesAhead(self._prompts, self._collector)

    def stop(self) -> None:
        close_progress(self)
        self.rollouts.cancel()  # what was begun is not trained on

    def placed(self) -> None:
        self.rollouts.outdated()
        self._check_policy()

    def _check_policy(self) -> None:
        """Check once, as soon as it can run, its head, its part for images and its positions."""
        if self._pack is None:
            policy, runs = base_policy(self.model), self._placement.runs(self.model)
            check_fused_head(policy, runs)
            check_images_run(self.processing_class, runs, self.accelerator.device)
            other = [] if self._teacher is None else self._teacher.own_model(self.model)
            images = isinstance(self.processing_class, ProcessorMixin)
            models = [(policy, nullcontext(runs)), *other]
            self._pack = make_pack(self.args, models, images, bool(self._router_coef))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any) -> None:
        if self._placement.late or not load_saved(self.model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, *args)

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        if self._placement.late or not load_saved(self.model, folder):
            super()._load_best_model()
        self.placed()
