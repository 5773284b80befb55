"""Replaces torchmetrics and self.log: counts added up by hand, over batches and then over ranks."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from project.data.loading import IGNORE
from project.raw.distributed import sum_over_ranks
from project.runtime.deferred import Late


class ValMetrics:
    """Loss, top-1, top-5 and images of an evaluation, as sums: padding counts nowhere, and ranks can be added."""

    def __init__(self, device: torch.device, *, prefix: str = "val/") -> None:
        self.prefix = prefix
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1 hits, top-5 hits, images

    def update(self, logits: Tensor, target: Tensor) -> None:
        """float32 [n, classes] and int64 [n], IGNORE where a sample does not count."""
        loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none").double()
        counts = (target != IGNORE).double()
        hits = logits.topk(min(5, logits.shape[1])).indices == target[:, None]
        hits &= logits.isfinite().all(dim=1, keepdim=True)  # topk takes NaN for the largest, and so for a hit
        top1, top5 = hits[:, 0].double(), hits.any(dim=1).double()
        self.sums += torch.stack([(loss * counts).sum(), (top1 * counts).sum(), (top5 * counts).sum(), counts.sum()])

    def compute(self) -> dict[str, float]:
        """The same values on every rank."""
        loss, top1, top5, images = sum_over_ranks(self.sums).cpu()
        values = {
            "top1": (top1.float() / images.float()).item(),  # float32, as torchmetrics divides
            "top5": (top5.float() / images.float()).item(),
            "loss": (loss / images).item(),
            "images": images.item(),
        }
        return {f"{self.prefix}{name}": value for name, value in values.items()}


class TrainMetrics:
    """The mean over all ranks and over an interval of steps; read one interval late, so that no step waits for it.

    Attributes:
        history: Rows of step and values, over resumes too: `train/loss`, `train/lr`, `val/top1` ...
        replaced: Unreadable images that were replaced on this rank, with the number of the first.
        lr: Learning rate of the newest step.
    """

    def __init__(self, device: torch.device, *, world_size: int) -> None:
        self.world_size, self.lr = world_size, 0.0
        self.history: list[dict[str, float]] = []
        self.replaced: list[int] = []
        self._pending: tuple[dict[str, float], Late] | None = None
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # the sum over the interval's batches
        self.begin_epoch()

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
        self._loss.zero_()
        self._batches = self._images = 0
        self._waited = 0.0
        self._began = self._batch_ended = time.perf_counter()

    def begin_batch(self) -> None:
        self._waited += time.perf_counter() - self._batch_ended

    def end_batch(self, loss: Tensor, index: Tensor) -> None:
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
