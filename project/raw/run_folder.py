"""Replaces SaveConfigCallback and CSVLogger: one new folder per run, the same on all ranks, and its metrics.csv."""

import csv
import time
from pathlib import Path

from project.core.curves import draw_curves
from project.core.run_folder import new_run_folder
from project.raw.cli import Settings, save_config
from project.raw.distributed import Ranks, broadcast

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
    """Writes metrics.csv and curves.png on the rank that is given a folder, and nothing on the others."""

    def __init__(self, folder: Path | None, *, rows: bool, ema: bool) -> None:
        prefixes = ["val/ema_", "val/"] if ema else ["val/"]
        self.columns = _COLUMNS + [prefix + name for prefix in prefixes for name in _OF_VALIDATION]
        self.folder, self.rows, self.drawn = folder, rows, time.monotonic()

    def log(self, row: dict[str, float]) -> None:
        """Append a row of metrics.csv; what has no value stays empty."""
        if self.folder is None or not self.rows:
            return
        path = self.folder / "metrics.csv"
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if new:
                writer.writeheader()
            writer.writerow(row)

    def draw(self, history: list[dict[str, float]], *, at_most_every_s: float = 0.0) -> None:
        if self.folder is not None and history and time.monotonic() - self.drawn >= at_most_every_s:
            self.drawn = time.monotonic()
            draw_curves(history, self.folder / "curves.png")
