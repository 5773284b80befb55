"""What torchmetrics sums over a validation; and the rows of a training: loss, rate, speed, wait for data, each validation."""

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from project.data.loading import IGNORE
from project.ranks.interval_means import IntervalMeans


class Accuracy(MulticlassAccuracy):
    """An image whose logits are not all finite counts, and is no hit: torchmetrics takes NaN for the largest logit."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """float32 [n, classes] and int64 [n]."""
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
    """Logs the means over all ranks and over the interval of `trainer.log_every_n_steps`; one interval late.

    Attributes:
        means: Of the running interval and epoch, and the rows of all before.
    """

    def __init__(self) -> None:
        self.means = IntervalMeans()

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.means.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.means.history = state_dict["history"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.means.to(pl_module.device, world_size=trainer.world_size)
        self._every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning declares it nowhere

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # which is not called for an epoch that is resumed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.means.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.means.begin_batch()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.means.lr = optimizer.param_groups[0]["lr"]  # of this step; the schedule moves on to the next

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        _, _, index = batch
        self.means.end_batch(outputs["batch_loss"], index)
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step % self._every == 0:
            self._end_interval(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_interval(trainer)
        self._flush(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._end_interval(trainer)
            self._flush(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            values = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
            row = {"step": trainer.global_step, "epoch": trainer.current_epoch, **values}
            self.means.history.append(row)
            _log(trainer, row)
            self.means.restart()

    def _end_interval(self, trainer: Trainer) -> None:
        for row in self.means.end_interval(epoch=trainer.current_epoch, step=trainer.global_step):
            _log(trainer, row)

    def _flush(self, trainer: Trainer) -> None:
        for row in self.means.flush():
            _log(trainer, row)


def _log(trainer: Trainer, row: dict[str, float]) -> None:
    """To all loggers, at the number of optimizer steps done."""
    values = {name: value for name, value in row.items() if name != "step"}
    for logger in trainer.loggers:
        logger.log_metrics(values, step=int(row["step"]))
        logger.save()  # so that a run which is interrupted leaves what it has logged
