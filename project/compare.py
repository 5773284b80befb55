"""Train with both trainers and compare them, bit for bit: `python -m project.compare --devices 2`.

python -m project.compare [--config FILE] [any flag of the trainers] [--out DIR]
python -m project.compare --runs A B        two records, of our trainers (--record A) or of any training (project.record)
python -m project.compare --a "COMMAND"     any training, twice: is it deterministic?
python -m project.compare --a "C" --b "D"   two trainings: the first difference, by step, rank and tensor
                          --anchored        each step of b from a's state: is the difference rounding?
                          --from-step N     b goes on where a has made N steps: is a resume exact?
python -m project.compare --inject FAULT    break one thing in the raw run, which must come out as not equivalent
python -m project.compare --inject all      each of them; exit code 0 if each was found where it is
python -m project.compare --matrix [ROW]    each configuration in which both must be equivalent, or this one
python -m project.compare --noise           where a device does not repeat its own bits: against measured noise

Exit code 0: equivalent, or equal; 1: not; 2: could not tell.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from project.runtime.command import Parser, end_by_exception
from project.runtime.errors import UserError
from project.runtime.process import report_failure, run_command


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The comparison's own flags, and all others, which are the trainers'."""
    parser = Parser(
        prog="python -m project.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, help="Write everything to this new folder. Default: comparisons/0, 1, 2 ...")
    parser.add_argument("--runs", type=Path, nargs=2, metavar=("A", "B"), help="Compare these two records. Nothing is run.")
    parser.add_argument("--a", metavar="COMMAND", help="Record this command, as you type it in a shell.")
    parser.add_argument("--b", metavar="COMMAND", help="Record this one as well, and compare both. Default: --a once more.")
    parser.add_argument("--steps", type=int, default=0, help="With --a: end both after so many optimizer steps.")
    parser.add_argument("--from-step", type=int, default=0, help="Compare b from its start with a from this step, from 0.")
    parser.add_argument("--anchored", action="store_true", help="With --a, --b: begin each step of b where a began it.")
    parser.add_argument("--accept", default="", metavar="NAMES", help="With --anchored: reasons that count as equal.")
    parser.add_argument("--inject", metavar="FAULT", help="Break one thing in the raw trainer. `all` breaks each in turn.")
    parser.add_argument("--matrix", nargs="?", const="all", metavar="ROW", help="Compare in many configurations, or in this one.")
    parser.add_argument("--timeout", type=float, default=1800.0, help="End a training after this many seconds.")
    parser.add_argument(
        "--noise",
        action="store_true",
        help="Run the raw trainer twice. What its own two runs differ by is allowed between the trainers.",
    )
    parser.add_argument("--keep", action="store_true", help="Keep checkpoints and tensors of an equivalent comparison.")
    own, others = parser.parse_known_args(arguments)
    if not 0 < own.timeout < float("inf"):
        raise UserError(f"--timeout {own.timeout:g}: give a number of seconds above 0.")
    for flag in others:
        if flag.partition("=")[0] in ("--print_config", "--trainer.fast_dev_run"):
            raise UserError(f"{flag}: a comparison needs whole, recorded trainings. Leave it out.")
    if own.runs and others:
        raise UserError(f"--runs compares what was recorded and takes no {others[0]}.")
    if own.a is not None and others:
        raise UserError(f"--a runs a command of yours and takes no {others[0]}: put it into the quotes.")
    for name in ("b", "steps", "anchored", "accept"):
        if getattr(own, name) and own.a is None:
            raise UserError(f"--{name} needs --a, the command that is compared.")
    if own.from_step and own.a is None and not own.runs:
        raise UserError("--from-step needs --a and --b, or --runs: a run that was resumed is compared with a whole one.")
    if own.anchored and own.from_step:
        raise UserError("--anchored and --from-step ask for different things: give one of them.")
    if own.from_step < 0:
        raise UserError(f"--from-step {own.from_step}: give 0 or more.")
    if own.steps < 0:
        raise UserError(f"--steps {own.steps}: give 1 step or more.")
    modes = [f"--{name}" for name in ("runs", "a", "inject", "matrix", "noise") if getattr(own, name) not in (None, False)]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} ask for different things: give one of them.")
    return own, others


