"""The five most likely classes of images: `python -m project.predict --ckpt_path CKPT IMAGE_OR_FOLDER... [--json FILE]`."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from project.core.errors import BadImageError
from project.core.inference import find_images, load_trained, predict
from project.core.process import run_command

_TOP = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m project.predict", description=__doc__, allow_abbrev=False)
    parser.add_argument("images", nargs="+", metavar="IMAGE_OR_FOLDER")
    parser.add_argument("--ckpt_path", help="a checkpoint of a run")
    parser.add_argument("--weights", help="or a state dict of torchvision or timm")
    parser.add_argument("--ema", action="store_true", help="the moving average of the checkpoint's run")
    parser.add_argument("--json", metavar="FILE", help="write the predictions to this file too")
    parser.add_argument("--batch_size", type=int, default=32, help="images per forward (default: %(default)s)")
    options = parser.parse_args()
    if options.batch_size < 1:
        parser.error(f"--batch_size is {options.batch_size}: give 1 or more images")
    trained = load_trained(ckpt_path=options.ckpt_path, weights=options.weights, ema=options.ema)
    paths = find_images(options.images)

    table = Table("image", "class", "probability", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    rows, failed = [], []
    for path, result in predict(trained, paths, batch_size=options.batch_size):
        if isinstance(result, BadImageError):
            failed.append(result)
            continue
        top = result.topk(min(_TOP, len(result)))
        found = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        rows.append(
            {
                "image": path,
                "predictions": [{"class": trained.classes[i], "label": trained.labels[i], "probability": p} for i, p in found],
            }
        )
        for position, (i, probability) in enumerate(found):
            table.add_row("" if position else path, trained.labels[i], f"{probability:.2%}", end_section=i == found[-1][0])
    Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty()).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for error in failed:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
