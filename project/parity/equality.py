"""Checks of two runs against one another, event by event: the same at the same step on the same rank, to the bit."""

import math
from typing import Any

from project.parity.compared_parts import Pair
from project.parity.differences import nested_difference
from project.parity.noise import UNSIZED, Noise
from project.parity.recorded_run import Finding, Run

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
