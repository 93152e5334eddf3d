"""The trainer's side of the data: how many steps there are, and the rows of an evaluation."""

from __future__ import annotations

from typing import Any

from datasets import IterableDataset
from torch.utils.data import DataLoader

from grpo_trainer.checkpoint.resumable import ResumableTrainer
from grpo_trainer.data import (
    PROMPT_COLUMNS,
    Numbered,
    Prompts,
    RepeatedStream,
    RepeatSampler,
    as_they_are,
    completions_per_epoch,
    unopened,
)


class GroupTrainer(ResumableTrainer):
    """Counts completions, and repeats each prompt of an evaluation as often as it is completed.

    The loop counts the items of a loader; the training prompts come from a stream of their own,
    from which dynamic sampling takes as many as it needs.
    """

    def get_train_dataloader(self) -> DataLoader:
        """Return one item per completion in the loss and epoch.

        Raises:
            ValueError: there is no dataset to train on.
        """
        if self.train_dataset is None:
            raise ValueError(
                "train_dataset: expected prompts to train on (or one environment_factory, and "
                "max_steps), got None"
            )
        items: Any = range(completions_per_epoch(self.train_dataset, self.args))
        batch = self._train_batch_size
        loader = DataLoader(items, batch_size=batch, collate_fn=as_they_are)
        return self.accelerator.prepare(loader)

    def _get_dataloader(self, dataset: Prompts, *args: Any, **kwargs: Any) -> DataLoader:
        dataset = unopened(dataset, self.args)
        if isinstance(dataset, IterableDataset):  # for evaluation, which has no sampler then
            self.args.check_eval_batch()
            # each process reads for itself: one that reads for all could only send tensors
            self.accelerator.dataloader_config.dispatch_batches = False
            dataset = RepeatedStream(dataset, self.args.eval_group_size)
        else:
            dataset = Numbered(dataset)
        loader = super()._get_dataloader(dataset, *args, **kwargs)
        loader.device = None  # accelerate makes rows anew to move them, without their number
        return loader

    def _get_eval_sampler(self, eval_dataset: Numbered) -> RepeatSampler:
        self.args.check_eval_batch()
        return RepeatSampler(len(eval_dataset), self.args.eval_group_size)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = list(PROMPT_COLUMNS)  # what remove_unused_columns keeps
