"""The moving average: when it is updated, and that it is saved and restored; `model/ema.py` says how."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from project.lit.module import Classifier
from project.model.ema import build_ema
from project.model.optim import warmup_steps
from project.model.training_record import RECORD, TrainingRecord


class MovingAverage(Callback):
    """Averages the weights after each step, on every rank: weights are equal there, so averages are, too.

    Not Lightning's WeightAveraging, which stores the average as the checkpoint's weights and ends with it in their place.
    """

    def __init__(self) -> None:
        self.restored: dict[str, Any] = {}
        self.step = 0

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.restored = TrainingRecord.from_dict(checkpoint[RECORD], source="the checkpoint").ema

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        assert pl_module.model is not None
        warmup = warmup_steps(pl_module.config, steps_per_epoch=pl_module.data.plan.steps_per_epoch)
        ema = build_ema(pl_module.model, pl_module.config, warmup_steps=warmup)
        if ema is not None and self.restored:
            ema.load_state_dict(self.restored)
        pl_module.averages = [] if ema is None else [ema]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Classifier)
        assert pl_module.model is not None
        if trainer.global_step == self.step:  # a batch that was accumulated
            return
        self.step = trainer.global_step
        for ema in pl_module.averages:
            ema.update(pl_module.model, step=self.step)
