"""The arithmetic of a run: how a global batch is split over ranks and accumulation, and how many steps that makes."""

import math
import os
from dataclasses import dataclass

from project.runtime.errors import UserError
from project.runtime.plurals import count


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loader_workers(num_workers: int | None, *, local_ranks: int) -> int:
    """`data.num_workers`, by default this rank's share of the cores, less the one it trains on; at most 16."""
    if num_workers is not None:
        return num_workers
    return max(0, min(16, available_cores() // local_ranks - 1))


def count_steps(*, max_epochs: int | None, max_steps: int, steps_per_epoch: int) -> int | None:
    """Optimizer steps of a whole training; None where nothing limits them."""
    limits = [] if max_epochs is None or max_epochs < 0 else [max_epochs * steps_per_epoch]
    limits += [] if max_steps < 0 else [max_steps]
    return min(limits, default=None)


def limit_batches(batches: int, limit: int | float | None) -> int:
    """At most `limit` batches (an int), or a share of them (a float), as Lightning's limits mean it."""
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def count_epochs(total_steps: int | None, *, steps_per_epoch: int) -> float | None:
    """A training's length in epochs, whatever limits it; None where nothing does."""
    return None if total_steps is None else total_steps / steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """`global_batch_size` images per optimizer step = ranks x per-rank batch x accumulated batches.

    Attributes:
        samples: Training images in the set.
        limit: Batches per rank and epoch at most (an int), or a share of them (a float), as Lightning's limit_train_batches.
    """

    global_batch_size: int
    world_size: int
    accumulate: int
    samples: int
    drop_last: bool
    limit: int | float | None = None

    def __post_init__(self) -> None:
        size, parts = self.global_batch_size, self.world_size * self.accumulate
        if size % parts:
            below, above = size // parts * parts, -(-size // parts) * parts
            nearest = f"{below} or {above}" if below else f"{above}"
            raise UserError(
                f"--data.global_batch_size {size} does not divide into {count(self.world_size, 'rank')} x "
                f"--trainer.accumulate_grad_batches {self.accumulate}: the nearest that does is {nearest}."
            )
        if self.samples < self.world_size:
            raise UserError(
                f"{count(self.samples, 'training image')} for {self.world_size} ranks are too few: "
                f"give --devices {self.samples} or fewer."
            )
        if self.batches == 0 and self._all_batches:
            raise UserError(
                f"--trainer.limit_train_batches {self.limit} of {count(self._all_batches, 'batch')} per rank leaves none. "
                "Give 1 or more batches, or a larger share of 1.0."
            )
        if self.batches == 0:
            raise UserError(
                f"No training batch: {count(self.samples, 'image')} over {count(self.world_size, 'rank')} are "
                f"{self.samples_per_rank} each, less than the per-rank batch of {self.per_rank_batch} "
                f"(--data.global_batch_size {size}), and\n--data.drop_last true leaves incomplete batches out. "
                "Give a smaller global batch, or --data.drop_last false."
            )

    @property
    def per_rank_batch(self) -> int:
        """Images per forward on one rank: what BatchNorm sees."""
        return self.global_batch_size // (self.world_size * self.accumulate)

    @property
    def samples_per_rank(self) -> int:
        """DistributedSampler repeats a few samples, so that all ranks get the same number."""
        return math.ceil(self.samples / self.world_size)

    @property
    def batches(self) -> int:
        """Forwards per rank and epoch."""
        return limit_batches(self._all_batches, self.limit)

    @property
    def _all_batches(self) -> int:
        whole, rest = divmod(self.samples_per_rank, self.per_rank_batch)
        return whole + bool(rest and not self.drop_last)

    @property
    def last_batch(self) -> int:
        """Images in the smallest training batch of a rank."""
        rest = self.samples_per_rank % self.per_rank_batch
        reached = self.batches * self.per_rank_batch > self.samples_per_rank
        return rest if rest and reached and not self.drop_last else self.per_rank_batch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps; the last one of an epoch may cover fewer batches."""
        return math.ceil(self.batches / self.accumulate)

    @property
    def tail(self) -> int:
        """Batches in a last, incomplete accumulation window; 0 without one."""
        return self.batches % self.accumulate

    def line(self) -> str:
        """For people: images per step, how ranks and accumulation share them, steps per epoch."""
        accumulated = f" x {self.accumulate} accumulated" if self.accumulate > 1 else ""
        return (
            f"{count(self.global_batch_size, 'image')} per step = {count(self.world_size, 'rank')} x {self.per_rank_batch}"
            f"{accumulated}, {count(self.steps_per_epoch, 'step')} per epoch"
        )
