"""Files and folders that appear whole: a reader finds the old content or the new, and never half of it."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from project.runtime.errors import UserError

_RANDOM = re.compile(r"[0-9a-z_]{8}")  # the end of the name of an unfinished file


@contextmanager
def replacing(path: Path, *, flush: bool = True, partials: Path | None = None) -> Iterator[Path]:
    """A new, empty file, which takes the place of `path` at the end of the block. After an error nothing has changed.

    Its permissions are those of any new file. Several processes may write at once: the last one counts. A link keeps pointing
    to the file that is replaced; a device or a pipe is written to directly.

    Args:
        path: File to make or to replace.
        flush: The content, and then the name, are on the disk when the block ends. Without it the file survives the end of
            this process, but maybe not one of the machine: for what is read at once, or for many files that are synced once.
        partials: Folder for the unfinished file, on the same file system; that of `path` if None. The name of an unfinished
            file begins with a dot and has no suffix, so that no pattern such as *.json finds it.
    """
    if not path.is_file() and path.exists():
        yield path
        return
    target = _behind_link(path)
    partial = _new_name(target, partials or target.parent)
    partial.open("xb").close()
    try:
        yield partial
        if flush:
            with partial.open("r+b") as file:
                os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if flush:
        _flush_folder(target.parent)


def write_text(path: Path, text: str, *, flush: bool = True) -> None:
    """The whole text, or the file as it was; `flush` as in `replacing`."""
    with replacing(path, flush=flush) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """A new folder, which becomes `path` at the end of the block, unless another process was first; else nothing of it stays."""
    partial = _new_name(path, path.parent)
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_unfinished(path: Path) -> None:
    """Remove what writers of `path` that were killed have left beside it. No other process may be writing to it."""
    target = _behind_link(path)
    start = _start_of_name(target)
    for other in target.parent.iterdir():
        if other.name.startswith(start) and _RANDOM.fullmatch(other.name.removeprefix(start)):
            other.unlink(missing_ok=True)


def _behind_link(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _start_of_name(target: Path) -> str:
    return f".{os.fsencode(target.name)[:200].decode(errors='ignore')}."  # most file systems allow 255 bytes


def _new_name(target: Path, folder: Path) -> Path:
    return folder / f"{_start_of_name(target)}{secrets.token_hex(4)}"


def _flush_folder(folder: Path) -> None:
    """So that the new name survives as well. Where a folder cannot be flushed, the old file may come back, and is whole."""
    if os.name == "posix":
        with contextlib.suppress(OSError):  # some network file systems refuse it; the file itself is already in its place
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def prepare_place(path: Path, *, flag: str) -> None:
    """Make the folder of a file that will be written at the end of a long computation.

    Raises:
        UserError: no file can be written there.
    """
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder: name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {path}: its folder cannot be made ({error.strerror}). Name another place.") from error
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: nothing may be written to its folder. Name another place.")
