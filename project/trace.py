"""See what each rank does in a step: `python -m project.trace --devices 2`.

python -m project.trace [--config FILE] [--steps 5] [--impl lightning|raw] [--out DIR] [any flag of the trainers]

It trains a few steps with the trainer that is asked for, under torch.profiler on every rank, and writes trace.json (for
https://ui.perfetto.dev or chrome://tracing), timeline.html (opens from disk) and summary.json to traces/0, 1, 2 ...
"""

import argparse
import shlex
import sys
from pathlib import Path

from project.runtime.command import Parser, end_by_exception
from project.runtime.errors import UserError
from project.runtime.process import run_command

FIXED = {  # what a trace decides itself
    "--model.warmup_epochs": "a trace is too short to warm up",
    "--trainer.limit_val_batches": "nothing is validated between the steps of a trace",
    "--trainer.num_sanity_val_steps": "nothing is validated between the steps of a trace",
    "--trainer.enable_checkpointing": "nothing is saved between the steps of a trace",
    "--trainer.enable_progress_bar": "a bar would be timed, too",
    "--trainer.max_steps": "--steps says how many steps are traced",
    "--max_epochs": "--steps says how many steps are traced",
    "--trainer.max_epochs": "--steps says how many steps are traced",
    "--trainer.fast_dev_run": "a trace needs more than one step",
    "--trainer.default_root_dir": "--out says where to write",
    "--ckpt_path": "a trace begins with new weights, which take as long",
    "--record": "recording would be timed, too",
    "--print_config": "a trace needs a training",
}


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The trace's own flags, and all others, which are the trainer's."""
    parser = Parser(
        prog="python -m project.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=5, help="Trace this many steps. The training takes about twice as many.")
    parser.add_argument("--impl", choices=("lightning", "raw"), default="lightning", help="Trace this trainer.")
    parser.add_argument("--out", type=Path, help="Write to this new folder. Default: traces/0, 1, 2 ...")
    parser.add_argument("--timeout", type=float, default=1800.0, help="End the training after this many seconds.")
    own, others = parser.parse_known_args(arguments)
    if not 1 <= own.steps <= 100:
        raise UserError(f"--steps {own.steps}: give 1 to 100; each step is some megabytes of trace.")
    if not 0 < own.timeout < float("inf"):
        raise UserError(f"--timeout {own.timeout:g}: give a number of seconds above 0.")
    names = [argument.partition("=")[0] for argument in others]
    for name in names:
        if name in FIXED:
            raise UserError(f"{name}: {FIXED[name]}. Leave it out.")
    if not {"--devices", "--trainer.devices", "--config", "-c"} & set(names):
        others = ["--devices", "2", *others]
    return own, others


def main() -> int:
    end_by_exception()
    own, others = parse(sys.argv[1:])
    from project.measure.timeline.page import write_all
    from project.measure.timeline.summary import lines
    from project.measure.timeline.traced_training import trace_training
    from project.subprocesses.out_folder import new_folder

    out = new_folder(own.out, root="traces")
    trace_training(own.impl, others, out, steps=own.steps, timeout=own.timeout)
    summary = write_all(out, command=shlex.join(["python", "-m", "project.trace", *sys.argv[1:]]))
    print("\n".join([*lines(summary), f"files in {out}:", "timeline.html, trace.json, summary.json, ranks/"]), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
