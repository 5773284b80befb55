"""The embedded data set: 1,797 handwritten digits, rendered as JPEG files in ImageNet's folder layout.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, CC BY 4.0; the test part, in the compressed form in which scikit-learn ships it:
one line per digit, 64 pixels of 0 to 16 and the class.
"""

import errno
import getpass
import gzip
import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from project.runtime.files import making_folder

_FILE = Path(__file__).with_name("digits.csv.gz")
_PIXELS = 32  # height and width of the files, from 8 x 8 by bicubic interpolation
_VAL_EVERY = 5  # each fifth digit is for validation: 1,438 and 359


def render_digits(cache: Path) -> Path:
    """The folder with train/<digit>/ and val/<digit>/, made at first use; a half-made one is never seen."""
    folder = cache / "digits-1"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with making_folder(folder) as partial:
        with gzip.open(_FILE) as file:
            rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        for i, row in enumerate(rows):
            pixels = np.rint(row[:64].reshape(8, 8) * (255 / 16)).astype(np.uint8)
            target = partial / ("val" if i % _VAL_EVERY == _VAL_EVERY - 1 else "train") / str(row[64])
            target.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(pixels).resize((_PIXELS, _PIXELS), Image.Resampling.BICUBIC)
            image.save(target / f"{i:04d}.jpg", quality=95)
        for path in (partial, *partial.rglob("*")):  # a umask may make it private; a cache may be shared
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def temporary_folder() -> Path:
    """A folder of this user's own in the system's one for temporary files: the same for all processes of the user.

    Raises:
        OSError: it cannot be made, or somebody else has made it.
    """
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
        raise PermissionError(errno.EPERM, "made by another user", str(folder))
    return folder
