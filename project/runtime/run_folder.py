"""runs/0, runs/1 ...: where a run writes, and where the newest checkpoint of all runs is."""

from pathlib import Path

from project.runtime.errors import UserError

RUNS = "runs"


def new_run_folder(root: Path) -> Path:
    """root/runs/0, 1, 2 ...: the first that did not exist. Two runs that start at once get two folders."""
    runs = root / RUNS
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = max((int(entry.name) for entry in runs.iterdir() if entry.name.isdigit()), default=-1) + 1
        while True:
            try:
                (runs / str(number)).mkdir()
                return runs / str(number)
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(
            f"Cannot write the run folder {runs}: {error.strerror}. Name another --trainer.default_root_dir."
        ) from error


def newest_checkpoint(root: Path, name: str = "last") -> Path | None:
    """The last.ckpt (or best.ckpt) that was written last, of all runs below a root."""
    found = sorted((root / RUNS).glob(f"*/checkpoints/{name}.ckpt"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None
