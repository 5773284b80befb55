"""A comparison in words: what was shown and what was not, the checks, the first difference and its usual causes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from project.parity.comparison import Outcome, Stage
from project.parity.invariants import FINITE
from project.parity.noise import FACTOR, LIMIT, Noise
from project.parity.recorded_run import Finding
from project.parity.reduction import EXACTLY
from project.parity.sizes import Size
from project.report.table import Column, paragraph, row_line, table_lines

CAUSES = {
    "environment": (
        "other versions of torch or of what it calls, another number of threads, another processor",
        "a flag that only one of the two was given",
    ),
    "data": (
        "no set_epoch, or another sampler seed: the same samples in another order",
        "shuffle in one only; a sampler that every rank builds for itself, so that ranks overlap",
        "drop_last, padding or a limit that is not the same",
        "augmentation keyed by the position in the batch, the worker or the rank instead of the sample",
    ),
    "forward": (
        "weights or buffers that differ before this step: another seed, one rank changed after the DDP wrap",
        "train and eval mode confused, another precision, another loss or label smoothing",
        "buffers that one run synchronises and the other does not",
    ),
    "local gradient": (
        "the loss scaled: by the number of ranks, or by the accumulated batches in a short last window",
        "zero_grad at another place of the accumulation window",
    ),
    "reduced gradient": (
        "the module called in place of its DDP wrapper, or no_sync around the last backward: nothing is reduced",
        "gradients summed instead of averaged, or reduced a second time by hand",
        "another order of addition: another backend, algorithm or number of ranks",
    ),
    "schedule": (
        "the schedule stepped per epoch instead of per step, or once too often",
        "another number of total steps, another peak rate",
    ),
    "update": (
        "clipping at another place (before the reduction), of another norm, or over parameters in another order",
        "other settings of the optimizer: momentum, weight decay, and to which parameters it applies",
        "a step that one of them skipped",
    ),
    "buffers": (
        "BatchNorm's statistics made equal in one run only, or at another time",
        "another forward in between: a sanity check, a validation in train mode",
    ),
    "metric": (
        "a forgotten eval(): the validation in training mode",
        "padded samples counted, or an average of batches of unequal size",
        "sums over ranks in float32, whose last bit depends on the order",
        "validation through the bare module, with each rank's own buffers",
    ),
    "checkpoint": (
        "written by another rank, or before the buffers were made equal",
        "written before the schedule or the counters were stepped",
        "averaged weights stored in the place of the live ones",
    ),
}

NOT_FINITE = (
    "the rate: too high, or without a warm-up (--model.lr, --model.warmup_epochs), or gradients that need clipping",
    "the precision: an overflow of 16 bits (--trainer.precision)",
    "the data: an image or a target that is no number, or a loss with a logarithm or a division by 0",
)

SHARED = "That the code which both share is right: model, transforms, recipe, means in the log, copying of buffers, record."


@dataclass(frozen=True)
class Row:
    """A line of the table of checks; the same check within either run is one line.

    Attributes:
        result: equal, in noise, holds, DIFFERS, BROKEN, or noted.
    """

    check: str
    result: str
    compared: int
    detail: str
    failed: bool


def rows(stage: Stage) -> list[Row]:
    found: list[Row] = []
    between = [finding for finding in stage.findings if not finding.side]
    for finding in between:
        word = "noted" if finding.noted else "DIFFERS" if not finding.passed else "in noise" if finding.within_noise else "equal"
        found.append(Row(finding.check, word, finding.compared, _where(stage, finding), finding.failed))
    for check in dict.fromkeys(finding.check for finding in stage.findings if finding.side):
        both = [finding for finding in stage.findings if finding.side and finding.check == check]
        compared = sum(finding.compared for finding in both)
        bad = [finding for finding in both if finding.failed]
        if bad:
            found += [Row(check, "BROKEN", each.compared, _where(stage, each), True) for each in bad]
        else:
            details = list(dict.fromkeys(finding.detail for finding in both))
            found.append(Row(check, "holds", compared, "; ".join(details), False))
    return found


def merged_rows(outcome: Outcome) -> list[tuple[str, str, list[Row | None]]]:
    """One line for each check: its name, what it says where it failed or else at first, and its row in each stage."""
    tables = [{(row.check, number): row for number, row in _numbered(rows(stage))} for stage in outcome.stages]
    merged = []
    for key in dict.fromkeys(key for table in tables for key in table):
        cells = [table.get(key) for table in tables]
        found = [row for row in cells if row is not None]
        told = next((row for row in found if row.failed), found[0])
        merged.append((key[0], told.detail, cells))
    return merged


def _numbered(table: list[Row]) -> Iterator[tuple[int, Row]]:
    """A check that both runs break has two rows."""
    seen: list[str] = []
    for row in table:
        yield seen.count(row.check), row
        seen.append(row.check)


def _where(stage: Stage, finding: Finding) -> str:
    if finding.passed:
        return finding.detail
    who = {"a": f"{stage.a.name}: ", "b": f"{stage.b.name}: ", "": ""}[finding.side]
    rank = "" if finding.rank is None else f", rank {finding.rank}"
    at = "" if finding.step is None else f"step {finding.step}{rank}: "
    return f"{at}{who}{finding.detail}"


def headline(outcome: Outcome) -> str:
    stage = outcome.differing
    if stage is None:
        noisy = noise_of(outcome)
        if noisy is None:
            return "Equivalent, bit for bit"
        return f"Equal within noise, in {noisy.steps} of {outcome.stages[0].a.steps} steps"
    first = stage.first
    assert first is not None
    at = "" if first.step is None else f" from step {first.step}" if math.isfinite(first.time) else ""
    if in_both(stage) and first.check == FINITE:
        return f"NaN or infinity in both{at}: {first.phase}"
    return f"Not equivalent{at}: {first.phase}"


def noise_of(outcome: Outcome) -> Noise | None:
    """The floor, where something was within it and not equal."""
    noisy = any(finding.within_noise for stage in outcome.stages for finding in stage.findings)
    return outcome.stages[0].noise if noisy else None


def shown(outcome: Outcome) -> str:
    """One paragraph: what was run and found equal."""
    stage = outcome.stages[0]
    settings, run = stage.a.settings, stage.a
    parts = [f"{run.steps} steps"]
    parts += [f"and {later.a.steps} more, each from the other's checkpoint" for later in outcome.stages[1:]]
    where = f"on {run.world_size} ranks over {settings['backend']}" if run.world_size > 1 else "on one rank"
    device = run.start["environment"]["device"] if settings["backend"] == "nccl" else "CPU"
    what = f"{settings['model']['arch']}, {' '.join(parts)}, {where} ({device}), {settings['precision']}."
    if not outcome.equivalent:
        return what
    noise = noise_of(outcome)
    if noise is not None:
        return (
            f"{what} The raw trainer does not repeat its own bits, so this is no equality: run twice, it differs from itself by "
            f"up to {noise.largest:.2g} of a tensor's norm in the {noise.steps} steps that are judged, which end where that "
            f"reaches {LIMIT:g}. There the two trainers differ by at most {FACTOR:g} times as much. Samples, order and rates are "
            "equal."
        )
    return (
        f"{what} Samples, images, losses, local and reduced gradients, rates, weights, optimizer state and buffers are equal "
        f"to the bit at every step on every rank{_and_files(stage)}. "
        f"Each reduced gradient is the mean of the ranks' own{_exactly(stage)}."
    )


def _exactly(stage: Stage) -> str:
    exact = next((finding.detail for finding in stage.findings if finding.check == EXACTLY), None)
    return f": {exact}" if exact else ""


def _and_files(stage: Stage) -> str:
    has = [name for name in ("validation", "checkpoint") if stage.a.events(0, name)]
    return f", and so are {' and '.join(name + 's' for name in has)}" if has else ""


def not_shown(outcome: Outcome) -> list[str]:
    run = outcome.stages[0].a
    limits = [SHARED]
    if run.world_size == 1:
        limits.append("Anything distributed: this was one rank. Give --devices 2 or more.")
    if run.settings["backend"] != "nccl":
        limits.append("Anything on GPUs and NCCL, which was not run.")
    if run.settings["limit_train_batches"] != 1.0:
        limits.append(f"Whole epochs: --trainer.limit_train_batches was {run.settings['limit_train_batches']}.")
    if noise_of(outcome) is not None:
        limits.append(
            "Equality: what is smaller than the noise of this device is not seen. Optimizer state and checkpoints are not judged."
        )
    for kind in ("validation", "checkpoint"):
        if not run.events(0, kind):
            limits.append(f"The {kind}: there was none.")
    limits += [f"{each[0].upper()}{each[1:]}." for each in outcome.left_out]
    limits.append("Other settings, sizes and lengths than these.")
    return limits


def in_both(stage: Stage) -> bool:
    """Whether the two are equal up to where both break the same promise, which is no difference between them."""
    first = stage.first
    alike = [each for each in stage.findings if first is not None and each.check == first.check and each.failed]
    return len(alike) == 2 and all(replace(each, side="") == replace(alike[0], side="") for each in alike)


def causes(stage: Stage) -> tuple[str, ...]:
    """What usually leads to this first difference."""
    first = stage.first
    assert first is not None
    return NOT_FINITE if first.check == FINITE else CAUSES[first.phase]


def explain(stage: Stage) -> list[str]:
    """The first difference in words."""
    first = stage.first
    assert first is not None
    where = "before the first step" if not math.isfinite(first.time) else f"at step {first.step}"
    if math.isfinite(first.time) and first.time != first.step:
        where = f"after step {first.step}"
    rank = "" if first.rank is None else f", rank {first.rank}"
    both = in_both(stage)
    who = (
        "In both, which are equal up to there"
        if both
        else {"a": f"In the {stage.a.name}", "b": f"In the {stage.b.name}", "": "Between the two"}[first.side]
    )
    words = f"{first.check}: {first.detail}" if first.side else f"{first.check} {first.detail}"
    lines = [f"{who}, {where}{rank}, phase {first.phase}: {words}."]
    for each in stage.findings:
        repeated = both and each.check == first.check
        if each.failed and each is not first and not repeated and (each.time, each.phase) == (first.time, first.phase):
            lines.append(f"There, too: {each.check}: {each.detail}.")
    lines += [size_line(size) for size in stage.sizes]
    lines += [stage.remark] if stage.remark else []
    later = sum(finding.failed for finding in stage.findings) - 1 - both
    if later:
        lines.append(f"{later} other check{'s' * (later > 1)} fail{'s' * (later == 1)} as well; what follows is no news.")
    return lines


def size_line(size: Size) -> str:
    count, of = size.elements
    return (
        f"{size.part} {size.name} on rank {size.rank}: {count:,} of {of:,} elements differ, by at most {size.largest:.3g} "
        f"({size.relative:.2g} of the largest); first at {list(size.first)}: {size.values[0]!r} and {size.values[1]!r}"
    )


def _columns(title: str) -> tuple[Column, ...]:
    return Column(title, width=34), Column("result", width=8), Column("compared", right=True, width=8)


def lines(outcome: Outcome, report: str) -> Iterator[str]:
    """For a terminal of 80 columns."""
    for stage in outcome.stages:
        table = rows(stage)
        if stage is not outcome.stages[0] and stage.first is None:  # a table like the one above
            yield row_line(_columns(stage.title), (f"  {stage.title}", "equal", f"{sum(row.compared for row in table):,}"))
            continue
        yield ""
        yield from table_lines(_columns(stage.title), [(f"  {row.check}", row.result, f"{row.compared:,}") for row in table])
    yield ""
    yield headline(outcome).upper() if not outcome.equivalent else headline(outcome)
    yield from paragraph(shown(outcome))
    stage_ = outcome.differing
    if stage_ is not None:
        assert stage_.first is not None
        for line in explain(stage_):
            yield from paragraph(line)
        yield "Usual causes:"
        for cause in causes(stage_):
            yield from paragraph(f"- {cause}", more="  ")
    yield "Not shown:"
    for line in not_shown(outcome):
        yield from paragraph(f"- {line}", more="  ")
    yield f"report in {report}"
