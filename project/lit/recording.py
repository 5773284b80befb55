"""The Lightning trainer with a recorder attached from outside: `--record DIR`."""

from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from project.lit.module import Classifier
from project.model.nonfinite import Ruined
from project.record.recorder import Recorder


class Recording(Callback):
    """Tells a recorder what hooks cannot see."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        assert pl_module.model is not None
        loader: Any = trainer.train_dataloader
        world_size = trainer.world_size
        self.recorder = Recorder(self.folder, trainer="lit", rank=trainer.global_rank, world_size=world_size)
        self.recorder.attach(
            pl_module.model,
            criterion=pl_module.criterion,
            optimizer=trainer.optimizers[0],
            loader=loader,
            step=trainer.global_step,
            settings={
                "model": asdict(pl_module.config),
                "data": asdict(pl_module.data.config),
                "seed": pl_module.data.seed,
                "precision": trainer.precision,
                "accumulate": trainer.accumulate_grad_batches,
                "samples": len(pl_module.data.splits.train),
                "val_samples": len(pl_module.data.splits.val),
                "limit_train_batches": trainer.limit_train_batches,
                "limit_val_batches": trainer.limit_val_batches,
                "backend": dist.get_backend() if dist.is_initialized() else None,
            },
        )
        trainer.strategy.checkpoint_io = RecordingIO(trainer.strategy.checkpoint_io, self.recorder)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
            self.recorder.validation(metrics, epoch=trainer.current_epoch, step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Ruined) and hasattr(self, "recorder"):
            self.recorder.close(ruined=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorder.close()


class RecordingIO(CheckpointIO):
    """Records each checkpoint as it has been written by the CheckpointIO that was there before."""

    def __init__(self, checkpoint_io: CheckpointIO, recorder: Recorder) -> None:
        self.inner, self.recorder = checkpoint_io, recorder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)
        self.recorder.checkpoint(path)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        return self.inner.load_checkpoint(path, *arguments, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()
