"""The configurations in which both trainers must be equivalent, bit for bit, each run as `project.compare` runs one.

Each trains two epochs with both, and then one more with each from the other's checkpoint. A row's name is its settings. To add
a row is to write one line; a setting that no row has yet is one more line in SETTINGS.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from project.parity.comparison import Outcome, Request, compare_trainers
from project.parity.recorded_run import CannotTell
from project.parity.report import write_report
from project.parity.small_training import SMALL, small_digits
from project.parity.trainers import RAW
from project.parity.verdict import explain, rows
from project.report.table import Column, head_line, paragraph, row_line
from project.runtime.errors import UserError
from project.runtime.files import write_text
from project.settings.plan import available_cores

SETTINGS = {
    "1-rank": "--devices 1",
    "2-ranks": "--devices 2",
    "3-ranks": "--devices 3",
    "4-ranks": "--devices 4",
    "workers": "--data.num_workers 2",
    "bf16": "--precision bf16-mixed",
    "accumulate": "--trainer.accumulate_grad_batches 4",
    "clip-norm": "--trainer.gradient_clip_val 0.1",
    "clip-value": "--trainer.gradient_clip_val 0.001 --trainer.gradient_clip_algorithm value",
    "warmup-cosine": "--model.schedule cosine --model.warmup_epochs 1",
    "step-rate": "--model.schedule step --model.step_epochs 1",
    "sanity": "--trainer.num_sanity_val_steps 2",
    "limit": "--trainer.limit_train_batches 2",
    "limit-share": "--trainer.limit_train_batches 0.9",
    "val-every-2": "--trainer.check_val_every_n_epoch 2",
    "drop-last": "--data.drop_last true",
    "in-order": "--data.shuffle false",
    "adamw": "--model.optimizer adamw --model.lr 0.001",
    "nesterov": "--model.nesterov true",
    "resnet50": "--model.arch resnet50",
    "decay-groups": "--model.norm_weight_decay 0 --model.bias_weight_decay 0.001",
    "linear-rate": "--model.schedule linear --model.warmup_epochs 0.5 --model.end_lr 0.001",
    "rate-per-epoch": "--model.schedule cosine --model.warmup_epochs 1 --model.interval epoch",
    "ema": "--model.ema_decay 0.9 --model.ema_every 2",
    "trivial-augment": "--data.trivial_augment true",
    "erasing": "--data.random_erasing 0.5",
    "mixup": "--data.mixup_alpha 0.2",
    "cutmix": "--data.cutmix_alpha 1",
    "growing": "--data.start_size 32 --data.train_size 64 --data.ramp_start 0 --data.ramp_end 0.3",
    "channels-last": "--model.channels_last true",
    "compiled": "--model.compile true",
    "ddp-options": "--trainer.strategy DDPStrategy --trainer.strategy.static_graph true --trainer.strategy.bucket_cap_mb 10 "
    "--trainer.strategy.gradient_as_bucket_view true",
}

# Without a word in a row's name: no workers, float32, no accumulation, no clipping, one rate, no sanity check, whole epochs.
_WITHOUT = ("--model.schedule", "constant", "--model.warmup_epochs", "0", "--trainer.num_sanity_val_steps", "0")


@dataclass(frozen=True)
class Row:
    """A configuration.

    Attributes:
        name: Names of SETTINGS, joined by plus signs.
        seed: The row's own seed, so that all rows together show that no seed raises a false alarm.
        images: Images per step, over all ranks and accumulated batches.
    """

    name: str
    seed: int
    images: int

    @property
    def flags(self) -> tuple[str, ...]:
        """For both trainers; where the images are is added when they are made."""
        own = [flag for word in self.name.split("+") for flag in SETTINGS[word].split()]
        return (*SMALL, *_WITHOUT, *own, "--data.global_batch_size", str(self.images), "--seed_everything", str(self.seed))


# Each of 1 to 4 ranks has 43, 22, 15 or 11 images: two steps an epoch in most rows, the last one over fewer images. Rows that
# accumulate 4 batches end an epoch with fewer.
MATRIX = (
    Row("1-rank", 1, 32),
    Row("1-rank+workers+bf16+clip-value", 2, 32),
    Row("1-rank+accumulate+clip-norm+sanity", 3, 32),
    Row("2-ranks", 4, 32),
    Row("2-ranks+workers+warmup-cosine", 5, 32),
    Row("2-ranks+bf16+accumulate", 6, 32),
    Row("2-ranks+accumulate+clip-norm+warmup-cosine", 7, 32),
    Row("2-ranks+clip-value+sanity+limit", 8, 16),
    Row("2-ranks+workers+bf16+clip-norm+limit", 9, 16),
    Row("2-ranks+accumulate+clip-value+adamw", 10, 32),
    Row("2-ranks+step-rate+val-every-2+nesterov", 11, 32),
    Row("2-ranks+warmup-cosine+drop-last+in-order", 12, 16),
    Row("3-ranks", 13, 24),
    Row("3-ranks+bf16+warmup-cosine+sanity", 14, 24),
    Row("3-ranks+workers+accumulate+clip-norm", 15, 36),
    Row("3-ranks+clip-value+limit-share", 16, 15),
    Row("4-ranks", 17, 32),
    Row("4-ranks+bf16+accumulate+limit-share", 18, 32),
    Row("4-ranks+workers+clip-norm+sanity", 4294967295, 32),
    Row("2-ranks+resnet50", 0, 32),
    Row("1-rank+mixup+ema+accumulate", 20, 32),
    Row("2-ranks+decay-groups+linear-rate+ema+channels-last", 21, 32),
    Row("2-ranks+mixup+cutmix+trivial-augment+erasing+rate-per-epoch", 22, 32),
    Row("2-ranks+ddp-options+bf16+channels-last", 23, 32),
    Row("2-ranks+compiled", 24, 32),
    Row("3-ranks+growing+ema+workers+adamw+decay-groups", 25, 24),
)

ALL = "all"
_NAME, _GAP = 41, 1
EQUIVALENT, DIFFERS, CANNOT_TELL = "equivalent", "DIFFERS", "CANNOT TELL"
_COLUMNS = (  # 80 of a terminal's
    Column("settings", width=_NAME),
    Column("ranks", right=True, width=5),
    Column("steps", right=True, width=5),
    Column("compared", right=True, width=8),
    Column("result", width=11),
    Column("s", right=True, width=5),
)


@dataclass(frozen=True)
class Result:
    """What the comparison said of a row.

    Attributes:
        steps: Steps of both stages: from the start, and from the other's checkpoint.
        compared: Tensors, numbers and samples.
        result: equivalent, DIFFERS or CANNOT TELL.
        where: The first difference, of which the row's report.html says more, or why nothing can be said; else empty.
        seconds: Wall time of all its trainings and of their comparison.
    """

    name: str
    seed: int
    ranks: int
    steps: int
    compared: int
    result: str
    where: tuple[str, ...]
    seconds: float


def choose(name: str) -> tuple[Row, ...]:
    """One row by name, or all."""
    if name == ALL:
        return MATRIX
    found = tuple(row for row in MATRIX if row.name == name)
    if not found:
        raise UserError(f"--matrix {name}: there is no such row. The rows are:\n" + "\n".join(row.name for row in MATRIX))
    return found


def run_matrix(
    chosen: Sequence[Row],
    out_dir: Path,
    flags: Sequence[str] = (),
    *,
    timeout: float,
    keep: bool = False,
    raw: Sequence[str] = RAW,
) -> int:
    """Run rows, print a line of each as it comes, and write matrix.json and matrix.md.

    Args:
        chosen: Rows of the matrix.
        out_dir: Folder for the tables, and for a folder of each row.
        flags: More flags for all trainings; they follow those of the row.
        timeout: Seconds that each training may take.
        keep: Leave checkpoints and tensors of equivalent rows where they are.
        raw: How the raw trainer is started.

    Returns:
        0 if each row is equivalent, 1 if one differs, 2 if none differs and one could not be told.
    """
    root = small_digits(out_dir / "images")
    results: list[Result] = []
    print(head_line(_COLUMNS, gap=_GAP), flush=True)
    for row in chosen:
        arguments = (*row.flags, "--data.root", str(root), "--trainer.enable_progress_bar", "false", *flags)
        request = Request(out_dir / row.name, arguments, timeout, tuple(raw), keep=keep, quiet=True)
        results.append(run_row(row, request))
        print("\n".join(lines(results[-1])), flush=True)
        write_tables(results, out_dir)
    print(f"{summary(results)}\nmatrix.md and matrix.json in {out_dir}", flush=True)
    return exit_code(results)


def run_row(row: Row, request: Request) -> Result:
    began = time.monotonic()
    try:
        outcome = compare_trainers(request)
    except CannotTell as error:
        where = tuple(str(error).splitlines())
        return Result(row.name, row.seed, 0, 0, 0, CANNOT_TELL, where, time.monotonic() - began)
    write_report(outcome, request.out)
    return judge(row, outcome, seconds=time.monotonic() - began)


def judge(row: Row, outcome: Outcome, *, seconds: float) -> Result:
    """A row whose checkpoints were not exchanged has not shown what each row is to show."""
    stages = outcome.stages
    steps, compared = sum(stage.a.steps for stage in stages), sum(each.compared for stage in stages for each in rows(stage))
    result, where = EQUIVALENT, tuple(outcome.left_out)
    if where:
        result = CANNOT_TELL
    if outcome.differing is not None:
        result, where = DIFFERS, (f"{outcome.differing.title}: {explain(outcome.differing)[0]}",)
    return Result(row.name, row.seed, stages[0].a.world_size, steps, compared, result, where, seconds)


def exit_code(results: Sequence[Result]) -> int:
    found = {each.result for each in results}
    if DIFFERS in found:
        return 1
    return 0 if found == {EQUIVALENT} else 2


# The tables


def lines(result: Result) -> Iterator[str]:
    """For a terminal of 80 columns."""
    ranks, steps, compared = (f"{number:,}" if number else "" for number in (result.ranks, result.steps, result.compared))
    name = result.name
    if len(name) > _NAME:
        yield name
        name = ""
    yield row_line(_COLUMNS, (name, ranks, steps, compared, result.result, f"{result.seconds:.0f}"), gap=_GAP)
    for line in result.where:
        yield from (f"  {part}" for part in paragraph(line, width=76))


def summary(results: Sequence[Result]) -> str:
    equal = sum(each.result == EQUIVALENT for each in results)
    minutes, seconds = divmod(round(sum(each.seconds for each in results)), 60)
    return f"{equal} of {len(results)} equivalent, bit for bit, in {minutes} min {seconds} s on {available_cores()} cores"


def as_markdown(results: Sequence[Result]) -> str:
    head = ["settings", "seed", "ranks", "steps", "compared", "result", "s"]
    table = [head, ["---", *["---:"] * 4, "---", "---:"]]
    for each in results:
        numbers = [f"{number:,}" for number in (each.ranks, each.steps, each.compared)]
        table.append([each.name.replace("+", ", "), str(each.seed), *numbers, each.result, f"{each.seconds:.0f}"])
    rows_ = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"{rows_}\n\n{summary(results)}, with torch {torch.__version__.split('+')[0]}.\n"


def write_tables(results: Sequence[Result], out_dir: Path) -> None:
    """After each row, so that an interrupted matrix leaves what it has shown."""
    write_text(out_dir / "matrix.json", json.dumps([asdict(each) for each in results], indent=2) + "\n")
    write_text(out_dir / "matrix.md", as_markdown(results))
