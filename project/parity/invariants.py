"""Checks within one run: what a distributed training promises, whatever another run may have done."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from project.parity.differences import nested_difference, tensors_difference
from project.parity.recorded_run import PHASES, Event, Finding, Run
from project.record.format import read_sketch


def _side_by_side(run: Run, kind: str) -> Iterator[tuple[float, list[Event]]]:
    """The events of all ranks that belong together, with their time."""
    ranks = sorted(run.ranks)
    for timed in zip(*(run.timed(rank, kind) for rank in ranks), strict=True):
        yield timed[0][0], [event for _, event in timed]


# Samples


def _batches_per_epoch(settings: dict[str, Any], *, world_size: int) -> tuple[int, int, int]:
    """What a sampler must give each rank in a whole epoch: samples, images in a batch, batches."""
    data = settings["data"]
    share = math.ceil(settings["samples"] / world_size)  # DistributedSampler repeats some, so that all have as many
    size = data["global_batch_size"] // (world_size * settings["accumulate"])
    batches = share // size if data["drop_last"] else math.ceil(share / size)
    return share, size, _limited(batches, settings["limit_train_batches"])


def _limited(batches: int, limit: int | float) -> int:
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def _real(index: list[int]) -> list[int]:
    return [max(i, ~i) for i in index]  # ~i stands for sample i, whose image was replaced


def check_windows(run: Run, side: str) -> Finding:
    """Each step is of the epoch that its number says, and covers as many batches, of as many images, as the settings say."""
    share, size, batches = _batches_per_epoch(run.settings, world_size=run.world_size)
    window = run.settings["accumulate"]
    per_epoch = math.ceil(batches / window)
    check, compared = "batches per step", 0
    for rank in sorted(run.ranks):
        for time, event in run.timed(rank, "step"):
            step = event["step"]
            epoch, number = divmod(step, per_epoch)
            first = number * window
            due = [min(size, share - size * k) for k in range(first, min(first + window, batches))]
            found = [len(batch["index"]) for batch in event["batches"]]
            compared += len(found)
            how = None
            if event["epoch"] != epoch:
                how = f"step {step} is in epoch {event['epoch']}; with {per_epoch} steps per epoch it belongs to epoch {epoch}"
            elif found != due:
                how = f"batches of {found} images, where the settings make {due}"
            if how is not None:
                return Finding(check, False, "data", compared, how, step, rank, side, time)
    said = f"{per_epoch} steps of {window} x {size} images per rank and epoch" if window > 1 else f"{per_epoch} steps per epoch"
    return Finding(check, compared > 0, "data", compared, said, side=side)


def check_samples(run: Run, side: str) -> list[Finding]:
    """What a DistributedSampler promises: disjoint ranks up to its padding, all samples, another order in each epoch."""
    share, size, batches = _batches_per_epoch(run.settings, world_size=run.world_size)
    samples, length = run.settings["samples"], min(share, size * batches)
    padding = share * run.world_size - samples
    due = samples if length == share else length * run.world_size - padding
    given: dict[int, list[list[int]]] = {}  # epoch -> of each rank, in order
    began: dict[int, int] = {}
    findings: dict[str, Finding] = {}
    compared, whole = 0, 0

    def fail(check: str, step: int, how: str) -> None:
        findings.setdefault(check, Finding(check, False, "data", compared, how, step, side=side, time=float(step)))

    for _, events in _side_by_side(run, "step"):
        step, epoch = events[0]["step"], events[0]["epoch"]
        began.setdefault(epoch, step)
        ranks = given.setdefault(epoch, [[] for _ in events])
        for seen, event in zip(ranks, events, strict=True):
            seen += [i for batch in event["batches"] for i in _real(batch["index"])]
            compared += sum(len(batch["index"]) for batch in event["batches"])
        distinct = {i for seen in ranks for i in seen}
        repeated = sum(map(len, ranks)) - len(distinct)
        if repeated > padding:
            fail("samples disjoint", step, f"{repeated} samples were given more than once; padding explains {padding}")
        if max(distinct) >= samples:
            fail("samples covered", step, f"sample {max(distinct)} was given; the set has {samples}")
        if len(ranks[0]) == length:  # not begun, and not ended, inside this epoch
            whole += 1
            if len(distinct) < due:
                fail("samples covered", step, f"epoch {epoch} gave {len(distinct)} different samples; {due} were due")
    one = f"each sample on one of {run.world_size} ranks" if run.world_size > 1 else "each sample once"
    one += f", but for {padding} of padding" if padding else ""
    all_of = f"all {samples:,}" if due == samples else f"{due:,} of {samples:,}"
    said = f"{all_of} in each of {whole} epochs" if whole > 1 else f"{all_of} in {whole} whole epoch"
    found = [
        findings.get("samples disjoint") or Finding("samples disjoint", compared > 0, "data", compared, one, side=side),
        findings.get("samples covered") or Finding("samples covered", compared > 0, "data", compared, said, side=side),
    ]
    if len(given) > 1 and run.settings["data"]["shuffle"]:
        found.append(_order(given, began, side))
    return found


def _order(given: dict[int, list[list[int]]], began: dict[int, int], side: str) -> Finding:
    check, epochs = "order changes", list(given)
    for before, epoch in zip(epochs, epochs[1:], strict=False):
        first, second = given[before][0], given[epoch][0]
        length = min(len(first), len(second))
        if first[:length] == second[:length] or first[-length:] == second[-length:]:
            how = f"epochs {before} and {epoch} have the same order"
            return Finding(check, False, "data", len(epochs), how, began[epoch], 0, side, float(began[epoch]))
    return Finding(check, True, "data", len(epochs), f"another order in each of {len(epochs)} epochs", side=side)


# Numbers

FINITE = "finite"  # the name of the check


def check_finite(run: Run, side: str) -> Finding:
    """No NaN and no infinity in a loss, gradient, weight or buffer: equal bits would say nothing."""
    compared = 0
    for time, events in _side_by_side(run, "step"):
        bad: list[tuple[str, int, str]] = []  # phase, rank, words
        for rank, event in enumerate(events):
            compared += len(event["batches"]) + sum(len(event[part]) for part in _FINITE)
            losses = [batch["loss"] for batch in event["batches"] if not math.isfinite(batch["loss"])]
            bad += [("forward", rank, f"the loss is {loss}") for loss in losses[:1]]
            for part, phase in _FINITE.items():
                names = [name for name, tensor in event[part].items() if not np.isfinite(read_sketch(tensor)).all()]
                bad += [(phase, rank, f"{name} is not finite in {part}") for name in names[:1]]
        if bad:
            phase, rank, how = min(bad, key=lambda each: (PHASES.index(each[0]), each[1]))  # the cause, on whichever rank
            return Finding(FINITE, False, phase, compared, how, events[rank]["step"], rank, side, time)
    for time, events in _side_by_side(run, "validation"):
        for rank, event in enumerate(events):
            worst = next((name for name, value in event["metrics"].items() if not math.isfinite(value)), None)
            compared += len(event["metrics"])
            if worst is not None:
                how = f"{worst} is {event['metrics'][worst]}"
                return Finding(FINITE, False, "metric", compared, how, int(time), rank, side, time)
    return Finding(FINITE, compared > 0, "forward", compared, "no NaN, no infinity", side=side)


_FINITE = {"local": "local gradient", "reduced": "reduced gradient", "weights": "update", "buffers": "buffers"}


def check_modes(run: Run, side: str) -> Finding:
    """No forward of a validation, or between two steps, in training mode: it would change BatchNorm's statistics."""
    check, compared = "evaluation mode", 0
    for time, events in _side_by_side(run, "validation"):
        for rank, event in enumerate(events):
            compared += len(event["batches"])
            number = next((k for k, batch in enumerate(event["batches"]) if batch.get("training")), None)
            if number is not None:
                how = f"the forward of batch {number} was in training mode"
                return Finding(check, False, "metric", compared, how, int(time), rank, side, time)
    return Finding(check, compared > 0, "metric", compared, "every validation", side=side)


