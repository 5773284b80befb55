"""Run a trainer as a user would, in a clean process, with a tracer on each rank."""

from collections.abc import Sequence
from pathlib import Path

from project.measure.timeline.rank_tracer import Plan
from project.runtime.errors import UserError
from project.runtime.launched import python_module
from project.settings.arguments import flag_value
from project.subprocesses.clean_process import last_lines, run_to_end

# No validation, checkpoints or bar between the steps; a warm-up of the rate that is longer than the trace would be refused
QUIET = {
    **{"--max_epochs": "-1", "--model.warmup_epochs": "0", "--trainer.limit_val_batches": "0"},
    **{"--trainer.num_sanity_val_steps": "0", "--trainer.enable_checkpointing": "false"},
    **{"--trainer.enable_progress_bar": "false"},
}


def trace_training(impl: str, arguments: Sequence[str], folder: Path, *, steps: int, timeout: float) -> None:
    """Leaves FOLDER/ranks/rank-0.json ... and the trainer's output.

    Raises:
        UserError: the training failed, or the folder cannot be made; the message ends with the trainer's own.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror}. Name another folder.") from error
    ranks = str((folder / "ranks").absolute())
    quiet = [word for flag in QUIET.items() for word in flag]
    given = [*arguments, *quiet, "--trainer.max_steps", str(Plan(steps).total), "--trainer.default_root_dir", str(folder)]
    if impl == "raw":
        command = [*python_module("project.measure.timeline.traced_raw"), ranks, str(steps), *given]
    else:
        callback = ["--trainer.callbacks+=project.measure.timeline.traced_lit.Tracing"]
        callback += ["--trainer.callbacks.folder", ranks, "--trainer.callbacks.steps", str(steps)]
        command = [*python_module("project.fit"), *given, *callback]
    devices = flag_value(list(arguments), "--devices") or flag_value(list(arguments), "--trainer.devices") or "its own"
    number = f"{devices} device{'s' * (devices != '1')}"
    print(f"{Plan(steps).total} steps of the {impl} trainer on {number}, {steps} of them traced", flush=True)
    code = run_to_end(command, folder / "output.txt", timeout=timeout, KINETO_LOG_LEVEL="99")
    if code is None:
        raise UserError(
            f"The {impl} trainer took more than {timeout:.0f} s (--timeout). Its output so far:\n{last_lines(folder)}"
        )
    if code != 0:
        raise UserError(f"The {impl} trainer ended with exit code {code}. Its own message:\n{last_lines(folder)}")
