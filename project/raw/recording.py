"""The raw trainer with a recorder attached from outside: `--record DIR`."""

from pathlib import Path
from typing import Any

from project.model.nonfinite import Ruined
from project.raw.trainer import Trainer
from project.record.recorder import Recorder


class RecordedTrainer(Trainer):
    """Trains as Trainer does; tells a recorder what hooks cannot see."""

    def fit(self, ckpt_path: str | None) -> None:
        try:
            super().fit(ckpt_path)
        except Ruined:
            self.recorder.close(ruined=True)
            raise
        self.recorder.close()

    def record_to(self, folder: str, settings: dict[str, Any]) -> None:
        rank, world_size = self.ranks.rank, self.ranks.world_size
        self.recorder = Recorder(folder, trainer="raw", rank=rank, world_size=world_size)
        self.settings, self.attached = settings, False

    def train_epoch(self) -> None:
        if not self.attached:  # not before: a resumed run does not know its step until here
            self.recorder.attach(
                self.module.model,
                criterion=self.module.criterion,
                optimizer=self.optimizer,
                loader=self.train_loader,
                step=self.place.step,
                settings=self.settings,
            )
            self.attached = True
        super().train_epoch()

    def log_validation(self, metrics: dict[str, float]) -> None:
        super().log_validation(metrics)
        self.recorder.validation(metrics, epoch=self.place.epoch, step=self.place.step)

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        super().write(checkpoint, path)
        self.recorder.checkpoint(path)
