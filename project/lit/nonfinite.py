"""No ruined state is validated or saved; `model/nonfinite.py` says what that is."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from project.lit.checkpoint import Last
from project.lit.module import Classifier
from project.model.nonfinite import training_tensors, unusable_line
from project.ranks.state_check import Advice, StateCheck


class RefuseRuin(Callback):
    """Looks at weights, buffers, optimizer and average before each validation, before each save, and at the end.

    It comes after EqualBuffers, so that statistics of rank 0 alone count, and before the guard, whose report of a gradient is for
    the author of a script.
    """

    def __init__(self, ckpt_path: str | None) -> None:
        self.ckpt_path = ckpt_path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check = StateCheck(pl_module.device)
        self._look(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.check.watch.see(outputs["batch_loss"], step=self.step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._look(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        line = unusable_line(trainer.callback_metrics)
        if line and trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.print(line)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        assert pl_module.model is not None
        average = pl_module.averages[0].model if pl_module.averages else None
        last = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, Last)]
        own = [Path(folder) / "last.ckpt" for folder in last if folder is not None]
        advice = Advice(
            lr=pl_module.config.lr,
            clips=bool(trainer.gradient_clip_val),
            precision=str(trainer.precision),
            checkpoints=(*own, *([Path(self.ckpt_path)] if self.ckpt_path else [])),
        )
        tensors = training_tensors(pl_module.model, trainer.optimizers[0], average)
        self.check(tensors, step=trainer.global_step, advice=advice)
