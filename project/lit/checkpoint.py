"""Checkpoints: when Lightning writes them, what they say of the run, and what makes a resumed run exact."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from project.data.image_list import describe_images
from project.lit.data import ImageFolders
from project.lit.interchange import as_lightning, fit_loop
from project.lit.module import Classifier
from project.lit.private_lightning import validation_is_due
from project.model.checkpoint_file import copy_atomic, find_best, write_atomic
from project.model.nonfinite import scores
from project.model.training_record import RECORD, TrainingRecord
from project.ranks.tensors import equal_buffers


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own writer returns silently when it may not write; this one raises, and never leaves half a file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_atomic(checkpoint, path)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Onto the CPU, as Lightning's own reader does: tensors of a GPU would come back to that GPU, on every rank."""
        content = super().load_checkpoint(path, map_location, weights_only)
        if "loops" not in content:
            return as_lightning(content, best_key=Best().state_key)
        record = TrainingRecord.from_dict(content[RECORD], source="the checkpoint")
        if record.inside_epoch:
            # Lightning takes an epoch that max_steps has cut short for a whole one, and would not train its rest.
            content["loops"]["fit_loop"] = fit_loop(record)
        return content


class Last(Checkpoint):
    """checkpoints/last.ckpt: the end of the newest epoch, or what `save` was asked for since.

    Not Lightning's ModelCheckpoint, whose `every_n_train_steps` after a resume also saves between the batches of one step,
    where the gradients that are being accumulated would be lost.
    """

    dirpath: str | None = None

    def save(self, trainer: Trainer) -> Path:
        """On all ranks, after an optimizer step or inside the validation."""
        assert self.dirpath is not None
        path = Path(self.dirpath) / "last.ckpt"
        trainer.save_checkpoint(path)
        return path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)


class Best(ModelCheckpoint):
    """checkpoints/best.ckpt: the highest validation top-1; the first of equals. One with a loss of NaN or infinity never counts.

    A resumed run begins with the best of the run that it goes on from.
    """

    def __init__(self) -> None:
        super().__init__(filename="best", monitor="val/top1", mode="max", enable_version_counter=False)
        self.inherited: Path | None = None
        self.resumed_from: str | os.PathLike[str] | None = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.resumed_from = trainer.ckpt_path

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        return scores(trainer.callback_metrics) and super().check_monitor_top_k(trainer, current)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = find_best(state_dict["best_model_path"], ckpt_path=self.resumed_from)
        if state_dict["best_model_score"] is None or before is None or self.dirpath is None:
            return
        own = str(Path(self.dirpath) / before.name)
        self.best_model_score = self.kth_value = state_dict["best_model_score"]
        self.best_model_path = self.kth_best_model_path = own
        self.best_k_models = {own: self.best_model_score}
        self.inherited = before

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.inherited is not None and trainer.is_global_zero:
            copy_atomic(self.inherited, self.best_model_path)


class Record(Callback):
    """What a checkpoint says of its run, in plain values: all that the raw trainer needs to go on, and the commands read."""

    def __init__(self, pending: "PendingValidation") -> None:
        self.pending = pending

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert isinstance(pl_module, Classifier)
        data: ImageFolders = pl_module.data
        history = checkpoint["callbacks"]["TrainMetrics"]["history"]
        record = TrainingRecord(
            model=asdict(pl_module.config),
            data=asdict(data.config),
            classes=data.splits.classes,
            samples=len(data.splits.train),
            images=describe_images(data.splits),
            steps_per_epoch=data.plan.steps_per_epoch,
            batches_per_epoch=data.plan.batches,
            accumulate=data.plan.accumulate,
            world_size=trainer.world_size,
            seed=data.seed,
            epoch=trainer.current_epoch,
            step=trainer.global_step,
            batches=data.state_dict()["batches"],
            complete=self.pending.epoch_is_complete(trainer),
            pending=self.pending.is_due(trainer),
            best=_best(trainer),
            history=history,
            optimizer=checkpoint["optimizer_states"][0],  # the same tensors as Lightning's: stored once
            schedule=checkpoint["lr_schedulers"][0],
            scaler=checkpoint.get("MixedPrecision", {}),
            ema={name: value for ema in pl_module.averages for name, value in ema.state_dict().items()},
            metrics=newest_validation(history),
        )
        checkpoint[RECORD] = record.to_dict()


def newest_validation(history: list[dict[str, float]]) -> dict[str, float]:
    """Its metrics, also where it was before a resume, of which `trainer.callback_metrics` knows nothing; empty without one."""
    row = next((row for row in reversed(history) if "val/top1" in row), {})
    return {name: value for name, value in row.items() if name.startswith("val/")}


def _best(trainer: Trainer) -> dict[str, Any]:
    """Path and top-1 of the best checkpoint so far; empty without one."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, Best) and callback.best_model_score is not None:
            return {"path": callback.best_model_path, "top1": callback.best_model_score.item()}
    return {}


class EqualBuffers(Callback):
    """BatchNorm's running statistics made equal on all ranks, as rank 0 has them, before validation, saving and an epoch's end.

    They differ after every training step. DDP itself copies rank 0's before the next training forward, so this changes
    neither the training nor what rank 0 saves; it makes the live model on every rank the one that was saved.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._broadcast(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._broadcast(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._broadcast(pl_module)

    def _broadcast(self, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        assert pl_module.model is not None
        equal_buffers(pl_module.model, *(ema.model for ema in pl_module.averages))


class PendingValidation(Callback):
    """A checkpoint written at a batch that a validation follows, or inside that validation, resumes with the whole of it.

    Lightning's loop state alone would go on without it, or in the middle of it with a wrong count.
    """

    def __init__(self) -> None:
        self.validated = False

    def on_train_batch_start(self, *_: Any) -> None:
        self.validated = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated = True

    def is_due(self, trainer: Trainer) -> bool:
        """A validation after the newest batch is still to come."""
        return validation_is_due(trainer) and not self.validated

    def epoch_is_complete(self, trainer: Trainer) -> bool:
        """Nothing of the running epoch is left to do: all batches trained, its validation done or not due."""
        return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and not self.is_due(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self.is_due(trainer):
            return
        state = checkpoint["loops"]["fit_loop"]
        batches = state["epoch_loop.batch_progress"]
        for span in ("total", "current"):
            batches[span]["completed"] = batches[span]["processed"]
        zero = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        state["epoch_loop.val_loop.batch_progress"] = {
            "total": dict(zero),
            "current": dict(zero),
            "is_last_batch": False,
        }
