"""Record what any training does, without a changed line: `python -m project.record --out DIR -- python train.py --devices 2`.

Whatever follows -- is run as it is, with its own output and exit code: a script, torchrun, srun. Each process of it that takes
optimizer steps writes DIR/process-<pid>.jsonl: samples, outputs, gradients, weights as digests and numbers, no data. Compare two
records with `python -m project.compare --runs A B`.
"""

import argparse
import sys
from pathlib import Path

from project.record.recorded_command import recorded, run_recorded, size_of
from project.runtime.command import Parser, end_by_exception
from project.runtime.errors import UserError
from project.runtime.process import run_command
from project.subprocesses.out_folder import new_folder


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this command, and the command that is recorded.

    Raises:
        UserError: a flag is wrong, or there is no command.
    """
    own, command = split(arguments)
    parser = Parser(
        prog="python -m project.record",
        description=__doc__,
        usage="python -m project.record --out DIR [--steps N] [--timeout S] -- COMMAND",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="Write the record to this new folder.")
    parser.add_argument("--steps", type=int, default=0, help="End each process after so many optimizer steps.")
    parser.add_argument("--timeout", type=float, default=None, help="End the command after so many seconds.")
    given = parser.parse_args(own)
    if given.steps < 0:
        raise UserError(f"--steps {given.steps}: give 1 step or more.")
    if given.timeout is not None and not 0 < given.timeout < float("inf"):
        raise UserError(f"--timeout {given.timeout:g}: give a number of seconds above 0.")
    if not command:
        raise UserError(
            "There is no command to record: give it after --, as in python -m project.record --out A -- python train.py."
        )
    return given, command


def main() -> int:
    end_by_exception()
    given, command = parse(sys.argv[1:])
    folder = new_folder(given.out)
    code = run_recorded(command, folder, steps=given.steps, timeout=given.timeout)
    found = recorded(folder, command, code)
    print(f"recorded in {folder}: {size_of(found)}", file=sys.stderr)
    return code


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The flags of this command, and the other command after --."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    run_command(main)
