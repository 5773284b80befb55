"""curves.png: loss, learning rate and top-1 over the steps, redrawn while the training runs."""

import time
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from project.lit.metrics import TrainMetrics
from project.report.curves import draw_curves

_EVERY_S = 60.0  # at most, while training


class Curves(Callback):
    """Draws what TrainMetrics has gathered; on rank 0."""

    def __init__(self, metrics: TrainMetrics) -> None:
        self.metrics = metrics
        self.folder: Path | None = None  # set when the run folder is made
        self._drawn = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if time.monotonic() - self._drawn > _EVERY_S and not trainer.sanity_checking:
            self._draw(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and self.folder is not None and self.metrics.history:
            draw_curves(self.metrics.history, self.folder / "curves.png")
            self._drawn = time.monotonic()
