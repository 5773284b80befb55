"""One new folder per run, the same on all ranks: config.yaml, metrics, checkpoints, curves.png."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from project.lit.checkpoint import Best, Last
from project.lit.curves import Curves
from project.runtime.files import replacing
from project.runtime.process import keep_errors
from project.runtime.run_folder import new_run_folder


class RunFolder(SaveConfigCallback):
    """Makes the folder on rank 0, tells the other ranks, and points loggers, checkpoints and curves into it."""

    folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or self.folder is not None:
            return
        made = str(new_run_folder(Path(trainer.default_root_dir))) if trainer.is_global_zero else ""
        self.folder = Path(trainer.strategy.broadcast(made))
        keep_errors(self.folder)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Last | Best):
                callback.dirpath = str(self.folder / "checkpoints")
            if isinstance(callback, Curves):
                callback.folder = self.folder
        if self.config.trainer.logger in (None, True):
            csv = CSVLogger(self.folder, name="", version="", flush_logs_every_n_steps=1)
            _ = csv.experiment  # now: it warns when the folder holds a file
            board = TensorBoardLogger(self.folder, name="", version="", default_hp_metric=False)
            trainer.loggers = [csv, board]
            for logger in trainer.loggers:
                logger.log_hyperparams({"model": self.config.model.as_dict(), "data": self.config.data.as_dict()})
        if trainer.is_global_zero:
            with replacing(self.folder / self.config_filename) as partial:
                self.parser.save(self.config, partial, multifile=False, overwrite=True)
