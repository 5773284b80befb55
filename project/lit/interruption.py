"""Checkpoints between the ends of epochs, and an orderly end when a signal comes; `ranks/agreement.py` says how ranks agree."""

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from project.lit.checkpoint import Last
from project.lit.private_lightning import react_to_sigterm
from project.ranks.agreement import STOP, Agreement, Interrupted
from project.ranks.private_torch import default_store
from project.report.lines import interrupted_line
from project.runtime.launched import started_by_others, started_by_us
from project.runtime.process import end_at_once
from project.settings.config import CheckpointConfig


class Interruption(Callback):
    """Asks at each boundary of the training what is to be done there; the last callback, so that a checkpoint holds what all did.

    Not Lightning's own reaction to SIGTERM: it broadcasts inside the signal handler, which hangs when the ranks stand elsewhere.
    """

    def __init__(self, config: CheckpointConfig, last: Last | None) -> None:
        self.config, self.last = config, last
        self.agreement: Agreement | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if started_by_us() or started_by_others():  # until the first step
            react_to_sigterm(trainer, end_at_once)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.agreement = Agreement(
            default_store(),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            every_steps=self.config.every_steps if self.last else 0,
            every_s=self.config.every_minutes * 60 if self.last else 0.0,
        )
        self.agreement.begin()  # after Lightning has set its signal handlers; it puts back the first ones at its end

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            assert self.agreement is not None
            self._heed(trainer, self.agreement.after_step(trainer.global_step))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.agreement is not None:  # not in the few batches before the first step
            self._heed(trainer, self.agreement.after_validation_batch(batch_idx))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.agreement is not None:
            self._heed(trainer, self.agreement.after_validation_batches())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.agreement is not None
        self.agreement.saved()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _heed(self, trainer: Trainer, asked: str) -> None:
        if not asked:
            return
        assert self.agreement is not None
        path = self.last.save(trainer) if self.last else None
        self.agreement.saved()
        if asked == STOP:
            interrupted = Interrupted(self.agreement.signal)
            if trainer.is_global_zero:
                sys.stderr.write(interrupted_line(str(interrupted), path, step=trainer.global_step) + "\n")
            raise interrupted

    def _close(self) -> None:
        if self.agreement is not None:
            self.agreement.close()
