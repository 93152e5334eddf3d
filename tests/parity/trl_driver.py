"""Runs the installed TRL's own GRPO code on canned rollouts of a tiny model, without a network.

``Trl.generate`` is ``GRPOTrainer._generate_and_score_completions`` (old and reference
log-probabilities, rollout correction, advantages, ``sampling/*`` metrics) and ``Trl.loss`` is
``GRPOTrainer._compute_loss``. Between the two the weights move, as they do between optimizer steps.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import Qwen2ForCausalLM
from trl.trainer.utils import split_tensor_dict

from grpo_kernels import LossConfig
from grpo_kernels.losses.surrogates import Clip
from tests.integrations import trl_training as training
from tests.parity.canned import SEQUENCES, Rollouts, make_rollouts

assert trl.__version__.startswith("1.16"), f"written for TRL 1.16, found {trl.__version__}"

TEMPERATURE = 0.8
MAX_COMPLETION_LENGTH = 11
STEPS_PER_GENERATION = 2
ONE_WINDOW = (STEPS_PER_GENERATION, STEPS_PER_GENERATION)

Inputs = dict[str, Tensor]
# what TRL calls otherwise
TRL_NAMES = {
    "rollout_correction_mode": "vllm_importance_sampling_mode",
    "rollout_correction_max": "vllm_importance_sampling_clip_max",
    "rollout_correction_min": "vllm_importance_sampling_clip_min",
}
_TRL_LOSSES = {"gspo": "grpo"}  # of sequences


class Trl:
    """A real ``GRPOTrainer`` and three states of its model: reference, rollout and current.

    In fp64 the log-probabilities come from an eager head, because TRL's head computes in fp32
    whatever the model is; everything else is TRL's code in either precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._rollouts = make_rollouts()
        self._reported: dict[int, list[list[float | None]]] = {}  # by id of the rollouts
        self._generated: dict[Any, tuple[Inputs, dict[str, float]]] = {}
        self.trainer = self._build()
        self.model = self.trainer.model
        if dtype == torch.float64:
            self.trainer._get_per_token_logps_and_entropies = types.MethodType(
                _eager_logprobs, self.trainer
            )
        reference = self._state()
        self.rollout_state = _moved(reference, 0.03, seed=1)
        self.current_state = _moved(self.rollout_state, 0.03, seed=2)

    def _build(self) -> trl.GRPOTrainer:
        return training.build(
            training.grpo,
            dtype=self.dtype,
            reward_funcs=lambda completions, **_: list(self._rollouts.rewards),
            prompts=["w2"] * SEQUENCES,
            more={"rollout_func": self._rollout},
            per_device_train_batch_size=SEQUENCES // STEPS_PER_GENERATION,
            per_device_eval_batch_size=SEQUENCES,
            gradient_accumulation_steps=STEPS_PER_GENERATION,
            steps_per_generation=STEPS_PER_GENERATION,
            num_generations=2,
            num_iterations=2,  # the second one is off-policy, so TRL keeps old log-probabilities
            temperature=TEMPERATURE,
            max_completion_length=MAX_COMPLETION_LENGTH,
            mask_truncated_completions=True,
            scale_rewards="none",
        )

    def place(self, window: tuple[int, int] = ONE_WINDOW, processes: int = 1) -> None:
        """Set the accumulation window and the generation batch, in micro-batches, and how many
        processes TRL takes itself for."""
        steps, per_generation = window
        self.trainer.current_gradient_accumulation_steps = steps
        self.trainer.args.gradient_accumulation_steps = steps
        self.trainer.args.steps_per_generation = per_generation
        self.trainer.accelerator.state.num_processes = processes

    def generate(
        self, config: LossConfig, rollouts: Rollouts, *, on_policy: bool, training: bool
    ) -> tuple[Inputs, dict[str, float]]:
        """Return the generation batch that TRL makes of ``rollouts``, and the metrics it logs.

        It is made once for settings that TRL does not tell apart here.
        """
        read = ("mode", "min", "max")
        corrections = [getattr(config, f"rollout_correction_{name}") for name in read]
        key = (id(rollouts), on_policy, training, config.beta != 0, *corrections)
        if key not in self._generated:
            self._generated[key] = self._generate(config, rollouts, on_policy, training)
        batch, logged = self._generated[key]
        return dict(batch), logged

    def _generate(
        self, config: LossConfig, rollouts: Rollouts, on_policy: bool, training: bool
    ) -> tuple[Inputs, dict[str, float]]:
        trainer, self._rollouts = self.trainer, rollouts
        self.place()
        with self._at(self.rollout_state), self._configured(config), self._mode(training) as mode:
            trainer.num_iterations = 1 if on_policy else 2
            trainer._last_loaded_step = trainer.state.global_step  # no engine to send weights to
            inputs = [{"prompt": "w2"} for _ in range(SEQUENCES)]
            if id(rollouts) not in self._reported:
                self._reported[id(rollouts)] = self._noisy_logprobs()
            trainer._metrics[mode].clear()
            batch = trainer._generate_and_score_completions(inputs)
            return self._cast(batch), _logged(trainer._metrics[mode])

    def loss(
        self, inputs: Inputs, config: LossConfig, *, training: bool
    ) -> tuple[Tensor, dict[str, float]]:
        """Return TRL's loss of one micro-batch, with its graph, and the metrics it logs."""
        self.model.load_state_dict(self.current_state)
        with self._configured(config), self._mode(training) as mode:
            self.trainer._metrics[mode].clear()
            loss = self.trainer._compute_loss(self.model, inputs)
            return loss, _logged(self.trainer._metrics[mode])

    def split(self, inputs: Inputs) -> list[Inputs]:
        """Return the micro-batches of a generation batch."""
        return split_tensor_dict(inputs, STEPS_PER_GENERATION)

    def hidden_states(self, inputs: Inputs) -> Tensor:
        """Return the (B, L, D) last hidden states that predict the completions."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        hidden = self.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden[:, inputs["prompt_ids"].shape[1] - 1 : -1]

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the gradients of every parameter of the model."""
        named = dict(self.model.named_parameters())
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    def _noisy_logprobs(self) -> list[list[float | None]]:
        """Return the engine's report: the trainer's log-probabilities plus the rollouts' noise."""
        prompts = self._rollouts.prompt_ids
        reported = []
        for prompt, completion, noise in zip(
            prompts, self._rollouts.completion_ids, self._rollouts.noise, strict=True
        ):
            ids = torch.tensor([[*prompt, *completion]])
            with torch.no_grad():
                logprobs, _, _ = self.trainer._get_per_token_logps_and_entropies(
                    self.model, ids, torch.ones_like(ids), len(completion)
                )
            values = (logprobs[0].float() + torch.tensor(noise)).tolist()
            reported.append([None if value != value else value for value in values])
        return reported

    def _rollout(self, prompts: list[str], trainer: trl.GRPOTrainer) -> dict[str, object]:
        output: dict[str, object] = dict(
            prompt_ids=self._rollouts.prompt_ids,
            completion_ids=self._rollouts.completion_ids,
            logprobs=self._reported[id(self._rollouts)],
        )
        if self._rollouts.env_mask is not None:
            output["env_mask"] = self._rollouts.env_mask
        return output

    def _cast(self, batch: Inputs) -> Inputs:
        return {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in batch.items()
        }

    def _state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    @contextmanager
    def _at(self, state: dict[str, Tensor]) -> Iterator[None]:
        self.model.load_state_dict(state)
        try:
            yield
        finally:
            self.model.load_state_dict(self.current_state)

    @contextmanager
    def _mode(self, training: bool) -> Iterator[str]:
        """Set TRL's mode. It makes tensors of Python numbers too, in the default dtype."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        self.model.train(training)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of transformers, at TRL's calls
                yield "train" if training else "eval"
        finally:
            self.model.train()
            torch.set_default_dtype(default)

    @contextmanager
    def _configured(self, config: LossConfig) -> Iterator[None]:
        """Set every field of ``config`` where TRL reads it: on the trainer or its arguments."""
        trainer, args = self.trainer, self.trainer.args
        fields = {name: getattr(config, name) for name in LossConfig.__dataclass_fields__}
        fields["loss_type"] = _TRL_LOSSES.get(config.loss_type, config.loss_type)
        level = config.importance_sampling_level or config.loss.importance_sampling_level
        fields["importance_sampling_level"] = level
        settings = vars(Clip()) | vars(config.surrogate)
        for name, value in (fields | settings).items():
            name = TRL_NAMES.get(name, name)
            for owner in (trainer, args):
                if hasattr(owner, name):
                    setattr(owner, name, value)
        low, high = settings["epsilon"], settings["epsilon_high"]
        trainer.epsilon_low, trainer.epsilon_high = low, low if high is None else high
        trainer._entropy_bonus_enabled = config.entropy_coef != 0
        corrected = config.rollout_correction_mode is not None
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = corrected
        try:
            yield
        finally:
            trainer.use_vllm = False


def _moved(state: dict[str, Tensor], size: float, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        name: value + size * torch.randn(value.shape, generator=g).to(value.dtype)
        for name, value in state.items()
    }


def _logged(metrics: dict[str, list[float]]) -> dict[str, float]:
    return {name: values[-1] for name, values in metrics.items()}


def _eager_logprobs(
    self: trl.GRPOTrainer,
    model: Qwen2ForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    **_: object,
) -> tuple[Tensor, Tensor, None]:
    """Stand in for ``_get_per_token_logps_and_entropies``, in the model's own dtype."""
    hidden = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    logits = hidden[:, -logits_to_keep - 1 : -1] @ model.lm_head.weight.T / self.temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    scored = attention_mask[:, -logits_to_keep:] != 0
    target = input_ids[:, -logits_to_keep:, None]
    logprobs = logprobs.gather(-1, target).squeeze(-1)
    return logprobs * scored, entropy * scored, None