def injection() -> ModuleType:
    """What breaks the raw trainer on purpose.

    Raises:
        UserError: this is an installed package, which leaves the faults out.
    """
    try:
        return import_module("project.faults.injection")
    except ModuleNotFoundError as error:
        if error.name != "project.faults":
            raise
        raise UserError("--inject needs the source checkout: the installed package leaves the faults out.") from error


def compare_any(own: argparse.Namespace, out: Path) -> int:
    """Two commands, or two records of any trainings. Returns the exit code."""
    from project.parity.script_comparison import compare_records, run_commands
    from project.parity.script_reasons import REASONS, accepted, find_reasons
    from project.parity.script_rounding import judge
    from project.parity.script_verdict import left_lines, reason_lines, script_lines

    known = [reason.name for reason in REASONS]
    names = [name for name in own.accept.split(",") if name]
    if set(names) - set(known):
        raise UserError(f"--accept {own.accept}: the reasons are {', '.join(known)}.")
    if own.a is None:
        found = compare_records(*own.runs, from_step=own.from_step)
        print("\n".join(script_lines(found)), flush=True)
        return 0 if found.equal else 1
    run = {"steps": own.steps, "timeout": own.timeout, "anchored": own.anchored}
    run_commands(own.a, own.b or own.a, out, **run)
    found = compare_records(out / "a", out / "b", from_step=own.from_step)
    if found.equal or not own.anchored:
        print("\n".join(script_lines(found)), flush=True)
        return 0 if found.equal else 1
    rounding = judge(found, out / "reordered")
    print("\n".join(script_lines(found, rounding)), flush=True)
    if found.judged and rounding.explains:
        return 0

    def left_without(measures: tuple[str, str]) -> str:
        place = out / "without" / "+".join(filter(None, measures)).replace(",", "+")
        run_commands(own.a, own.b or own.a, place, **run, measures=measures)
        again = compare_records(place / "a", place / "b")
        return left_lines(again, None if again.equal else judge(again, place / "reordered"))

    tested = find_reasons(found, left_without)
    print("\n".join(reason_lines(tested)), flush=True)
    return 0 if accepted(tested, names) else 1


def main() -> int:
    end_by_exception()
    own, others = parse(sys.argv[1:])
    from project.parity.comparison import Request, compare_folders, compare_or_measure, compare_trainers, default_arguments
    from project.parity.report import write_report
    from project.parity.script_run import holds_scripts
    from project.parity.verdict import lines
    from project.subprocesses.out_folder import new_folder

    out = new_folder(own.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made: {error.strerror}. Name another folder.") from error
    if own.a is not None or (own.runs and any(map(holds_scripts, own.runs))):
        return compare_any(own, out)
    if own.from_step:
        raise UserError(
            "--from-step compares records of any training (project.record), and these are of our trainers. Leave it out."
        )
    if own.matrix is not None:
        from project.parity.matrix import choose, run_matrix

        return run_matrix(choose(own.matrix), out, others, timeout=own.timeout, keep=own.keep)
    if own.inject == "all":
        return injection().inject(["all"], out, others, timeout=own.timeout)
    if own.inject is not None:
        outcome = compare_trainers(injection().broken_request(own.inject, out, others, timeout=own.timeout, keep=own.keep))
    elif own.runs:
        outcome = compare_folders(*own.runs)
    else:
        arguments, note = default_arguments(others)
        print(note, flush=True)
        outcome = compare_or_measure(Request(out, arguments, own.timeout, keep=own.keep, noise=own.noise))
    print("\n".join(lines(outcome, str(write_report(outcome, out)))), flush=True)
    return 0 if outcome.equivalent else 1


def judged() -> int:
    """1 is a verdict: whatever else goes wrong ends with 2."""
    try:
        return main()
    except Exception as error:
        report_failure(error)
        return 2


if __name__ == "__main__":
    run_command(judged)
