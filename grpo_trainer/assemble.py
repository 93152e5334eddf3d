"""The parts of a trainer: inputs, checked before a model is loaded, then models, then rollouts.

A function of its package creates each part, and only if the run needs it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin, Trainer, TrainerCallback

from grpo_kernels.hf import add_fused_head, check_fused_head
from grpo_trainer.agents import (
    EnvironmentFactory,
    Environments,
    Toolbox,
    ToolLoop,
    make_toolbox,
    prompts_by_reset,
)
from grpo_trainer.config import GRPOConfig, import_path, loss_config
from grpo_trainer.data import (
    Column,
    PromptDataset,
    Prompts,
    Term,
    check_datasets,
    check_images,
    tokenizer_of,
    unopened,
)
from grpo_trainer.engines import (
    EngineContext,
    RolloutEngine,
    Sampler,
    Source,
    make_sampler,
    pad_token_id,
)
from grpo_trainer.experience import (
    AdvantageFunction,
    BatchesAhead,
    ByFunction,
    Comparison,
    Curriculum,
    DatasetPrompts,
    GroupsAhead,
    Plan,
    RolloutFunction,
    SingleTurn,
    check_rollout_func,
    old_logprobs,
    reference_logprobs,
    teacher_advantages,
)
from grpo_trainer.monitor import LogprobDoubt
from grpo_trainer.policy import (
    AlikeRounding,
    Placement,
    Reference,
    RouterLoss,
    Teacher,
    TeacherSource,
    add_routing_replay,
    base_policy,
    check_images_run,
    check_optimizer,
    check_placement,
    check_processor,
    check_routing_replay,
    check_shards,
    evaluating,
    make_pack,
    make_reference,
    placement_of,
    replayed_experts,
    router_coef,
)
from grpo_trainer.report import ReportWriter
from grpo_trainer.rewards import (
    RewardFunction,
    RewardSource,
    Tokenizers,
    no_reward,
    resolve_rewards,
)
from grpo_trainer.vllm import VLLMClient

# turns the dataset's prompts into the run's prompts
MakePrompts = Callable[[Prompts | None], Prompts]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The user's arguments in addition to the model, checked."""

    args: GRPOConfig
    train_dataset: PromptDataset | None
    eval_dataset: PromptDataset | dict[str, PromptDataset] | None
    rewards: list[RewardFunction]
    toolbox: Toolbox
    environments: Environments | None
    rollout_func: RolloutFunction | None
    rollout_engine: RolloutEngine | None
    advantages: AdvantageFunction | str | None
    teacher: TeacherSource | None
    prompts: MakePrompts | None
    columns: list[Column]
    terms: list[Term]
    hooks: dict[str, Any]  # must be the same in a resumed run


def check_inputs(
    *,
    args: GRPOConfig,
    train_dataset: PromptDataset | None,
    eval_dataset: PromptDataset | dict[str, PromptDataset] | None,
    reward_funcs: RewardSource | Sequence[RewardSource] | None,
    reward_processing_classes: Tokenizers,
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: EnvironmentFactory | None,
    rollout_func: RolloutFunction | None,
    rollout_engine: RolloutEngine | None,
    advantages: AdvantageFunction | str | None,
    teacher: TeacherSource | None,
    prompts: MakePrompts | None,
    columns: Sequence[Column],
    terms: Sequence[Term],
) -> Inputs:
    """Return the trainer's checked inputs; ValueError if one is wrong."""
    if train_dataset is None and environment_factory is not None:
        train_dataset = prompts_by_reset(environment_factory, args)
    train_dataset, eval_dataset = unopened(train_dataset, args), unopened(eval_dataset, args)
    check_datasets(train_dataset, eval_dataset, args, environment_factory is not None)
    toolbox = make_toolbox(tools or ())
    environments = None
    if environment_factory is not None:
        environments = Environments(environment_factory, toolbox)
    check_rollout_func(rollout_func, args, bool(toolbox or environments))
    _check_routing_replay(args, rollout_engine)
    _check_extensions(prompts, columns, terms, args)
    if prompts is not None and train_dataset is None and args.max_steps < 1:
        raise ValueError(
            "max_steps: expected the number of steps, since prompts without a train_dataset "
            f"have no length, got {args.max_steps}"
        )
    teacher = args.teacher if teacher is None else teacher
    rewards = [] if environments is None else environments.rewards
    if teacher is not None and not (reward_funcs or rewards):
        reward_funcs = [no_reward]
    if reward_funcs or not rewards:
        rewards = resolve_rewards(reward_funcs or [], reward_processing_classes, args) + rewards
    return Inputs(
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        rewards=rewards,
        toolbox=toolbox,
        environments=environments,
        rollout_func=rollout_func,
        rollout_engine=rollout_engine,
        advantages=advantages,
        teacher=teacher,
        prompts=prompts,
        columns=list(columns),
        terms=list(terms),
        hooks={
            "tools": tools,
            "environment_factory": environment_factory,
            "rollout_func": rollout_func,
            "advantages": advantages,
            "teacher": getattr(teacher, "name_or_path", teacher),  # a model's name
            "prompts": prompts,
            "columns": [import_path(column) for column in columns] or None,
            "terms": [import_path(type(term)) for term in terms] or None,
        },
    )


