"""BaseTrainer: the only class that touches private methods of ``transformers.Trainer``.

It counts completions instead of rows, loads prompts and evaluation rows, logs collected metrics,
and writes complete checkpoints that resume bit for bit. A test pins the signatures of the methods
it overrides and calls.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import is_peft_model
from datasets import IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput

from grpo_trainer.checkpoint import (
    SETTINGS_FILE,
    check_checkpoint,
    ctrl_c_noted,
    delete_unfinished,
    find_checkpoint,
    model_aside,
    only_run,
    raised_together,
    rotate,
    settings_of,
    where_it_stopped,
    written_aside,
)
from grpo_trainer.common import unfailing, whole
from grpo_trainer.config import GRPOConfig, pickled_without_secrets
from grpo_trainer.data import (
    PROMPT_COLUMNS,
    Numbered,
    PromptDataset,
    Prompts,
    RepeatedStream,
    repeated,
    unopened,
)
from grpo_trainer.monitor import CARD_NAME, MetricLog, may_write, write_card
from grpo_trainer.policy import Placement, load_saved


class Stateful(Protocol):
    """A part of a run that checkpoints store: numbers, text, tensors, and lists and dictionaries
    of them."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class BaseTrainer(Trainer):
    """``transformers.Trainer`` with prompts instead of labeled rows, and exact checkpoints.

    Trainer saves parameters, optimizer, schedule, random states and its counters; the subclass
    names the rest of a checkpoint.
    """

    args: GRPOConfig
    _placement: Placement
    _prompts: Prompts | None = None  # the run's prompts, once it has started
    _metrics: dict[bool, MetricLog]  # for training (True) and evaluations (False)
    _states: dict[str, Stateful]  # parts of a checkpoint that differ between processes
    _shared_states: dict[str, Stateful]  # parts that are the same on all processes, saved once
    _aside: Path | None = None  # replaces the run's folder while a checkpoint is written
    _interrupted = threading.Event()  # set once this process has noted a Ctrl-C
    _last_saved = _last_ended = 0  # steps
    _has_saved = False  # whether files in the run's folder may be this trainer's

    def _start(self) -> None:
        """Create everything that a run changes, as it is before the first step."""

    def _stop(self) -> None:
        """End background work, after the last step and after an error."""

    def _placed(self) -> None:
        """Check the policy after it was placed, or after weights were loaded into it."""

    def _batches_of(self, inputs: Any) -> Any:
        """Return the batches whose loss a training or prediction step computes."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self._batches_of(inputs)

    # The length of a run, and the rows it reads.

    def _steps(self) -> int:
        """Return the optimizer steps of a whole run, as transformers counts them."""
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        steps_per_epoch = math.ceil(self._micro_steps() / args.gradient_accumulation_steps)
        return math.ceil(args.num_train_epochs * steps_per_epoch)

    def _generation_batches(self) -> int:
        """Return the generation batches of a whole run. The last step of a pass may be shorter."""
        args, of_pass = self.args, self._micro_steps()
        steps_of_pass = math.ceil(of_pass / args.gradient_accumulation_steps)
        passes, steps = divmod(self._steps(), steps_of_pass)
        rest = min(steps * args.gradient_accumulation_steps, of_pass)
        return math.ceil((passes * of_pass + rest) / args.micro_steps_per_generation)

    def _micro_steps(self) -> int:
        """Return the micro-steps of a pass over the prompts; of the whole run for a stream."""
        args, dataset = self.args, self.train_dataset
        if dataset is None or isinstance(dataset, IterableDataset):
            return args.max_steps * args.gradient_accumulation_steps
        return len(dataset) // args.prompts_per_generation * args.micro_steps_per_generation

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader with one item per completion in the loss, for one epoch.

        Raises:
            ValueError: there is no dataset to train on.
        """
        if self._prompts is None:
            raise ValueError(
                "train_dataset: expected prompts to train on (or, with max_steps, one "
                "environment_factory or prompts=), got None"
            )
        size = self.args.per_device_train_batch_size * self.args.world_size
        items: Any = range(self._micro_steps() * size)
        loader = DataLoader(items, batch_size=self._train_batch_size, collate_fn=list)
        return self.accelerator.prepare(loader)

    def _get_dataloader(self, dataset: PromptDataset, *args: Any, **kwargs: Any) -> DataLoader:
        """Return the rows of an evaluation, each repeated for its group."""
        self.args.check_eval_batch()
        rows: Any = unopened(dataset, self.args)
        if isinstance(rows, IterableDataset):
            # each process reads its own rows: one that reads for all could send only tensors
            self.accelerator.dataloader_config.dispatch_batches = False
            rows = RepeatedStream(rows, self.args.eval_group_size)
        else:
            rows = Numbered(rows)
        loader = super()._get_dataloader(rows, *args, **kwargs)
        loader.device = None  # accelerate would copy rows to move them, and lose their number
        return loader

    def _get_eval_sampler(self, eval_dataset: Numbered) -> list[int]:
        return list(repeated(range(len(eval_dataset)), self.args.eval_group_size))

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = list(PROMPT_COLUMNS)  # what remove_unused_columns keeps

    # The log.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a row with everything collected since the previous row."""
        # a training step's row, or the summary, which has the rest
        if ("loss" in logs or "train_loss" in logs) and (drained := self._metrics[True].drain()):
            logs |= drained | {"num_tokens": self.state.num_input_tokens_seen}
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        if self._placement.place(self.model):
            self._placed()
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        drained = self._metrics[False].drain() | {"num_tokens": self.state.num_input_tokens_seen}
        output.metrics.update({f"{prefix}_{name}": value for name, value in drained.items()})
        return output

    # A run, from its start or a checkpoint to its end.

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train like ``transformers.Trainer``; True resumes from the newest checkpoint.

        If the checkpoint is the last one of a finished run, only the model and the trainer's state
        are loaded: nothing is logged or written, and the result has no metrics.

        After Ctrl-C the step ends and a checkpoint is written, from which a run continues exactly.
        A second Ctrl-C ends training at once.

        Raises:
            KeyboardInterrupt: Ctrl-C ended training; the message names step and checkpoint.
            StartError: another run trains in ``output_dir``, or left its model or checkpoints there
                and ``overwrite_output_dir`` is not set; or the checkpoint is damaged, lacks a file,
                or belongs to a run that this one cannot continue exactly. The message names the
                file or the setting. A StartError is a ValueError.
            CheckpointError: a checkpoint could not be written.
        """
        with only_run(Path(self.args.output_dir), self.accelerator):
            self._start()
            checkpoint = self._checkpoint(resume_from_checkpoint)
            self._last_saved = self._last_ended = 0
            try:
                with ctrl_c_noted(self.is_world_process_zero()) as self._interrupted:
                    asked = str(checkpoint) if checkpoint else None
                    output = super().train(asked, *args, **kwargs)
                    self._stop_if_asked()  # in the last step
                return output
            except KeyboardInterrupt as error:
                text = where_it_stopped(
                    self.state.global_step,
                    Path(self.args.output_dir),
                    resumable=not self.args.save_only_model,
                )
                raise KeyboardInterrupt(text) from error
            finally:
                self._stop()

    def _checkpoint(self, asked: str | Path | bool | None) -> Path | None:
        """Return the checkpoint to resume from. All processes call it, and raise if one raises."""
        checkpoint = None
        overwrite = self.args.overwrite_output_dir or self._has_saved
        with raised_together(self.accelerator):
            checkpoint = find_checkpoint(Path(self.args.output_dir), asked, overwrite)
            if checkpoint and self.accelerator.is_local_main_process:  # one per machine
                check_checkpoint(checkpoint, self.args, settings_of(self), self._steps())
        if self.accelerator.is_local_main_process:
            delete_unfinished(Path(self.args.output_dir))
        return checkpoint

    def _inner_training_loop(
        self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any
    ) -> TrainOutput:
        checkpoint = resume_from_checkpoint
        if checkpoint is not None:
            state = TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}")
            if state.global_step >= self._steps():  # Trainer's loop checks only after a step
                return self._finished(state, checkpoint)
        return super()._inner_training_loop(*args, resume_from_checkpoint=checkpoint, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """End a step, or an epoch, whose last step has already ended."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        step, state = self.state.global_step, self.state
        epoch_ends = float(state.epoch or 0).is_integer() and step != self._last_ended
        self._last_ended = step
        if not epoch_ends and step < state.max_steps:  # else there is more to log and save
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """Save and end the run if any process noted a Ctrl-C. All call it, after a step."""
        interrupted = self._interrupted.is_set()
        if self.accelerator.num_processes > 1:  # all continue, or none does
            own = torch.tensor([interrupted], device=self.accelerator.device)
            interrupted = bool(self.accelerator.gather(own).any())
        if not interrupted:
            return
        if self.state.global_step > self._last_saved:
            self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_save(self.args, self.state, self.control)
        raise KeyboardInterrupt

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._placement.at_rest(self.model)  # so that the optimizer gets the trained parameters
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._placed()
        return prepared

    def _finished(self, state: TrainerState, checkpoint: str) -> TrainOutput:
        """End a run that has no steps left."""
        if self._placement.late:  # else the model is loaded already
            loader = self.get_train_dataloader()
            self._prepare_for_training(state.max_steps, loader, checkpoint)
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        self.state = state
        self._last_saved = state.global_step
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()
        self.is_in_train = False
        return TrainOutput(state.global_step, 0.0, {})

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        try:
            with written_aside(run_dir, name, self.accelerator) as aside:
                self._aside = aside
                if not self.args.save_only_model:
                    for path, parts in self._files(aside / name).items():
                        if parts is self._states or self.args.should_save:
                            torch.save({key: part.state() for key, part in parts.items()}, path)
                    if self.args.should_save:
                        text = json.dumps(settings_of(self), indent=2)
                        (aside / name / SETTINGS_FILE).write_text(text + "\n")
                super()._save_checkpoint(model, trial)
                if name == best and self.args.should_save:
                    self.state.best_model_checkpoint = str(run_dir / name)
                    self.state.save_to_json(str(aside / name / TRAINER_STATE_NAME))
        finally:
            self._aside = None
        self._last_saved, self._has_saved = self.state.global_step, True
        if self.args.should_save:
            rotate(run_dir, self.args.save_total_limit, keep={name, best})
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model so that ``from_pretrained`` can load it. Every process calls it.

        A checkpoint of a sharded model has only the shards, unless the settings of FSDP or
        DeepSpeed request the whole model as well.
        """
        if not self._placement.late:
            super().save_model(output_dir, _internal_call)
            return
        whole = self._placement.whole_checkpoints or self.args.save_only_model
        if self._aside is not None and not whole:
            return
        weights = self._placement.saved(self.model, _is_saved(self.model))
        self._save(output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_state(self) -> None:
        """Write the trainer's state into ``output_dir``."""
        if self.args.should_save:
            with whole(Path(self.args.output_dir) / TRAINER_STATE_NAME) as path:
                self.state.save_to_json(str(path))

    @pickled_without_secrets()
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self._has_saved = True
        folder = Path(output_dir or self.args.output_dir)
        is_ours = may_write(folder / CARD_NAME)  # before peft writes its own card
        if self._aside is not None or not self.args.should_save:  # a checkpoint is already aside
            super()._save(output_dir, state_dict)
        else:
            with model_aside(folder) as aside:
                super()._save(str(aside), state_dict)
        if self.args.should_save:
            with unfailing(f"card of {self.args.output_dir}"):
                write_card(self, folder / CARD_NAME, is_ours)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card before an upload; ``push_to_hub`` passes its arguments on.

        Args:
            model_name: the title. Default: the name of ``output_dir``.
            dataset_name: hub ids of the training data. Default: the dataset's name as given.
            tags: additional tags.
        """
        if not self.is_world_process_zero():
            return
        path = Path(self.args.output_dir) / CARD_NAME
        write_card(
            self,
            path,
            may_write(path),
            name=model_name,
            datasets=_listed(dataset_name),
            tags=_listed(tags),
        )

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._aside is None else str(self._aside)

    @pickled_without_secrets()
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._aside is None:  # an upload reads the folder later, at its final place
            super()._push_from_checkpoint(checkpoint_folder)

    def _files(self, folder: Path) -> dict[Path, dict[str, Stateful]]:
        """Return the contents of files in ``folder``: this process's own, and the shared ones."""
        own = folder / f"process_state_{self.accelerator.process_index}.pt"
        return {own: self._states, folder / "shared_state.pt": self._shared_states}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any) -> None:
        if self._placement.late or not load_saved(self.model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, *args)

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        if self._placement.late or not load_saved(self.model, folder):
            super()._load_best_model()
        self._placed()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        # Trainer has already read from the checkpoint when to log, evaluate and save
        self.state.compute_steps(self.args, self.state.max_steps)
        where = self.accelerator.device.type  # the current device: torch cannot load to cpu:0
        for path, parts in self._files(Path(checkpoint)).items():
            if not path.exists():
                raise ValueError(f"resume_from_checkpoint: expected {path.name} in {path.parent}")
            states = torch.load(path, map_location=where, weights_only=True)
            if "ahead" in states:  # 1.0.0 had two parts
                begun = states.pop("ahead")
                states["prompts"] = {"prompts": states["prompts"], "begun": begun}
            for name, part in parts.items():
                if name in states:  # parts that only log may be switched on later
                    part.restore(states[name])


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _is_saved(model: Any) -> Callable[[str], bool]:
    """Return which weights ``save_pretrained`` writes: only the adapters of an adapted model."""
    adapters = [f".{name}." for name in model.peft_config] if is_peft_model(model) else [""]
    return lambda name: any(adapter in f"{name}." for adapter in adapters)
