"""What a person sees: one bar in a terminal, a few plain lines without one, and a closing line; from rank 0 only."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from project.ranks.interval_means import IntervalMeans
from project.report.lines import epoch_line, status
from project.runtime.progress import Bar, Interval, epoch_name


class TrainingProgress(ProgressBar):
    """Batches of the running epoch or validation, images per second over all ranks, and the share of time that rank 0
    waited for data."""

    def __init__(self, metrics: IntervalMeans) -> None:
        super().__init__()
        self.metrics = metrics
        self.bar = Bar()
        self._epoch_began = 0.0
        self._minute = Interval()

    @property
    def is_enabled(self) -> bool:
        return self.bar.enabled

    @property
    def is_disabled(self) -> bool:
        return not self.bar.enabled

    def disable(self) -> None:  # Lightning calls it on the other ranks
        self.bar.enabled = False

    def enable(self) -> None:
        self.bar.enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.bar.print(*args)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    def _epoch(self, trainer: Trainer) -> str:
        return epoch_name(trainer.current_epoch, trainer.max_epochs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # which is not called for an epoch that is resumed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bar.open(self._epoch(trainer), self.total_train_batches)
        self._epoch_began = time.monotonic()
        self._minute.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bar.advance(batch_idx + 1, status(self.metrics.latest))
        if not self.bar.drawn and self.metrics.latest and self._minute.over():
            place = f"batch {batch_idx + 1}/{self.total_train_batches}"
            self.bar.print(f"{self._epoch(trainer)}, {place}: {status(self.metrics.latest)}")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.bar.open("validation", sum(trainer.num_val_batches))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self.bar.advance(batch_idx + 1, "")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            images_per_s, wait = self.metrics.epoch_speed()
            line = epoch_line(
                self.metrics.epoch_loss,
                trainer.callback_metrics,
                seconds=time.monotonic() - self._epoch_began,
                images_per_s=images_per_s,
                wait=wait,
            )
            self.bar.print(f"{self._epoch(trainer)}: {line}")
            self.bar.open(self._epoch(trainer), self.total_train_batches)  # validation may come inside an epoch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bar.close()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self.bar.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.bar.close()
