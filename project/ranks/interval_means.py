"""What both trainers tell of their training: loss, rate, speed and the wait for data, over intervals of steps."""

import time
from typing import Any

import torch
from torch import Tensor

from project.ranks.tensors import sum_over_ranks
from project.runtime.deferred import Late

CPU = torch.device("cpu")


class IntervalMeans:
    """The mean over all ranks and over an interval of steps; read one interval late, so that no step waits for it.

    Attributes:
        history: Rows of step and values, over resumes too: `train/loss`, `train/lr`, `val/top1` ...
        replaced: Unreadable images that were replaced on this rank, with the number of the first.
        lr: Learning rate of the newest step.
    """

    def __init__(self, device: torch.device = CPU, *, world_size: int = 1) -> None:
        self.lr = 0.0
        self.history: list[dict[str, float]] = []
        self.replaced: list[int] = []
        self._pending: tuple[dict[str, float], Late] | None = None
        self.to(device, world_size=world_size)
        self.begin_epoch()

    def to(self, device: torch.device, *, world_size: int) -> None:
        """Where losses come from, and of how many ranks."""
        self.world_size = world_size
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # the sum over the interval's batches

    @property
    def epoch_loss(self) -> float | None:
        """Mean training loss of this epoch over all ranks; None where a resumed run has nothing of it left but the validation."""
        return self._epoch_loss / self._epoch_batches if self._epoch_batches else None

    @property
    def latest(self) -> dict[str, float]:
        """The newest training row, empty before the first."""
        return next((row for row in reversed(self.history) if "train/loss" in row), {})

    def begin_epoch(self) -> None:
        self._epoch_images, self._epoch_seconds, self._epoch_waited = 0, 0.0, 0.0
        self._epoch_loss, self._epoch_batches = 0.0, 0.0
        self.restart()

    def epoch_speed(self) -> tuple[float, float]:
        """Images per second over all ranks, and the share of time spent waiting for data, in this epoch's training."""
        seconds = max(self._epoch_seconds, 1e-9)
        return self._epoch_images * self.world_size / seconds, self._epoch_waited / seconds

    def restart(self) -> None:
        """Begin an interval."""
        self._loss.zero_()  # not a new one, to which nothing could be added if this were inference mode
        self._batches = self._images = 0
        self._waited = 0.0
        self._began = self._batch_ended = time.perf_counter()

    def begin_batch(self) -> None:
        """A batch has come."""
        self._waited += time.perf_counter() - self._batch_ended

    def end_batch(self, loss: Tensor, index: Tensor) -> None:
        """A batch has been trained: its mean loss on this rank, and int64 [n] sample numbers, ~number if replaced."""
        self._images += len(index)
        self._loss += loss
        self._batches += 1
        self.replaced += [~i for i in index.tolist() if i < 0]
        self._batch_ended = time.perf_counter()

    def end_interval(self, *, epoch: int, step: int) -> list[dict[str, float]]:
        """Send this interval's sums on their way; the rows of the one before have arrived."""
        arrived = self.flush()
        if self._images:
            elapsed = max(self._batch_ended - self._began, 1e-9)
            self._epoch_images += self._images
            self._epoch_seconds += elapsed
            self._epoch_waited += self._waited
            row: dict[str, Any] = {
                "step": step,
                "epoch": epoch,
                "train/lr": self.lr,
                "train/images_per_s": self._images * self.world_size / elapsed,
                "train/data_wait": self._waited / elapsed,
            }
            self._pending = row, Late(sum_over_ranks(torch.stack([self._loss, torch.full_like(self._loss, self._batches)])))
            self.restart()
        return arrived

    def flush(self) -> list[dict[str, float]]:
        """The row of the newest interval that was ended, if it has not been read yet."""
        if self._pending is None:
            return []
        row, late = self._pending
        self._pending = None
        loss, batches = late.read()
        row["train/loss"] = loss / batches
        self._epoch_loss += loss
        self._epoch_batches += batches
        self.history.append(row)
        return [row]
