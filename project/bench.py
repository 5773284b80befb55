"""What training costs on this machine, beside what a person would write by hand: `python -m project.bench step`.

python -m project.bench step                  one training step, in turns: a bare loop, both trainers; and where its time goes
python -m project.bench step --tiny           the same of a network of one layer: what a trainer adds
python -m project.bench data --data.root DIR  images per second and core, from files to a batch
python -m project.bench ranks                 the same batch on each of 1, 2 ... ranks, and what reduction costs
python -m project.bench start                 seconds from the command to the first step
python -m project.bench memory                loader processes over an index of 200,000 entries

Each prints a table; --json FILE and --chart FILE keep it. Close other programs: a figure is one machine's, a ratio is less so.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from project.runtime.command import Parser, end_by_exception
from project.runtime.errors import UserError
from project.runtime.process import run_command
from project.settings.plan import available_cores

if TYPE_CHECKING:
    from project.measure.bench.results import Results


def parse(arguments: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m project.bench", description=__doc__, formatter_class=raw, allow_abbrev=False)
    parsers = parser.add_subparsers(dest="what", required=True, metavar="{step,data,ranks,start,memory}")
    files = Parser(add_help=False, allow_abbrev=False)
    files.add_argument("--json", type=Path, help="Write all values here.")
    files.add_argument("--chart", type=Path, help="Write a picture here (.png, .svg).")
    common = Parser(add_help=False, allow_abbrev=False, parents=[files])
    common.add_argument("--rounds", type=int, default=7, help="Measure this many turns of each contestant.")
    step = parsers.add_parser("step", parents=[common], help="one training step")
    step.add_argument("--devices", type=int, default=1, help="Run each contestant on this many ranks.")
    step.add_argument("--batch", type=int, default=8, help="Images per step on each rank.")
    step.add_argument("--size", type=int, default=224, help="Height and width of an image, in pixels.")
    step.add_argument("--tiny", action="store_true", help="Train a network of one layer on 32 pixels.")
    step.add_argument("--compile", action="store_true", help="Also measure with torch.compile.")
    data = parsers.add_parser("data", parents=[common], help="from files to a batch")
    data.add_argument("--data.root", dest="root", required=True, help="Folder of photographs, as for project.fit.")
    data.add_argument("--images", type=int, default=200, help="Use at most this many training images.")
    data.add_argument("--short-side", type=int, default=256, help="Short side of the prepared images, in pixels.")
    data.add_argument("--quality", type=int, default=90, help="JPEG quality of the prepared files.")
    ranks = parsers.add_parser("ranks", parents=[common], help="weak scaling")
    ranks.add_argument("--devices", type=int, default=min(4, available_cores()), help="Measure up to this many ranks.")
    ranks.add_argument("--batch", type=int, default=8, help="Images per step on each rank.")
    ranks.add_argument("--size", type=int, default=224, help="Height and width of an image, in pixels.")
    start = parsers.add_parser("start", parents=[common], help="from the command to the first step")
    start.add_argument("--devices", type=int, default=2, help="Number of ranks.")
    start.add_argument("--files", type=int, default=100_000, help="Entries of the index that is read twice.")
    memory = parsers.add_parser("memory", parents=[files], help="of loader processes")
    memory.add_argument("--entries", type=int, default=200_000, help="Entries of the index.")
    memory.add_argument("--workers", type=int, default=2, help="Number of loader processes.")
    return parser.parse_args(arguments)


def measure(own: argparse.Namespace) -> "Results":
    if own.what == "step":
        from project.measure.bench.step_time import StepOptions, bench_step

        size = 32 if own.tiny else own.size
        return bench_step(StepOptions(own.devices, own.batch, size, own.rounds, own.tiny, own.compile))
    if own.what == "data":
        from project.measure.bench.data_loading import bench_data

        return bench_data(own.root, images=own.images, rounds=own.rounds, short_side=own.short_side, quality=own.quality)
    if own.what == "ranks":
        from project.measure.bench.scaling import bench_ranks
        from project.runtime.device import fast_precision, find_device

        bf16 = fast_precision(find_device("auto")) == "bf16-mixed"
        return bench_ranks(most=own.devices, batch=own.batch, size=own.size, rounds=own.rounds, bf16=bf16)
    if own.what == "start":
        from project.measure.bench.time_to_first_step import bench_start

        return bench_start(devices=own.devices, rounds=own.rounds, files=own.files)
    from project.measure.bench.data_loading import bench_memory

    return bench_memory(entries=own.entries, workers=own.workers)


def check_files(json: Path | None, chart: Path | None) -> None:
    """Before minutes of measuring: can they be written?"""
    if chart is not None and chart.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--chart {chart}: give a name that ends with .png, .svg or .pdf.")
    for flag, path in (("--json", json), ("--chart", chart)):
        if path is not None:
            existing = next((folder for folder in path.absolute().parents if folder.exists()), path)
            if path.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
                raise UserError(f"{flag} {path} cannot be written: name a file in a folder of yours.")


def main() -> int:
    own = parse(sys.argv[1:])
    for name, value in vars(own).items():
        if isinstance(value, int) and value < 1 and not isinstance(value, bool):
            raise UserError(f"--{name.replace('_', '-')} {value}: give 1 or more.")
    if getattr(own, "quality", 1) > 100:
        raise UserError(f"--quality {own.quality}: give 100 or less.")
    check_files(own.json, own.chart)
    results = measure(own)
    from project.measure.bench.results import lines, save_chart, save_json

    print("\n".join(lines(results)), flush=True)
    if own.json:
        save_json(results, own.json)
    if own.chart:
        save_chart(results, own.chart)
    return 0


if __name__ == "__main__":
    end_by_exception()  # so that contestants are ended, too
    run_command(main)
