"""What training costs on this machine, beside what a person would write by hand: `python -m project.bench step`.

python -m project.bench step                  one training step, in turns: a bare loop, both trainers; and where its time goes
python -m project.bench step --tiny           the same of a network of one layer: what a trainer adds
python -m project.bench data --data.root DIR  images per second and core, from files to a batch
python -m project.bench ranks                 the same batch on each of 1, 2 ... ranks, and what reduction costs
python -m project.bench start                 seconds from the command to the first step

Each prints a table; --json FILE and --chart FILE keep it. Close other programs: a figure is one machine's, a ratio is less so.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from project.core.errors import UserError
from project.core.launch import run_command


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(arguments: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m project.bench", description=__doc__, formatter_class=raw, allow_abbrev=False)
    parsers = parser.add_subparsers(dest="what", required=True, metavar="{step,data,ranks,start}")
    common = Parser(add_help=False, allow_abbrev=False)
    common.add_argument("--json", type=Path, help="Write all values here.")
    common.add_argument("--chart", type=Path, help="Write a picture here (.png, .svg).")
    common.add_argument("--rounds", type=int, default=7, help="Turns of each contestant.")
    step = parsers.add_parser("step", parents=[common], help="one training step")
    step.add_argument("--devices", type=int, default=1, help="Ranks of each contestant.")
    step.add_argument("--batch", type=int, default=8, help="Images on each rank.")
    step.add_argument("--size", type=int, default=224, help="Pixels.")
    step.add_argument("--tiny", action="store_true", help="A network of one layer, 32 pixels.")
    step.add_argument("--compile", action="store_true", help="With torch.compile, too.")
    return parser.parse_args(arguments)


def main() -> int:
    own = parse(sys.argv[1:])
    for name in ("rounds", "devices", "batch", "size"):
        value = getattr(own, name, 1)
        if value < 1:
            raise UserError(f"--{name} {value}: give 1 or more.")
    from project.measure.results import lines, save_chart, save_json
    from project.measure.step import StepOptions, bench_step

    size = 32 if own.tiny else own.size
    results = bench_step(StepOptions(own.devices, own.batch, size, own.rounds, own.tiny, own.compile))
    print("\n".join(lines(results)), flush=True)
    if own.json:
        save_json(results, own.json)
    if own.chart:
        save_chart(results, own.chart)
    return 0


if __name__ == "__main__":
    run_command(main)
