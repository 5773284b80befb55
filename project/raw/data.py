"""Replaces LightningDataModule and Lightning's sampler injection: each rank's share of the images."""

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from project.data.loading import (
    Loader,
    ResumableLoader,
    Sample,
    TrainBatchSampler,
    TrainImages,
    ValBatchSampler,
    ValImages,
    loader_options,
)
from project.data.splits import Splits
from project.data.transforms import TrainTransform, val_transform
from project.raw.cli import TrainerConfig
from project.raw.distributed import Ranks
from project.settings.config import DataConfig
from project.settings.plan import BatchPlan, loader_workers


def plan_batches(config: DataConfig, splits: Splits, trainer: TrainerConfig, *, world_size: int) -> BatchPlan:
    limit = trainer.limit_train_batches
    return BatchPlan(
        global_batch_size=config.global_batch_size,
        world_size=world_size,
        accumulate=trainer.accumulate_grad_batches,
        samples=len(splits.train),
        drop_last=config.drop_last,
        limit=1.0 if limit is None else limit,
    )


class ImageFolders:
    """Training and validation images from folders of classes, for one rank."""

    def __init__(self, config: DataConfig, splits: Splits, plan: BatchPlan, ranks: Ranks, *, local_ranks: int, seed: int) -> None:
        self.config, self.splits, self.plan, self.ranks, self.seed = config, splits, plan, ranks, seed
        workers = loader_workers(config.num_workers, local_ranks=local_ranks)
        self._options: dict[str, Any] = loader_options(num_workers=workers, pin_memory=ranks.device.type == "cuda")

    def train_dataloader(self, *, epochs: float | None) -> ResumableLoader[Sample]:
        dataset = TrainImages(
            self.splits.train,
            TrainTransform(self.config, epochs=epochs),
            seed=self.seed,
            skip_bad=self.config.on_bad_image == "skip",
        )
        # All ranks shuffle with the same seed and epoch, then each takes every world_size-th sample.
        sampler: DistributedSampler[Sample] = DistributedSampler(
            dataset,
            num_replicas=self.ranks.world_size,
            rank=self.ranks.rank,
            shuffle=self.config.shuffle,
            seed=self.seed,
        )
        batches = TrainBatchSampler(sampler, self.plan.per_rank_batch, self.config.drop_last, self.config.shuffle)
        return ResumableLoader(dataset, batch_sampler=batches, **self._options)

    def val_dataloader(self) -> DataLoader[Sample]:
        config = self.config
        dataset = ValImages(
            self.splits.val,
            val_transform(val_resize=config.val_resize, val_size=config.val_size),
            skip_bad=config.on_bad_image == "skip",
        )
        # It repeats images until all ranks have as many; ValBatchSampler marks those, so that none counts twice.
        sampler: DistributedSampler[Sample] = DistributedSampler(
            dataset, num_replicas=self.ranks.world_size, rank=self.ranks.rank, shuffle=False, seed=self.seed
        )
        batches = ValBatchSampler(sampler, self.plan.per_rank_batch, drop_last=False)
        return Loader(dataset, batch_sampler=batches, **self._options)