# Ranks


def _ranks_equal(run: Run, side: str, key: str, what: str, phase: str) -> Finding:
    check, compared = f"ranks agree: {what}", 0
    differ: Callable[[Any, Any], str | None] = tensors_difference if isinstance(run.events(0, "step")[0][key], dict) else _lists
    for time, events in _side_by_side(run, "step"):
        for rank, event in enumerate(events[1:], start=1):
            compared += len(event[key])
            how = differ(events[0][key], event[key])
            if how is not None:
                return Finding(check, False, phase, compared, f"{how} on ranks 0 and {rank}", event["step"], rank, side, time)
    return Finding(check, compared > 0, phase, compared, "equal on all ranks after each step", side=side)


def _lists(a: list[Any], b: list[Any]) -> str | None:
    return None if a == b else f"is {a} and {b}"


def check_ranks_equal(run: Run, side: str) -> list[Finding]:
    """What DDP is for: the same gradients, weights, optimizer state and rate everywhere. Buffers may differ by its design."""
    parts = [
        ("reduced", "gradients", "reduced gradient"),
        ("lr", "learning rate", "schedule"),
        ("weights", "weights", "update"),
    ]
    if run.events(0, "step")[0]["optimizer"]:
        parts.append(("optimizer", "optimizer", "update"))
    return [_ranks_equal(run, side, *part) for part in parts]


# Validation


def check_validation(run: Run, side: str) -> Finding:
    """Every validation counts each image of the set once, at any number of ranks, and all ranks say the same."""
    settings, world_size = run.settings, run.world_size
    size = max(1, settings["data"]["global_batch_size"] // (world_size * settings["accumulate"]))
    batches = _limited(math.ceil(math.ceil(settings["val_samples"] / world_size) / size), settings["limit_val_batches"])
    due = min(settings["val_samples"], batches * size * world_size)
    check, compared = "images validated", 0
    for time, events in _side_by_side(run, "validation"):
        for rank, event in enumerate(events):
            compared += 1
            where: dict[str, Any] = {"step": int(time), "rank": rank, "side": side, "time": time}
            how = nested_difference(events[0]["metrics"], event["metrics"])
            if how is not None:
                return Finding(check, False, "metric", compared, f"{how} on ranks 0 and {rank}", **where)
            counted = event["metrics"].get("val/images")
            if counted != due:
                said = "no count of images" if counted is None else f"{counted:,.0f} images were counted"
                return Finding(check, False, "metric", compared, f"{said}; {due:,} are in the set", **where)
            if len(event["batches"]) != batches:
                how = f"{len(event['batches'])} batches were evaluated; {batches} were due"
                return Finding(check, False, "metric", compared, how, **where)
    return Finding(check, compared > 0, "metric", compared, f"{due:,} images, each counted once", side=side)
