"""Smaller images, once, for faster training: `python -m project.prepare --src DIR --dst DIR`.

DIR in --src holds train/<class>/ and val/<class>/, or class folders alone, or Kaggle's ImageNet, or the original archives
(ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz). It is only read. Training images become
JPEG files of a smaller size; validation files stay as they are. The same command goes on where it was interrupted.
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from project.data.manifest import RECORD, Settings
from project.data.preparing.making import Preparation, check_apart, check_folder, check_space, duration, estimate, gigabytes
from project.data.preparing.sources import find_source
from project.report.lines import no_images
from project.runtime.command import Parser
from project.runtime.errors import UserError
from project.runtime.plurals import count
from project.runtime.process import SIGNALS, run_command
from project.settings.plan import available_cores

_SHOWN = 20  # images that were left out, on the terminal; the record names all


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _quality(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 100")
    return int(text)


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m project.prepare", description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--src", required=True, type=Path, metavar="DIR", help="the original images or archives")
    parser.add_argument("--dst", required=True, type=Path, metavar="DIR", help="the folder to make")
    pixels: dict[str, Any] = {"type": _positive, "metavar": "PIXELS"}
    parser.add_argument("--short-side", **pixels, default=256, help="of training images, at most (default: %(default)s)")
    parser.add_argument("--quality", type=_quality, default=90, metavar="Q", help="of new JPEG files (default: %(default)s)")
    parser.add_argument("--val-short-side", **pixels, help="of validation images, at most (default: they stay unchanged)")
    parser.add_argument(
        "--workers", type=_positive, default=available_cores(), metavar="N", help="processes (default: %(default)s)"
    )
    options = parser.parse_args()
    src, dst = options.src.expanduser(), options.dst.expanduser()
    if not src.is_dir():
        raise UserError(f"--src {src} is no folder: name the one with the images or archives.")
    settings = Settings(
        src=str(src.resolve()), short_side=options.short_side, quality=options.quality, val_short_side=options.val_short_side
    )
    check_apart([settings.src], dst)
    begun = check_folder(settings, dst)
    parts = find_source(settings)
    if settings.val_short_side is not None and len(parts) == 1:
        raise UserError(
            f"--val-short-side {settings.val_short_side}: {src} has class folders alone and no validation images. Leave it out."
        )
    check_apart([str(part.where) for part in parts], dst)
    expected = estimate(parts, settings.quality)

    print(f"from  {src}")
    for part in parts:
        size = gigabytes(part.bytes) if part.count is None else count(part.count, "image")
        name = part.where.name if part.count is None else part.name or "class folders"
        print(f"      {name}: {size}, {count(len(part.classes), 'class')}")
        if part.ignored[0]:
            print(f"note  in it {no_images(*part.ignored)}")
    print(f"to    {dst}")
    print(f"      training: short side {settings.short_side} at most, JPEG quality {settings.quality}")
    if len(parts) == 1:
        print("      all are resized, also those that a training holds out for validation")
    else:
        val = f"short side {settings.val_short_side} at most" if settings.val_short_side else "files unchanged"
        print(f"      validation: {val}")
    if begun:
        print("      goes on with what an earlier run has begun")
    else:
        free = check_space(expected.bytes, dst)
        print(f"disk  about {gigabytes(expected.bytes)} of the {gigabytes(free)} that are free")
    print(f"run   {count(options.workers, 'process')}", flush=True)

    preparation = Preparation(settings, dst, parts, expected.counts)
    for number in SIGNALS:
        signal.signal(number, _end)
    try:
        seconds = preparation.run(workers=options.workers)
    except KeyboardInterrupt as ended:
        number = ended.args[0]
        sys.stderr.write(f"ended by {signal.Signals(number).name} with {count(preparation.images, 'image')} done; ")
        sys.stderr.write("the same command goes on with the rest\n")
        return 128 + number
    tallies = preparation.tallies.values()
    before, after = (gigabytes(sum(getattr(tally, name) for tally in tallies)) for name in ("source_bytes", "bytes"))
    now = "" if preparation.new == preparation.images else f"{preparation.new:,} of them now, "
    speed = f"{now}{duration(seconds)}, {preparation.new / seconds:,.0f} img/s"
    print(f"done  {count(preparation.images, 'image')}, {before} became {after} ({speed})")
    print(f"      train with --data.root {dst}", flush=True)
    return _report(preparation.left_out, dst)


def _report(left_out: list[dict[str, str]], dst: Path) -> int:
    """Name the images that were left out; the exit code."""
    if not left_out:
        return 0
    number = "one image" if len(left_out) == 1 else f"{len(left_out):,} images"
    sys.stderr.write(f"error: {number} could not be read and {'was' if len(left_out) == 1 else 'were'} left out:\n")
    for bad in left_out[:_SHOWN]:
        sys.stderr.write(f"{bad['file']}: {bad['reason']}\n")
    if len(left_out) > _SHOWN:
        sys.stderr.write(f"and {len(left_out) - _SHOWN:,} more, which {dst / RECORD} names\n")
    sys.stderr.write("Repair them and run the same command again: it prepares these alone.\n")
    return 1


if __name__ == "__main__":
    run_command(main)
