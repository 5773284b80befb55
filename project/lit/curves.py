"""curves.png: loss, learning rate and top-1 over the steps, redrawn while the training runs."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from project.ranks.interval_means import IntervalMeans
from project.report.curves import draw_curves
from project.runtime.progress import Interval


class Curves(Callback):
    """Draws the rows of TrainMetrics; on rank 0."""

    def __init__(self, metrics: IntervalMeans) -> None:
        self.metrics = metrics
        self.folder: Path | None = None  # set when the run folder is made
        self._minute = Interval()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self.metrics.history and self._minute.over():
            self._draw(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and self.folder is not None and self.metrics.history:
            draw_curves(self.metrics.history, self.folder / "curves.png")
