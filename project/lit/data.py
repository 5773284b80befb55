"""The images as a LightningDataModule: plain loaders, into which Lightning puts its DistributedSampler."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from project.data.loading import (
    Loader,
    ResumableLoader,
    TrainBatchSampler,
    TrainImages,
    ValBatchSampler,
    ValImages,
    loader_options,
)
from project.data.splits import Splits, load_splits
from project.data.transforms import TrainTransform, val_transform
from project.settings.config import DataConfig
from project.settings.plan import BatchPlan, count_epochs, count_steps, loader_workers


def plan_batches(config: DataConfig, splits: Splits, trainer: Trainer) -> BatchPlan:
    return BatchPlan(
        global_batch_size=config.global_batch_size,
        world_size=trainer.world_size,
        accumulate=trainer.accumulate_grad_batches,
        samples=len(splits.train),
        drop_last=config.drop_last,
        limit=trainer.limit_train_batches,
    )


def total_steps(trainer: Trainer, plan: BatchPlan) -> int | None:
    """Optimizer steps of the whole training; None where nothing limits them.

    Not `trainer.estimated_stepping_batches`: it builds the loaders before their state has been restored.
    """
    return count_steps(max_epochs=trainer.max_epochs, max_steps=trainer.max_steps, steps_per_epoch=plan.steps_per_epoch)


class ImageFolders(LightningDataModule):
    """Training and validation images from folders of classes."""

    def __init__(self, **kwargs) -> None:  # type: ignore[no-untyped-def]  # jsonargparse reads DataConfig's fields from here
        super().__init__()
        self.config = DataConfig(**kwargs)
        self.resume: dict[str, int] | None = None

    def prepare_data(self) -> None:
        """On one process per node: the index is made here, and read by the others in `setup`."""
        load_splits(self.config, evaluate=self._evaluate)

    def setup(self, stage: str) -> None:
        self.splits: Splits = load_splits(self.config, evaluate=self._evaluate)
        self.seed = int(os.environ["PL_GLOBAL_SEED"])

    @property
    def _evaluate(self) -> bool:
        assert self.trainer is not None
        return self.trainer.state.fn != "fit"

    @property
    def num_classes(self) -> int:
        return len(self.splits.classes)

    @property
    def plan(self) -> BatchPlan:
        assert self.trainer is not None
        return plan_batches(self.config, self.splits, self.trainer)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        plan = self.plan
        epochs = count_epochs(total_steps(self.trainer, plan), steps_per_epoch=plan.steps_per_epoch)
        dataset = TrainImages(
            self.splits.train,
            TrainTransform(self.config, epochs=epochs),
            seed=self.seed,
            skip_bad=self.config.on_bad_image == "skip",
        )
        # With several ranks Lightning replaces this sampler by one of the same kind for its rank.
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=self.seed)
        batches = TrainBatchSampler(sampler, plan.per_rank_batch, self.config.drop_last, self.config.shuffle)
        return ResumableLoader(dataset, resume=self.resume, batch_sampler=batches, **self._options())

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        config = self.config
        dataset = ValImages(
            self.splits.val,
            val_transform(val_resize=config.val_resize, val_size=config.val_size),
            skip_bad=config.on_bad_image == "skip",
        )
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        batch_size = max(1, config.global_batch_size // parts)
        batches = ValBatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)
        return Loader(dataset, batch_sampler=batches, **self._options())

    def _options(self) -> dict[str, Any]:
        assert self.trainer is not None
        on_cuda = self.trainer.strategy.root_device.type == "cuda"
        workers = loader_workers(self.config.num_workers, local_ranks=self.trainer.num_devices)
        return loader_options(num_workers=workers, pin_memory=on_cuda)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Images and targets; the sample numbers stay where the host reads them."""
        images, target, index = batch
        return images.to(device, non_blocking=True), target.to(device, non_blocking=True), index

    # The place in an epoch. Lightning restores a data module's state before anything builds the loaders; a loader's own
    # state is restored as well, but too late where something has built them.

    def state_dict(self) -> dict[str, int]:
        assert self.trainer is not None
        loader = self.trainer.train_dataloader
        assert isinstance(loader, ResumableLoader)
        return loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.resume = dict(state_dict)
