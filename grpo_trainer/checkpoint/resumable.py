"""transformers' Trainer with checkpoints that are whole, and resumed to the bit."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput

from grpo_trainer.checkpoint.files import (
    SETTINGS_FILE,
    checkpoints,
    delete_unfinished,
    model_aside,
    only_run,
    raised_together,
    rotate,
    written_aside,
)
from grpo_trainer.checkpoint.resuming import check_checkpoint, find_checkpoint, settings_of
from grpo_trainer.common import whole
from grpo_trainer.config import pickled_without_secrets
from grpo_trainer.data import GroupTrainer
from grpo_trainer.policy import Placement

_NOTICE = b"\nCtrl-C: this step ends and is saved first; another Ctrl-C ends the run at once\n"
_STDERR = 2


class Stateful(Protocol):
    """A part of a run that a checkpoint must hold: numbers, text, tensors, lists and dictionaries
    of them."""

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class ResumableTrainer(GroupTrainer):
    """Adds to a checkpoint the parts that the subclass names, and writes it all at once.

    Trainer itself saves parameters, optimizer, schedule, random states and its counters.
    """

    _aside: Path | None = None  # the folder that stands for the run's while a checkpoint is written
    _interrupted = False  # whether this process has noted a Ctrl-C
    _last_saved = _last_ended = 0  # steps
    _has_saved = False  # whether what is in the run's folder may be this trainer's own

    _parts: dict[str, Stateful]  # by name, those that differ from process to process
    _shared: dict[str, Stateful]  # and those that are the same on all, which are saved once
    _placement: Placement

    def start(self) -> None:
        """Make everything that a run changes as it is before the first step."""

    def stop(self) -> None:
        """End what runs beside the steps, after the last one and after an error."""

    def placed(self) -> None:
        """Look at the policy after it was placed, or weights were loaded into it."""

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as ``transformers.Trainer`` does; True resumes from the newest checkpoint.

        From the last checkpoint of a run that has taken all of its steps only the model and the
        trainer's state are loaded; nothing is logged or written, and the result has no metrics.

        After Ctrl-C the step ends and a checkpoint is written, from which a run goes on exactly;
        after another one training ends at once.

        Raises:
            KeyboardInterrupt: Ctrl-C ended training; the message names step and checkpoint.
            StartError: another run trains in ``output_dir``, or has left its model or checkpoints
                there, and it is not ``overwrite_output_dir``; or the checkpoint is damaged or lacks
                a file, or belongs to a run that this one cannot continue exactly; the message
                names the file or the setting. A ValueError.
            CheckpointError: a checkpoint could not be written.
        """
        with only_run(Path(self.args.output_dir), self.accelerator):
            self.start()
            checkpoint = self._checkpoint(resume_from_checkpoint)
            self._last_saved = self._last_ended = 0
            try:
                with self._ctrl_c_noted():
                    asked = str(checkpoint) if checkpoint else None
                    output = super().train(asked, *args, **kwargs)
                    self._stop_if_asked()  # in the last step
                return output
            except KeyboardInterrupt as error:
                raise KeyboardInterrupt(self._where_it_stopped()) from error
            finally:
                self.stop()

    def _checkpoint(self, asked: str | Path | bool | None) -> Path | None:
        """Return what training resumes from. Every process calls it; all raise what one finds."""
        checkpoint = None
        overwrite = self.args.overwrite_output_dir or self._has_saved
        with raised_together(self.accelerator):
            checkpoint = find_checkpoint(Path(self.args.output_dir), asked, overwrite)
            if checkpoint and self.accelerator.is_local_main_process:  # one of each disk
                check_checkpoint(checkpoint, self.args, settings_of(self), self.steps())
        if self.accelerator.is_local_main_process:
            delete_unfinished(Path(self.args.output_dir))
        return checkpoint

    def _inner_training_loop(
        self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any
    ) -> TrainOutput:
        checkpoint = resume_from_checkpoint
        if checkpoint is not None:
            state = TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}")
            if state.global_step >= self.steps():  # Trainer's loop looks after a step only
                return self._finished(state, checkpoint)
        return super()._inner_training_loop(*args, resume_from_checkpoint=checkpoint, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """End a step, and an epoch, whose last step has ended before."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        step, state = self.state.global_step, self.state
        epoch_ends = float(state.epoch or 0).is_integer() and step != self._last_ended
        self._last_ended = step
        if not epoch_ends and step < state.max_steps:  # else there is more to log and to save
            self._stop_if_asked()

    @contextmanager
    def _ctrl_c_noted(self) -> Iterator[None]:
        """Take note of the first Ctrl-C inside; the next raises KeyboardInterrupt, as ever. Outside
        the main thread, and where SIGINT is ignored or has another handler, it stays so."""
        self._interrupted = False
        usual = signal.default_int_handler

        def note(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, usual)
            if self.accelerator.is_main_process:
                os.write(_STDERR, _NOTICE)  # what it interrupts may be in the middle of a print

        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGINT) != usual:
            yield
            return
        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)

    def _stop_if_asked(self) -> None:
        """Save and end the run if a process has noted a Ctrl-C. All call it, after a step."""
        interrupted = self._interrupted
        if self.accelerator.num_processes > 1:  # they go on together, or none does
            own = torch.tensor([interrupted], device=self.accelerator.device)
            interrupted = bool(self.accelerator.gather(own).any())
        if not interrupted:
            return
        if self.state.global_step > self._last_saved:
            self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_save(self.args, self.state, self.control)
        raise KeyboardInterrupt

    def _where_it_stopped(self) -> str:
        where = f"stopped after step {self.state.global_step}"
        found = checkpoints(Path(self.args.output_dir))
        if not found or self.args.save_only_model:
            return f"{where}; there is no checkpoint to go on from"
        return (
            f"{where}; newest checkpoint: {found[-1]}; --resume_from_checkpoint true, in Python "
            "train(resume_from_checkpoint=True), goes on from it"
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._placement.at_rest(self.model)  # the optimizer gets the parameters that are trained
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.placed()
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        if self._placement.place(self.model):
            self.placed()
        return super().evaluation_loop(*args, **kwargs)

    def _finished(self, state: TrainerState, checkpoint: str) -> TrainOutput:
        """End a run without a step left."""
        if self._placement.late:  # else its model is loaded already
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
                        if parts is self._parts or self.args.should_save:
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
        """Save the whole model, so that ``from_pretrained`` loads it. Every process calls it.

        A checkpoint of a sharded model has the shards alone, unless the settings of FSDP or
        DeepSpeed ask for the whole model as well.
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
        if self._aside is not None or not self.args.should_save:  # a checkpoint is aside already
            super()._save(output_dir, state_dict)
            return
        with model_aside(Path(output_dir or self.args.output_dir)) as aside:
            super()._save(str(aside), state_dict)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._aside is None else str(self._aside)

    @pickled_without_secrets()
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._aside is None:  # an upload reads the folder later, from where it stays
            super()._push_from_checkpoint(checkpoint_folder)

    def _files(self, folder: Path) -> dict[Path, dict[str, Stateful]]:
        """Return what goes into files of ``folder``: this process's own, and what all share."""
        own = folder / f"process_state_{self.accelerator.process_index}.pt"
        return {own: self._parts, folder / "shared_state.pt": self._shared}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        # when to log, evaluate and save: Trainer has taken that from the checkpoint
        self.state.compute_steps(self.args, self.state.max_steps)
        where = self.accelerator.device.type  # the current one: torch cannot load to cpu:0
        for path, parts in self._files(Path(checkpoint)).items():
            if not path.exists():
                raise ValueError(f"resume_from_checkpoint: expected {path.name} in {path.parent}")
            states = torch.load(path, map_location=where, weights_only=True)
            for name, part in parts.items():
                if name in states:  # what is only logged may be switched on later
                    part.restore(states[name])


def _is_saved(model: Any) -> Callable[[str], bool]:
    """Return which weights ``save_pretrained`` writes: of an adapted model the adapters alone."""
    adapters = [f".{name}." for name in model.peft_config] if is_peft_model(model) else [""]
    return lambda name: any(adapter in f"{name}." for adapter in adapters)
