"""Checkpoint files: written whole or not at all, read without running code from them, and what ours say of themselves."""

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from project.model.nonfinite import check_loaded
from project.model.training_record import RECORD, TrainingRecord
from project.runtime.errors import UserError, WriteError
from project.runtime.files import remove_unfinished, replacing

_PREFIX = re.compile(r"^(?:(?:module|model|_orig_mod)\.)+")


def write_atomic(content: Any, path: str | os.PathLike[str]) -> None:
    """torch.save to a file beside `path`, flushed to the disk and renamed: a reader sees the old file or the new one.

    Tensors are stored as the CPU's: a machine without a GPU opens the file, with a plain torch.load, too.
    One process at a time may write to a path: what an earlier one has left half-written is removed.

    Raises:
        WriteError: the disk is full, nothing may be written there, and the like; the old file is as it was.
    """
    with _writing(Path(path)) as partial, partial.open("wb") as file:  # of a path torch.save would note the name, which is random
        torch.save(on_cpu(content, {}), file)


def on_cpu(content: Any, copies: dict[int, Tensor]) -> Any:
    """The same content with all tensors on the CPU; what is one tensor in two places stays one, as in `copies`."""
    if isinstance(content, Tensor):
        if content.device.type == "cpu":
            return content
        if id(content) not in copies:
            copies[id(content)] = content.detach().cpu()
        return copies[id(content)]
    if isinstance(content, dict):
        found = copy(content)  # a state dict has attributes besides its items
        found.update({name: on_cpu(value, copies) for name, value in content.items()})
        return found
    if type(content) in (list, tuple):
        return type(content)(on_cpu(value, copies) for value in content)
    return content


def copy_atomic(source: Path, path: str | os.PathLike[str]) -> None:
    """The same for a copy of a file.

    Raises:
        WriteError: as write_atomic.
    """
    with source.open("rb") as original, _writing(Path(path)) as partial, partial.open("wb") as file:
        shutil.copyfileobj(original, file)


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(target)
        with replacing(target) as partial:
            yield partial
    except (OSError, RuntimeError) as error:  # of a full disk torch.save makes a RuntimeError of its own
        reason = next((e.strerror for e in (error, error.__cause__, error.__context__) if isinstance(e, OSError)), error)
        kept = "; the file that was there before is whole" if target.is_file() else ""
        raise WriteError(f"cannot write {target}: {reason}{kept}") from error


def read_file(path: str | os.PathLike[str], *, flag: str) -> dict[str, Any]:
    """Any file of tensors, onto the CPU: torch's own formats with `weights_only`, or safetensors.

    Raises:
        UserError: no such file, an incomplete one, or one that holds more than tensors and plain values.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{flag} {path}: there is no such file.")
    size = file.stat().st_size
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{flag} {path} ({size:,} bytes) holds something else than tensors and plain values, or is no file of torch's:\n"
            "save model.state_dict() with torch.save, or as .safetensors."
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, OSError, SafetensorError) as error:
        raise UserError(
            f"{flag} {path} ({size:,} bytes) is damaged or incomplete: use an older checkpoint, or copy the file again."
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{flag} {path} holds a {type(content).__name__}, not weights: save model.state_dict() instead.")
    return content


def read_checkpoint(path: str | os.PathLike[str], *, flag: str = "--ckpt_path") -> dict[str, Any]:
    """A checkpoint of ours.

    Raises:
        UserError: as read_file, or a file of another origin.
    """
    try:
        content = read_file(path, flag=flag)
        if RECORD not in content:
            raise UserError(
                f"{flag} {path} is no checkpoint of a training run here. For a state dict use\n"
                "--model.weights FILE (fit) or --weights FILE (validate, predict, export)."
            )
    except UserError as error:
        other = newest_whole(Path(path))
        raise UserError(f"{error}\nThe newest whole checkpoint beside it is {other}." if other else str(error)) from error
    return content


def read_record(path: str | os.PathLike[str], *, flag: str = "--ckpt_path") -> TrainingRecord:
    """What a checkpoint of ours says of its training.

    Raises:
        UserError: as read_checkpoint, or a newer version has written it.
    """
    return TrainingRecord.from_dict(read_checkpoint(path, flag=flag)[RECORD], source=f"{flag} {path}")


def find_best(recorded: str, *, ckpt_path: str | os.PathLike[str] | None) -> Path | None:
    """The best checkpoint of the run that a training goes on from: beside the checkpoint, as whole folders are moved, or where
    its path says, which may be relative to another folder; None where it is gone."""
    places = [] if ckpt_path is None else [Path(ckpt_path).parent / Path(recorded).name]
    return next((place for place in (*places, Path(recorded)) if place.is_file()), None)


def newest_whole(path: Path) -> Path | None:
    """The checkpoint beside another one, or in the runs beside its run, that was written last and is complete."""
    found = [*path.parent.glob("*.ckpt"), *path.parent.parent.parent.glob("*/checkpoints/*.ckpt")]
    others = sorted({each for each in found if each != path}, key=lambda each: each.stat().st_mtime, reverse=True)
    return next((each for each in others if _is_whole(each)), None)


def _is_whole(path: Path) -> bool:
    """Whether it is a complete archive, as torch.save writes, of ours; its tensors are not read."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/data.pkl") and RECORD.encode() in archive.read(name) for name in archive.namelist())


def extract_state_dict(content: dict[str, Any], *, path: str, flag: str) -> dict[str, Tensor]:
    """The tensors of a plain state dict, or of one under the usual keys, without the prefixes that wrappers add.

    Raises:
        UserError: it is none of a ResNet.
        Ruined: a tensor holds NaN or an infinity.
    """
    for key in ("state_dict", "model", "state_dict_ema"):
        if isinstance(content.get(key), dict):
            content = content[key]
            break
    tensors = {_PREFIX.sub("", name): value for name, value in content.items() if isinstance(value, Tensor)}
    if "fc.weight" not in tensors or "conv1.weight" not in tensors:
        found = ", ".join(list(tensors)[:3]) or "no tensor"
        raise UserError(f"{flag} {path} holds no ResNet as torchvision and timm name it (found {found}).")
    check_loaded(tensors, path=path, flag=flag)
    return tensors
