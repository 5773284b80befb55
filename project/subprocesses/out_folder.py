"""Where a command that runs others writes: a new folder, or the empty one that was given."""

import itertools
from pathlib import Path

from project.runtime.errors import UserError


def new_folder(out: Path | None, *, root: str = "comparisons") -> Path:
    """`--out`, or comparisons/0, 1, 2 ...: the first that does not exist.

    Raises:
        UserError: it holds something.
    """
    if out is None:
        number = next(k for k in itertools.count() if not (Path(root) / str(k)).exists())
        out = Path(root) / str(number)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "not empty" if out.is_dir() else "a file"
        raise UserError(f"--out {out} is {what}. Name a new folder, or remove that one.")
    return out
