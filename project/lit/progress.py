"""What a person sees: one bar in a terminal, a few plain lines without one, and a closing line; from rank 0 only."""

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from project.core.report import epoch_line, status
from project.lit.metrics import TrainMetrics

_LINE_EVERY_S = 60.0  # without a terminal, inside a long epoch


class TrainingProgress(ProgressBar):
    """Batches of the running epoch or validation, images per second over all ranks, and the share of time that rank 0
    waited for data."""

    def __init__(self, metrics: TrainMetrics) -> None:
        super().__init__()
        self.metrics = metrics
        self.console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._enabled = True
        self._epoch_began = 0.0

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        return not self._enabled

    def disable(self) -> None:  # Lightning calls it on the other ranks
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            self.console.print(*args, markup=False)
            sys.stdout.flush()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    # The bar

    def _open(self, trainer: Trainer, description: str, total: float) -> None:
        if not self._enabled or not self.console.is_terminal:
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[status]}"),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._bar.start()
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(description, total=total, status="")

    def _advance(self, completed: int, status: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, status=status)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _status(self) -> str:
        return status(self.metrics.latest)

    # Training

    def _epoch(self, trainer: Trainer) -> str:
        last = trainer.max_epochs
        return f"epoch {trainer.current_epoch + 1}" + (f"/{last}" if last and last > 0 else "")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)  # which is not called for an epoch that is resumed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, self._epoch(trainer), self.total_train_batches)
        self._epoch_began = self._said = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._advance(batch_idx + 1, self._status())
        if self._bar is None and time.monotonic() - self._said > _LINE_EVERY_S and self.metrics.latest:
            self._said = time.monotonic()
            self.print(f"{self._epoch(trainer)}, batch {batch_idx + 1}/{self.total_train_batches}: {self._status()}")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._open(trainer, "validation", sum(trainer.num_val_batches))

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
            self._advance(batch_idx + 1, "")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            images_per_s, wait = self.metrics.epoch_speed(trainer.world_size)
            line = epoch_line(
                self.metrics.epoch_loss,
                trainer.callback_metrics,
                seconds=time.monotonic() - self._epoch_began,
                images_per_s=images_per_s,
                wait=wait,
            )
            self.print(f"{self._epoch(trainer)}: {line}")
            self._open(trainer, self._epoch(trainer), self.total_train_batches)  # validation may come inside an epoch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()
