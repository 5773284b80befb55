"""The images of a folder as flat arrays: paths and class numbers, which loader processes share without copying."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class ImageIndex:
    """Image paths and class numbers as flat arrays, which loader workers share without copying.

    Attributes:
        folder: What the paths are relative to.
        classes: Class names; a target is a position in this list.
        names: All relative paths, encoded, one after another.
        ends: int64 [n], where each path ends in `names`.
        targets: int64 [n].
        ignored: Number of files that are not images, with one of them.
        note: Why it could not be remembered; empty if it is.
    """

    folder: str
    classes: list[str]
    names: np.ndarray
    ends: np.ndarray
    targets: np.ndarray
    ignored: tuple[int, str] = (0, "")
    note: str = ""

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, i: int) -> str:
        """Path of image i, relative to the folder."""
        start = self.ends[i - 1] if i else 0
        return os.fsdecode(self.names[start : self.ends[i]].tobytes())

    def path(self, i: int) -> str:
        """Of image number `i`, with the folder."""
        return os.path.join(self.folder, self.name(i))

    @cached_property
    def digest(self) -> str:
        """Of the paths in their order and their classes, wherever the folder lies."""
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for array in (self.names, self.ends.astype("<i8"), self.targets.astype("<i8")):
            digest.update(array.tobytes())
        return digest.hexdigest()[:32]

    def select(self, keep: np.ndarray) -> "ImageIndex":
        """The images whose positions are in `keep`, with the same classes."""
        chosen = make_index(self.folder, self.classes, [(self.name(i), int(self.targets[i])) for i in keep], self.ignored)
        return replace(chosen, note=self.note)


def make_index(folder: str, classes: list[str], samples: list[tuple[str, int]], ignored: tuple[int, str] = (0, "")) -> ImageIndex:
    """An index of (path below `folder`, class number) for each image; `ignored`: how many other files, and one of them."""
    encoded = [os.fsencode(name) for name, _ in samples]
    return ImageIndex(
        folder=folder,
        classes=classes,
        names=np.frombuffer(b"".join(encoded), dtype=np.uint8),
        ends=np.cumsum([len(name) for name in encoded], dtype=np.int64),
        targets=np.array([target for _, target in samples], dtype=np.int64),
        ignored=ignored,
    )
