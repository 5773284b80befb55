"""What torchmetrics sums over a validation; and the rows of a training: loss, rate, speed, wait for data, each validation."""

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from project.data.loading import IGNORE
from project.runtime.deferred import Late


class Accuracy(MulticlassAccuracy):
    """An image whose logits are not all finite counts, and is no hit: torchmetrics takes NaN for the largest logit."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        lost = ~preds.isfinite().all(dim=1) & (target != IGNORE)
        super().update(preds, torch.where(lost, IGNORE, target))
        assert isinstance(self.fn, Tensor)
        self.fn = torch.cat([self.fn[:1] + lost.sum(), self.fn[1:]])  # one number, or one for each class, which are added up


class ValMetrics(nn.Module):
    """Loss, top-1, top-5 and images of an evaluation, as sums: padding counts nowhere, and torchmetrics adds the ranks."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        counted: dict[str, Any] = {"num_classes": num_classes, "average": "micro", "ignore_index": IGNORE}
        self.top1 = Accuracy(**counted, top_k=1, validate_args=False)
        self.top5 = Accuracy(**counted, top_k=min(5, num_classes), validate_args=False)
        self.loss = MeanMetric(nan_strategy=math.nan)  # a NaN stays one; "disable" would ignore the weights as well
        self.images = SumMetric(nan_strategy="disable")

    def begin(self) -> None:
        """Sums in float64: not once at the start, since a metric that is moved to a device casts to float32 again.

        New ones, too: those of `trainer.validate` were made in inference mode, and nothing can be added to them outside.
        """
        for metric in self.named("").values():
            metric.reset()
        self.loss.set_dtype(torch.float64)
        self.images.set_dtype(torch.float64)

    def update(self, logits: Tensor, target: Tensor) -> None:
        """float32 [n, classes] and int64 [n], IGNORE where a sample does not count."""
        loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
        counts = (target != IGNORE).double()
        self.top1.update(logits, target)
        self.top5.update(logits, target)
        self.loss.update(loss.double(), counts)
        self.images.update(counts)

    def named(self, prefix: str) -> dict[str, Metric]:
        values = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "images": self.images}
        return {f"{prefix}{name}": metric for name, metric in values.items()}


class TrainMetrics(Callback):
    """Logs the mean over all ranks and over the interval of `trainer.log_every_n_steps`; one interval late.

    Attributes:
        history: Rows of step and values, over resumes too: `train/loss`, `train/lr`, `val/top1` ...
        replaced: Unreadable images that were replaced on this rank, with the number of the first.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        self.replaced: list[int] = []
        self._pending: tuple[dict[str, float], Late] | None = None
        self._lr = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]

    def epoch_speed(self, world_size: int) -> tuple[float, float]:
        """Images per second over all ranks, and the share of time spent waiting for data, in this epoch's training."""
        seconds = max(self._epoch_seconds, 1e-9)
        return self._epoch_images * world_size / seconds, self._epoch_waited / seconds

    @property
    def epoch_loss(self) -> float | None:
        """Mean training loss of this epoch over all ranks; None where a resumed run has nothing of it left but the validation."""
        return self._epoch_loss / self._epoch_batches if self._epoch_batches else None

    @property
    def latest(self) -> dict[str, float]:
        """The newest training row, empty before the first."""
        return next((row for row in reversed(self.history) if "train/loss" in row), {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=pl_module.device)  # the sum over the interval's batches
        self._every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning declares it nowhere

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # which is not called for an epoch that is resumed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_images, self._epoch_seconds, self._epoch_waited = 0, 0.0, 0.0
        self._epoch_loss, self._epoch_batches = 0.0, 0.0
        self._restart()

    def _restart(self) -> None:
        self._loss.zero_()  # not a new one, to which nothing could be added if this were inference mode
        self._batches = self._images = 0
        self._waited = 0.0
        self._began = self._batch_ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._waited += time.perf_counter() - self._batch_ended

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # of this step; the schedule moves on to the next

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        _, target, index = batch
        self._images += len(target)
        self._loss += outputs["batch_loss"]
        self._batches += 1
        self.replaced += [~i for i in index.tolist() if i < 0]
        self._batch_ended = time.perf_counter()
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step % self._every == 0:
            self._close_interval(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_interval(trainer)
        self._flush(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._close_interval(trainer)
            self._flush(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            values = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
            row = {"step": trainer.global_step, "epoch": trainer.current_epoch, **values}
            self.history.append(row)
            _log(trainer, row)
            self._restart()

    def _close_interval(self, trainer: Trainer) -> None:
        self._flush(trainer)
        if self._images:
            elapsed = max(self._batch_ended - self._began, 1e-9)
            self._epoch_images += self._images
            self._epoch_seconds += elapsed
            self._epoch_waited += self._waited
            row = {
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "train/lr": self._lr,
                "train/images_per_s": self._images * trainer.world_size / elapsed,
                "train/data_wait": self._waited / elapsed,
            }
            sums = torch.stack([self._loss, torch.full_like(self._loss, self._batches)])
            self._pending = row, Late(sum_over_ranks(sums))
            self._restart()

    def _flush(self, trainer: Trainer) -> None:
        if self._pending:
            row, late = self._pending
            self._pending = None
            loss, batches = late.read()
            row["train/loss"] = loss / batches
            self._epoch_loss += loss
            self._epoch_batches += batches
            self.history.append(row)
            _log(trainer, row)


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum in the order of the ranks, on every rank.

    Not by `trainer.strategy.reduce`: its barrier makes the host wait for the device, and from three ranks on a ring adds in
    another order, in which the last bit may differ.
    """
    if not dist.is_initialized():
        return values
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return torch.stack(gathered).sum(dim=0)


def _log(trainer: Trainer, row: dict[str, float]) -> None:
    """To all loggers, at the number of optimizer steps done."""
    values = {name: value for name, value in row.items() if name != "step"}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=int(row["step"]))
        logger.save()  # so that a run which is interrupted leaves what it has logged
