"""Checks of two runs against one another, event by event: the same at the same step on the same rank, to the bit."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from project.parity.differences import (
    indices_difference,
    keys_difference,
    list_difference,
    nested_difference,
    tensors_difference,
    value_difference,
)
from project.parity.noise import UNSIZED, Noise
from project.parity.run import Event, Finding, Run

Part = Callable[[Event], Any]

# Keys of a checkpoint file that one trainer may write and the other may not, and why. What the record in it leaves out is in
# core.record.OF_THE_RUN.
_DERIVED = "Lightning's own copy of what the shared record holds, which is compared"
OWN_KEYS = {
    "epoch": _DERIVED,
    "global_step": _DERIVED,
    "optimizer_states": _DERIVED,
    "lr_schedulers": _DERIVED,
    "MixedPrecision": _DERIVED,
    "ImageFolders": "the place in the epoch, which the shared record holds",
    "callbacks": "Lightning's callbacks: history and best checkpoint are in the shared record",
    "loops": "counters of Lightning's loops, made anew from the shared record when one of raw's files is loaded",
    "pytorch-lightning_version": "a version",
    "hparams_name": "Lightning's name for the settings",
    "hyper_parameters": "Lightning's copy of the settings",
    "datamodule_hparams_name": "Lightning's name for the settings",
    "datamodule_hyper_parameters": "Lightning's copy of the settings",
}


@dataclass(frozen=True)
class Pair:
    """A check of two runs.

    Attributes:
        may_be_empty: Plain SGD has no state, and a network may have no buffers.
    """

    name: str
    phase: str
    kind: str
    part: Part
    differ: Callable[[Any, Any], str | None]
    may_be_empty: bool = False


def _of(key: str) -> Part:
    return lambda event: event[key]


def _batches(key: str) -> Part:
    return lambda event: [batch[key] for batch in event["batches"]]


def _rates(event: Event) -> list[float]:
    """Each rate once: more groups of parameters are another recipe, not another schedule, and show in the update."""
    return list(dict.fromkeys(event["lr"]))


def _file_keys(a: list[str], b: list[str]) -> str | None:
    """All but those that are one trainer's own, by name."""
    return keys_difference(*({key: 0 for key in keys if key not in OWN_KEYS} for keys in (a, b)))


PAIRS = (
    Pair("steps and epochs", "data", "step", lambda event: {key: event[key] for key in ("step", "epoch")}, nested_difference),
    Pair("sample indices", "data", "step", _batches("index"), indices_difference),
    Pair("images", "data", "step", _batches("images"), list_difference),
    Pair("targets", "data", "step", _batches("target"), list_difference),
    Pair("logits", "forward", "step", _batches("logits"), list_difference),
    Pair("loss", "forward", "step", _batches("loss"), list_difference),
    Pair("local gradients", "local gradient", "step", _of("local"), tensors_difference),
    Pair("reduced gradients", "reduced gradient", "step", _of("reduced"), tensors_difference),
    Pair("learning rate", "schedule", "step", _rates, value_difference),
    Pair("weights", "update", "step", _of("weights"), tensors_difference),
    Pair("optimizer state", "update", "step", _of("optimizer"), tensors_difference, may_be_empty=True),
    Pair("buffers", "buffers", "step", _of("buffers"), tensors_difference, may_be_empty=True),
    Pair("validation images", "metric", "validation", _batches("images"), list_difference),
    Pair("validation logits", "metric", "validation", _batches("logits"), list_difference),
    Pair("validation metrics", "metric", "validation", _of("metrics"), nested_difference),
    Pair("checkpoint names", "checkpoint", "checkpoint", _of("name"), value_difference),
    Pair("checkpoint keys", "checkpoint", "checkpoint", _of("keys"), _file_keys),
    Pair("checkpoint tensors", "checkpoint", "checkpoint", _of("state_dict"), tensors_difference),
    Pair("checkpoint record", "checkpoint", "checkpoint", _of("record"), nested_difference),
)

_PLURAL = {"step": "steps", "validation": "validations", "checkpoint": "checkpoints"}


def _count(part: Any) -> int:
    """Leaves: tensors, numbers, samples."""
    if isinstance(part, list):
        return sum(len(each) if isinstance(each, list) else 1 for each in part)
    return len(part) if isinstance(part, dict) and "hash" not in part else 1


def compare_pair(pair: Pair, a: Run, b: Run, noise: Noise | None = None) -> Finding:
    """One check over all ranks and events; the first difference in time counts.

    With a floor of noise a difference within it is none, and what comes later than the floor reaches is left out.
    """
    if noise is not None and noise.exists and pair.name in UNSIZED:
        return Finding(pair.name, False, pair.phase, 0, "not judged: recorded as a hash, which noise changes", noted=True)
    compared, happened, explained, late = 0, 0, 0, False
    first: Finding | None = None
    for rank in sorted(a.ranks):
        ours, theirs = list(a.timed(rank, pair.kind)), list(b.timed(rank, pair.kind))
        for (time, one), (_, other) in zip(ours, theirs, strict=False):
            if noise is not None and time >= noise.until:
                late = True
                break
            part = pair.part(one)
            happened += 1
            compared += _count(part)
            how = pair.differ(part, pair.part(other))
            if how is not None and noise is not None and noise.explains(pair.name, time, part, pair.part(other)):
                how, explained = None, explained + 1
            if how is None and not part and not pair.may_be_empty:
                how = "is empty in both"
            if how is not None:
                first = _earlier(first, Finding(pair.name, False, pair.phase, compared, how, _step(time), rank, time=time))
                break
        else:
            if len(ours) != len(theirs):
                time, _ = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
                how = f"{len(ours)} {_PLURAL[pair.kind]} in {a.name}, {len(theirs)} in {b.name}"
                first = _earlier(first, Finding(pair.name, False, pair.phase, compared, how, _step(time), rank, time=time))
    if first is not None:
        return first
    if late and not happened:
        return Finding(pair.name, False, pair.phase, 0, "not judged: all of it comes when noise has grown too large", noted=True)
    passed = happened > 0 if pair.may_be_empty else compared > 0
    said = _said(pair, a, happened) if compared else "neither run has any"
    said += f"; in {explained} of {happened} within noise" if explained else ""
    return Finding(pair.name, passed, pair.phase, compared, said, within_noise=explained > 0)


def _said(pair: Pair, run: Run, happened: int) -> str:
    if pair.kind == "checkpoint":
        return f"{happened} file{'s' * (happened > 1)}, as read back"
    return f"every {pair.kind}" + (", every rank" if run.world_size > 1 else "")


def _step(time: float) -> int | None:
    """The step in or after which it happened."""
    return int(time) if math.isfinite(time) else None


def _earlier(first: Finding | None, found: Finding) -> Finding:
    return found if first is None or found.time < first.time else first


def check_same(name: str, a: Run, b: Run, *, key: str, alike: bool) -> Finding:
    """Environment or settings of all ranks; where they need not be alike, a difference is noted."""
    how, count = None, 0
    for rank in sorted(a.ranks):
        one, other = (run.ranks[rank][0][key] for run in (a, b))
        count += sum(_count(part) for part in one.values())
        how = how or nested_difference(one, other)
    said = "equal versions, threads, device" if key == "environment" else "both runs were asked for the same"
    return Finding(name, how is None, "environment", count, how or said, noted=how is not None and not alike)
