"""Replaces SaveConfigCallback, CSVLogger and TensorBoardLogger: one new folder per run, and what is logged to it."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from project.raw.cli import Settings, save_config
from project.raw.distributed import Ranks, broadcast
from project.report.curves import draw_curves
from project.runtime.progress import Interval
from project.runtime.run_folder import new_run_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_COLUMNS = ["epoch", "step", "train/data_wait", "train/images_per_s", "train/loss", "train/lr"]
_OF_VALIDATION = ["images", "loss", "top1", "top5"]


def make_run_folder(settings: Settings, ranks: Ranks) -> Path:
    """Made by rank 0, with the run's config.yaml; the other ranks are told."""
    made = new_run_folder(Path(settings.trainer.default_root_dir or ".")) if ranks.is_first else None
    folder: Path = broadcast(made)
    if ranks.is_first:
        save_config(settings, folder)
    return folder


class Logger:
    """Writes metrics.csv, TensorBoard's events and curves.png on the rank that is given a folder, and nothing on the others."""

    def __init__(self, folder: Path | None, *, rows: bool, ema: bool) -> None:
        prefixes = ["val/ema_", "val/"] if ema else ["val/"]
        self.columns = _COLUMNS + [prefix + name for prefix in prefixes for name in _OF_VALIDATION]
        self.folder, self.minute = folder, Interval()
        self.board = _open_board(folder) if folder is not None and rows else None

    def log(self, *rows: dict[str, float]) -> None:
        """Append rows to metrics.csv, where what has no value stays empty, and their values to the events of their steps."""
        if self.folder is not None and self.board is not None:
            for row in rows:
                self._write(row, self.folder / "metrics.csv", self.board)

    def _write(self, row: dict[str, float], path: Path, board: "SummaryWriter") -> None:
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            if new:
                writer.writeheader()
            writer.writerow(row)
        for name, value in row.items():
            if name != "step":
                board.add_scalar(name, value, int(row["step"]))
        board.flush()  # so that a run which is interrupted leaves what it has logged

    def draw(self, history: list[dict[str, float]]) -> None:
        if self.folder is not None and history:
            draw_curves(history, self.folder / "curves.png")

    def draw_each_minute(self, history: list[dict[str, float]]) -> None:
        if history and self.minute.over():
            self.draw(history)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _open_board(folder: Path) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # here: only rank 0 need load it

    return SummaryWriter(folder)
