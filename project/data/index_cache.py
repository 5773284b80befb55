"""A folder is scanned once: its index is kept in the cache folder while no folder in it has changed."""

import errno
import hashlib
import json
import os
import struct
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import platformdirs

from project.data.index import ImageIndex
from project.data.scanning import scan_classes
from project.runtime.files import replacing

_VERSION = 2
_RACY_NS = 2_000_000_000  # a folder changed this shortly before the scan may change again within one tick of its clock

# What zipfile, NumPy and json make of a file that is cut off, overwritten, or of another program.
_NO_INDEX = (OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError, MemoryError, struct.error, zipfile.BadZipFile)


def cache_folder() -> Path:
    """`$LOCKSTEP_CACHE`, else the user's cache folder of this system; it may not exist, and cannot be made everywhere."""
    return Path(os.path.expanduser(os.environ.get("LOCKSTEP_CACHE") or platformdirs.user_cache_path("lockstep")))


def make_cache_folder() -> Path:
    folder = cache_folder()
    if folder.parts[:1] == ("~",):  # no HOME, and nobody of this user's number is known
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fresh(folder: str, stamps: dict[str, int], scanned_ns: int) -> bool:
    try:
        return all(
            os.stat(os.path.join(folder, name)).st_mtime_ns == stamp and stamp < scanned_ns - _RACY_NS
            for name, stamp in stamps.items()
        )
    except OSError:  # it is gone, or closed to this user: the scan will say so
        return False


def cached_index(folder: Path) -> Path:
    """The file in which a folder's index is remembered, there or not."""
    real = os.path.realpath(folder)
    return cache_folder() / "index" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:24]}.npz"


def load_index(folder: Path) -> ImageIndex:
    """The index of a folder of class folders: from the cache while no folder has changed, else scanned and cached.

    Files and folders that were added, removed or renamed change a folder's modification time and are noticed; an image
    overwritten in place is not. A cache that cannot be read is scanned anew; one that cannot be written is named in `note`.
    """
    real = os.path.realpath(folder)
    cached = cached_index(folder)
    remembered = _remembered(cached, real)
    if remembered is not None:
        return remembered
    started = time.time_ns()
    index, stamps = scan_classes(real)
    meta = {
        "version": _VERSION,
        "scanned_ns": started,
        "stamps": stamps,
        "classes": index.classes,
        "ignored": index.ignored,
    }
    encoded = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    try:
        (make_cache_folder() / "index").mkdir(exist_ok=True)
        with replacing(cached) as partial, partial.open("wb") as file:
            np.savez(file, meta=encoded, names=index.names, ends=index.ends, targets=index.targets)
    except OSError as error:
        return replace(index, note=_cannot_write(cache_folder(), error))
    return index


def _remembered(cached: Path, folder: str) -> ImageIndex | None:
    """The index that was kept in a file, if it is whole and the folder has not changed since."""
    try:
        with cached.open("rb") as opened, np.load(opened) as file:
            meta = json.loads(file["meta"].tobytes())
            if meta["version"] != _VERSION or not _fresh(folder, meta["stamps"], meta["scanned_ns"]):
                return None
            names, ends, targets = (file[name] for name in ("names", "ends", "targets"))
            kinds = (names.dtype, ends.dtype, targets.dtype) == (np.uint8, np.int64, np.int64)
            whole = kinds and len(ends) == len(targets) > 0 and ends[-1] == len(names)
            return ImageIndex(folder, meta["classes"], names, ends, targets, tuple(meta["ignored"])) if whole else None
    except _NO_INDEX:
        return None


def _cannot_write(folder: Path, error: OSError) -> str:
    return f"{folder} cannot be written ({error.strerror}), so each run lists the images anew: name a folder with LOCKSTEP_CACHE"
