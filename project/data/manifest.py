"""What `project.prepare` leaves beside the images: prepared.json in a complete folder, preparing.json in one that is not."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.runtime.errors import UserError
from project.runtime.files import write_text
from project.runtime.plurals import count

RECORD = "prepared.json"  # written last
BEGUN = "preparing.json"  # written first
PARTIAL = ".preparing"  # files that are being written
LOCK = ".preparing.lock"  # held by the run that writes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the content of a prepared folder.

    Attributes:
        src: Absolute path of the folder with the original images or archives.
        short_side: Largest short side of a training image, in pixels.
        quality: JPEG quality of the files that are written.
        val_short_side: Largest short side of a validation image, in pixels. None leaves validation files unchanged.
    """

    src: str
    short_side: int
    quality: int
    val_short_side: int | None


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a prepared folder; None of any other one.

    Raises:
        UserError: the folder was begun and is not complete.
    """
    begun = load_json(folder / BEGUN)
    if begun is not None:
        raise UserError(
            f"{folder} is not complete: its preparation was interrupted. Run the same command again to finish it:\n"
            f"{command(begun, folder)}"
        )
    return load_json(folder / RECORD)


def load_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file.

    Raises:
        UserError: it is not one of ours, or damaged.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    needed = {*Settings.__dataclass_fields__, *(("images", "left_out", "date") if path.name == RECORD else ())}
    if not isinstance(content, dict) or not needed <= content.keys():
        raise UserError(f"{path} is damaged, or not of project.prepare: remove its folder and prepare it anew.")
    return content


def command(record: dict[str, Any], folder: Path) -> str:
    """What prepares that folder."""
    val = f" --val-short-side {record['val_short_side']}" if record["val_short_side"] else ""
    sizes = f"--short-side {record['short_side']} --quality {record['quality']}{val}"
    return f"python -m project.prepare --src {shlex.quote(record['src'])} --dst {shlex.quote(str(folder))} {sizes}"


def write_json(content: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def record_line(record: dict[str, Any]) -> str:
    """What was done to the images of a prepared folder, for the first lines of a run."""
    images = sum(part["images"] for part in record["images"].values())
    val = f", validation {record['val_short_side']}" if record["val_short_side"] else ""
    left_out = f", {len(record['left_out']):,} left out" if record["left_out"] else ""
    return (
        f"prepared: short side {record['short_side']}{val}, JPEG quality {record['quality']}, {count(images, 'image')}{left_out}"
    )
