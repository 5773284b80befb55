"""Checkpoint files: written whole or not at all, read without running code from them, and what ours say of themselves."""

import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from project.core.errors import UserError

RECORD = "lockstep"  # key of what both trainers say of a run in its checkpoints


def write_atomic(content: Any, path: str | os.PathLike[str]) -> None:
    """torch.save to a file beside `path`, flushed to the disk and renamed: a reader sees the old file or the new one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


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


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether the file is a complete zip archive, as torch.save writes; reads its end only."""
    return zipfile.is_zipfile(path)


def read_checkpoint(path: str | os.PathLike[str], *, flag: str = "--ckpt_path") -> dict[str, Any]:
    """A checkpoint of ours.

    Raises:
        UserError: as read_file, or a file of another origin.
    """
    content = read_file(path, flag=flag)
    if RECORD not in content:
        raise UserError(
            f"{flag} {path} is no checkpoint of a training run here. For a state dict use\n"
            "--model.weights FILE (fit) or --weights FILE (validate, predict, export)."
        )
    return content
