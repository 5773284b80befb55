"""Files that take the place of older ones whole: a reader finds the old content or the new, and never half of it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from project.runtime.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its place at the end of the block. After an error nothing has changed.

    Its name ends as that of `path` does, and its permissions are those of any new file. Several processes may write at
    once: the last one counts. A link keeps pointing to the file that is replaced; a device or a pipe is written to directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.stem[:100]}-{secrets.token_hex(4)}{target.suffix}")
    partial.open("xb").close()
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """The whole text, or the file as it was."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


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