def _check_routing_replay(args: GRPOConfig, rollout_engine: RolloutEngine | None) -> None:
    named = args.use_vllm or args.rollout_engine not in (None, "transformers")
    if args.use_rollout_routing_replay and rollout_engine is None and not named:
        raise ValueError(
            "use_rollout_routing_replay: expected use_vllm=True or a rollout engine that reports "
            "routed experts; the transformers engine, used here, does not report them"
        )


def _check_extensions(
    prompts: Any, columns: Sequence[Any], terms: Sequence[Any], args: GRPOConfig
) -> None:
    if prompts is not None and not callable(prompts):
        raise ValueError(
            "prompts: expected a class or function that accepts the dataset's Prompts and returns "
            f"the run's, got {prompts!r}"
        )
    if prompts is not None and args.generation_batches_ahead:
        raise ValueError(
            "generation_batches_ahead: expected 0 with prompts=, since the next prompts may depend "
            f"on this batch's scores, got {args.generation_batches_ahead}"
        )
    for name, values in {"columns": columns, "terms": terms}.items():
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name}: expected a list, got {values!r}")
    for column in columns:
        if not callable(column) or isinstance(column, type):
            raise ValueError(
                "columns: expected functions of a micro-batch and the policy, or objects to call, "
                f"got {column!r}"
            )
    for term in terms:
        if not isinstance(term, Term) or isinstance(term, type):
            raise ValueError(f"terms: expected objects of classes that inherit Term, got {term!r}")
        if type(term).on_head is Term.on_head and type(term).on_output is Term.on_output:
            raise ValueError(
                f"terms: expected a class that defines on_head or on_output, got {term!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models of a step, and what the step computes with them."""

    placement: Placement  # of the policy's parameters
    reference: Reference | None
    teacher: Teacher | None
    columns: list[Column]  # run in this order
    terms: list[Term]


def assemble_models(trainer: Trainer, inputs: Inputs, peft_config: Any | None) -> Models:
    """Return the models of ``trainer`` and what its loss needs from them.

    Raises:
        ValueError: a model does not fit the settings, the policy or its processor.
    """
    args, policy, settings = inputs.args, trainer.model, trainer.settings
    check_placement(args, trainer.accelerator)
    check_processor(trainer.processing_class, policy)
    check_images(inputs.train_dataset, inputs.eval_dataset, trainer.processing_class)
    placement = placement_of(trainer.accelerator)
    check_optimizer(trainer, placement)
    check_shards(policy, placement, trainer.accelerator)
    reference = make_reference(policy, args, peft_config, placement)
    add_fused_head(base_policy(policy))
    teacher = _teacher(inputs.teacher, trainer, placement)
    columns: list[Column] = []
    terms: list[Term] = []
    if args.use_rollout_routing_replay:
        add_routing_replay(base_policy(policy))
        columns.append(replayed_experts(base_policy(policy)))
    teaches_by_logprobs = teacher is not None and teacher.by_logprobs
    moves = args.policy_moves_within_generation and not settings.loss.bypasses
    if moves or teaches_by_logprobs:
        columns.append(old_logprobs(placement, settings, in_evaluation=teaches_by_logprobs))
    if reference is not None:
        columns.append(reference_logprobs(reference, settings))
    if teacher is not None and teaches_by_logprobs:
        columns.append(teacher_advantages(teacher))
    elif teacher is not None:
        terms.append(teacher)
    if coef := router_coef(base_policy(policy), args):
        terms.append(RouterLoss(coef))
    return Models(
        placement=placement,
        reference=reference,
        teacher=teacher,
        columns=columns + inputs.columns,
        terms=terms + inputs.terms,
    )


def _teacher(
    source: TeacherSource | None, trainer: Trainer, placement: Placement
) -> Teacher | None:
    if source is None:
        return None
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        source = VLLMClient(source).prompt_logprobs
    tokens = len(tokenizer_of(trainer.processing_class))
    return Teacher(source, trainer.model, trainer.args, placement, tokens=tokens)


def check_policy(trainer: Trainer, models: Models) -> list[Column]:
    """Check the policy's head, image part and positions once it can run; return the columns of a
    micro-batch, including packing if it works.

    Raises:
        ValueError: its head is not supported, or ``packing`` is ``packed`` and does not work.
    """
    policy, runs = base_policy(trainer.model), models.placement.runs(trainer.model)
    check_fused_head(policy, runs)
    if trainer.args.use_rollout_routing_replay:
        with evaluating(runs):
            check_routing_replay(policy, runs)
    check_images_run(trainer.processing_class, runs, trainer.accelerator.device)
    run_forward = [(policy, nullcontext(runs))]
    if models.teacher is not None:
        run_forward += models.teacher.own_model(trainer.model)
    images = isinstance(trainer.processing_class, ProcessorMixin)
    routers = any("output_router_logits" in term.forward_options for term in models.terms)
    pack = make_pack(trainer.args, run_forward, images, routers)
    return models.columns if pack is None else [pack, *models.columns]


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Turns prompts into advantages, and advantages into micro-batches."""

    sampler: Sampler
    complete: Source  # completes samples
    compare: Comparison
    plan: Plan  # of a generation batch


def assemble_rollouts(trainer: Trainer, inputs: Inputs, models: Models) -> Rollouts:
    """Return the engine of ``trainer``, and the parts that process its completions.

    Raises:
        ValueError: the engine is unknown, no token ends a completion, no token can be used for
            padding, or reward weights and reward functions differ in number.
    """
    args, accelerator, teacher = inputs.args, trainer.accelerator, models.teacher
    policy: PreTrainedModel = trainer.model
    text = policy.config.get_text_config()
    context = EngineContext(
        policy=lambda: trainer.model,
        processing_class=trainer.processing_class,
        args=args,
        accelerator=accelerator,
        placement=models.placement,
        positions=getattr(text, "max_position_embeddings", None),
        vocab_size=text.vocab_size if teacher is None else teacher.vocab_size,
    )
    sampler = make_sampler(context, lambda: trainer.state.global_step, inputs.rollout_engine)
    if not sampler.eos_token_ids:
        raise ValueError(
            "processing_class: expected an eos_token (or an eos_token_id in the model's "
            "generation_config or in generation_kwargs), got none, so no completion would end"
        )
    names = [reward.name for reward in inputs.rewards]
    compare = Comparison(names, args, accelerator, inputs.advantages)
    steps, multiple = args.steps_per_generation, args.pad_to_multiple_of
    assert steps is not None and not isinstance(multiple, str)  # set on construction
    plan = Plan(
        steps=steps,
        group_size=args.num_generations,
        pad_token_id=pad_token_id(context.tokenizer),
        pad_to_multiple_of=multiple,
        by_prompt=loss_config(args).aggregation.by_prompt,
        budget=args.max_tokens_per_micro_batch,
        accumulated=args.gradient_accumulation_steps,
    )
    # completions may be processed on other threads, which must not see padding by a reward function
    apart = replace(context, processing_class=copy.deepcopy(context.processing_class))
    complete: Source = SingleTurn(sampler, apart)
    if (function := inputs.rollout_func) is not None:
        complete = ByFunction(lambda prompts: function(prompts, trainer), sampler, apart)
    elif inputs.toolbox or inputs.environments is not None:
        complete = ToolLoop(sampler, apart, inputs.toolbox, inputs.environments)
    return Rollouts(sampler=sampler, complete=complete, compare=compare, plan=plan)


def make_callbacks(trainer: Trainer, models: Models) -> list[TrainerCallback]:
    """Return the callbacks that watch a run, or move its reference, between steps."""
    args = trainer.args
    callbacks: list[TrainerCallback] = []
    if models.reference is not None and args.sync_ref_model:
        callbacks.append(models.reference)

    def most_gain() -> float:
        loss = trainer.loss_config
        weighted = loss.correction_mode or loss.bypasses
        if weighted or loss.off_policy_mask_threshold is not None:
            return trainer.rollouts.sampling.most_gain
        return math.inf  # the loss does not read them

    callbacks.append(LogprobDoubt(most_gain))
    if args.world_size > 1 and not models.placement.late:
        callbacks.append(AlikeRounding())
    if args.write_report:
        callbacks.append(ReportWriter(trainer))
    return callbacks


def make_prompts(
    trainer: Trainer, inputs: Inputs, rollouts: Rollouts, batches_left: Callable[[], int]
) -> Prompts | None:
    """Return the run's Prompts, at its start; None if there are none.

    Raises:
        ValueError: ``dynamic_prompts_fn`` is not a function, or ``prompts`` does not return
            Prompts.
    """
    args, prompts, dataset = inputs.args, None, trainer.train_dataset
    if dataset is not None:
        kind = DatasetPrompts if args.dynamic_prompts_fn is None else Curriculum
        prompts = kind(dataset, args, trainer.accelerator)
    if prompts is not None and args.generation_batches_ahead:
        ahead = BatchesAhead if args.max_staleness is None else GroupsAhead
        return ahead(prompts, rollouts.complete, rollouts.sampler, batches_left)
    if inputs.prompts is None:
        return prompts
    own = inputs.prompts(prompts)
    if not isinstance(own, Prompts):
        raise ValueError(
            "prompts: expected an object with next, scored, state and restore, such as an instance "
            f"of a subclass of Prompts, got {own!r}"
        )
    return own
