"""The five most likely classes of images: `python -m project.predict --ckpt_path CKPT IMAGE_OR_FOLDER... [--json FILE]`.

Images come in the order given, one given twice comes twice. In the JSON file an image that cannot be read has `error` in
place of `predictions`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from project.model.inference import find_images, load_trained, predict
from project.report.table import Column, print_table
from project.runtime.command import Parser
from project.runtime.errors import BadImageError
from project.runtime.files import prepare_place, write_text
from project.runtime.process import run_command

_TOP = 5


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m project.predict", description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("images", nargs="+", metavar="IMAGE_OR_FOLDER")
    parser.add_argument("--ckpt_path", help="a checkpoint of a run")
    parser.add_argument("--weights", help="or a state dict of torchvision or timm")
    parser.add_argument("--ema", action="store_true", help="the moving average of the checkpoint's run")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the predictions to this file too")
    parser.add_argument("--batch_size", type=int, default=32, help="images per forward (default: %(default)s)")
    options = parser.parse_args()
    if options.batch_size < 1:
        parser.error(f"--batch_size is {options.batch_size}: give 1 or more images")
    if options.json is not None:
        prepare_place(options.json, flag="--json")
    trained = load_trained(ckpt_path=options.ckpt_path, weights=options.weights, ema=options.ema)
    paths = find_images(options.images)

    cells: list[tuple[str, str, str]] = []
    rows: list[dict[str, Any]] = []
    failed = []
    for path, result in predict(trained, paths, batch_size=options.batch_size):
        if isinstance(result, BadImageError):
            failed.append(str(result).splitlines()[0])
            rows.append({"image": path, "error": failed[-1]})
            cells.append((path, "cannot be read", ""))
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
            cells.append(("" if position else path, trained.labels[i], f"{probability:.2%}"))
    print_table((Column("image"), Column("class"), Column("probability", right=True)), cells)
    if options.json:
        write_text(options.json, json.dumps(rows, indent=1) + "\n")
    for error in failed:
        sys.stderr.write(f"error: {error}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
