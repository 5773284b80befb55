"""Pure functions: two recorded runs -> findings. Equality, not tolerance; an empty or broken record is never equal."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from project.core.record import distance, read_sketch

Event = dict[str, Any]
Tensors = Mapping[str, Mapping[str, Any]]

# What happens in a step, in order of cause: the first of these that differs is where a difference began.
PHASES = (
    "environment",
    "data",
    "forward",
    "local gradient",
    "reduced gradient",
    "schedule",
    "update",
    "buffers",
    "metric",
    "checkpoint",
)


@dataclass(frozen=True)
class Finding:
    """What one check says.

    Attributes:
        check: Name of the check.
        passed: True only where something was compared and all of it held.
        phase: One of PHASES.
        compared: Number of things that were compared.
        step: Optimizer step of the first difference, from 0; None where it has none.
        rank: Rank of the first difference; None where it concerns all.
        detail: What was compared, or in words what differs: name, values, size.
        side: "a", "b" where one run breaks its own promise; "" where two runs differ.
        after: Position in the run, to order first differences.
    """

    check: str
    passed: bool
    phase: str
    compared: int
    detail: str
    step: int | None = None
    rank: int | None = None
    side: str = ""
    after: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Run:
    """One recorded run.

    Attributes:
        name: How to call it.
        ranks: The events of each rank, in order.
    """

    name: str
    ranks: dict[int, list[Event]]

    def events(self, rank: int, kind: str) -> list[Event]:
        return [event for event in self.ranks[rank] if event["event"] == kind]

    @property
    def start(self) -> Event:
        return self.ranks[min(self.ranks)][0]


def broken(run: Run) -> str | None:
    """Why a record cannot be judged; None if it is complete."""
    if not run.ranks:
        return f"{run.name}: there is no record"
    first = run.ranks[min(run.ranks)]
    if not first or first[0]["event"] != "start":
        return f"{run.name}: the record has no beginning"
    expected = set(range(first[0]["world_size"]))
    if set(run.ranks) != expected:
        return f"{run.name}: records of ranks {sorted(run.ranks)}, expected {sorted(expected)}"
    for rank, events in run.ranks.items():
        if not events or events[-1]["event"] != "end":
            return f"{run.name}: the record of rank {rank} breaks off; the run did not end"
        if not any(event["event"] == "step" for event in events):
            return f"{run.name}: rank {rank} took no step"
    return None


# Comparing values


def norm(tensor: Mapping[str, Any]) -> float:
    """Euclidean norm, estimated from the sketch."""
    return math.sqrt(float(np.mean(read_sketch(tensor) ** 2)))


def tensor_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """In words how two recorded tensors differ; None if their bytes, types and shapes are equal."""
    if a["hash"] == b["hash"]:
        return None
    if (a["type"], a["shape"]) != (b["type"], b["shape"]):
        return f"is {a['type']} {a['shape']} and {b['type']} {b['shape']}"
    size, scale = distance(a, b), norm(a)
    if math.isnan(size):
        return "is NaN in one of them"
    return f"differs by {size:.3g} ({size / scale:.2g} of its norm)" if scale else f"differs by {size:.3g} from zero"


def tensors_difference(a: Tensors, b: Tensors) -> str | None:
    """The first tensor that differs, and how many do."""
    if set(a) != set(b):
        only = sorted(set(a) ^ set(b))
        return f"{len(only)} tensors are in one run only, such as {only[0]}"
    found = [(name, how) for name in a if (how := tensor_difference(a[name], b[name])) is not None]
    if not found:
        return None
    return f"{found[0][0]} {found[0][1]}" + (f"; so do {len(found) - 1} of the other {len(a) - 1}" if len(found) > 1 else "")


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "hash" in value


def value_difference(a: Any, b: Any) -> str | None:
    if is_tensor(a) and is_tensor(b):
        return tensor_difference(a, b)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return "is NaN in both"
    return None if a == b and type(a) is type(b) else f"is {_short(a)} and {_short(b)}"


def _short(value: Any) -> str:
    text = "a tensor" if is_tensor(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def mapping_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    if set(a) != set(b):
        only = sorted(set(a) ^ set(b))
        return f"{len(only)} keys are in one run only, such as {only[0]}"
    for name in a:
        how = value_difference(a[name], b[name])
        if how is not None:
            return f"{name} {how}"
    return None


# Between two runs: (name, phase, kind of event, what of it, how to compare it, what it is called)

Part = Callable[[Event], Any]


def _batches(key: str) -> Part:
    return lambda event: [batch[key] for batch in event["batches"]]


def _list_difference(a: list[Any], b: list[Any]) -> str | None:
    if len(a) != len(b):
        return f"has {len(a)} batches and {len(b)}"
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        how = value_difference(one, other)
        if how is not None:
            return (f"batch {number} " if len(a) > 1 else "") + how
    return None


def _indices_difference(a: list[list[int]], b: list[list[int]]) -> str | None:
    if a == b:
        return None
    if sorted(i for batch in a for i in batch) == sorted(i for batch in b for i in batch):
        return f"the same samples in another order: {a[0][:4]}... and {b[0][:4]}..."
    return f"other samples: {a[0][:4]}... and {b[0][:4]}..."


@dataclass(frozen=True)
class Pair:
    """A check of two runs against one another, event by event."""

    name: str
    phase: str
    kind: str
    part: Part
    differ: Callable[[Any, Any], str | None]


PAIRS = (
    Pair("sample indices", "data", "step", _batches("index"), _indices_difference),
    Pair("epoch", "data", "step", lambda event: event["epoch"], value_difference),
    Pair("images", "data", "step", _batches("images"), _list_difference),
    Pair("targets", "data", "step", _batches("target"), _list_difference),
    Pair("logits", "forward", "step", _batches("logits"), _list_difference),
    Pair("loss", "forward", "step", _batches("loss"), _list_difference),
    Pair("local gradients", "local gradient", "step", lambda event: event["local"], tensors_difference),
    Pair("reduced gradients", "reduced gradient", "step", lambda event: event["reduced"], tensors_difference),
    Pair("learning rate", "schedule", "step", lambda event: event["lr"], value_difference),
    Pair("weights", "update", "step", lambda event: event["weights"], tensors_difference),
    Pair("optimizer state", "update", "step", lambda event: event["optimizer"], mapping_difference),
    Pair("buffers", "buffers", "step", lambda event: event["buffers"], tensors_difference),
    Pair("validation metrics", "metric", "validation", lambda event: event["metrics"], mapping_difference),
    Pair("validation images", "metric", "validation", _batches("images"), _list_difference),
    Pair("validation logits", "metric", "validation", _batches("logits"), _list_difference),
    Pair("checkpoint tensors", "checkpoint", "checkpoint", lambda event: event["state_dict"], tensors_difference),
    Pair("checkpoint record", "checkpoint", "checkpoint", lambda event: event["record"], mapping_difference),
)


def compare_pair(pair: Pair, a: Run, b: Run) -> Finding:
    """One check over all ranks and events; the first difference in time counts."""
    compared = 0
    first: Finding | None = None
    for rank in sorted(a.ranks):
        ours, theirs = a.events(rank, pair.kind), b.events(rank, pair.kind)
        places = [number for number, event in enumerate(a.ranks[rank]) if event["event"] == pair.kind]
        for position, one, other in zip(places, ours, theirs, strict=False):
            compared += 1
            how = pair.differ(pair.part(one), pair.part(other))
            if how is not None:
                if first is None or position < first.after:
                    first = Finding(pair.name, False, pair.phase, compared, how, one.get("step"), rank, after=position)
                break
        else:
            if len(ours) != len(theirs):
                how = f"{len(ours)} {pair.kind}s in {a.name}, {len(theirs)} in {b.name}"
                end = min(len(ours), len(theirs))
                position = len(a.ranks[rank]) if first is None else first.after
                first = first or Finding(
                    pair.name, False, pair.phase, compared, how, _step_of(ours, theirs, end), rank, after=position
                )
    if first is not None:
        return first
    what = {"step": "steps", "validation": "validations", "checkpoint": "checkpoints"}[pair.kind]
    return Finding(pair.name, compared > 0, pair.phase, compared, f"equal in {compared} {what} over {len(a.ranks)} ranks")


def _step_of(ours: list[Event], theirs: list[Event], number: int) -> int | None:
    longer = ours if len(ours) > len(theirs) else theirs
    return longer[number].get("step")


# Within one run


def check_reduction(run: Run, side: str) -> Finding:
    """The reduced gradient is the mean of the ranks' local ones, by their sketches: linear, so the mean of sketches.

    The bound is what rounding allows: with W ranks each sum is off by at most W * eps * sum |g| in every element, and a sketch
    adds up n elements; W * eps * (norms of the local gradients) * sqrt(n) covers them all (DESIGN of the exact check: tensors).
    """
    compared = 0
    steps = {rank: run.events(rank, "step") for rank in run.ranks}
    world_size = len(run.ranks)
    for number, event in enumerate(steps[0]):
        for name, reduced in event["reduced"].items():
            locals_ = [steps[rank][number]["local"].get(name) for rank in sorted(run.ranks)]
            if any(local is None for local in locals_):
                return Finding(
                    "reduction", False, "reduced gradient", compared, f"{name} has no local gradient", event["step"], side=side
                )
            sketches = np.stack([read_sketch(local) for local in locals_])  # type: ignore[arg-type]
            off = math.sqrt(float(np.mean((sketches.mean(axis=0) - read_sketch(reduced)) ** 2)))
            size = math.prod(reduced["shape"])
            bound = world_size * float(np.finfo(np.float32).eps) * sum(norm(local) for local in locals_) * math.sqrt(size)  # type: ignore[arg-type]
            compared += 1
            if not off <= bound:
                how = f"{name} is off the mean of the local gradients by {off:.3g}, rounding allows {bound:.3g}"
                return Finding("reduction", False, "reduced gradient", compared, how, event["step"], side=side)
    return Finding(
        "reduction", compared > 0, "reduced gradient", compared, "the mean of the local gradients, to rounding", side=side
    )


def check_ranks_equal(run: Run, side: str) -> list[Finding]:
    """After each step all ranks hold the same weights, optimizer state and reduced gradients."""
    findings = []
    for key, phase in (("reduced", "reduced gradient"), ("weights", "update"), ("optimizer", "update")):
        findings.append(_ranks_equal(run, side, key, phase))
    return findings


def _ranks_equal(run: Run, side: str, key: str, phase: str) -> Finding:
    check = f"ranks agree: {key}"
    compared = 0
    for events in zip(*(run.events(rank, "step") for rank in sorted(run.ranks)), strict=True):
        for rank, event in enumerate(events):
            compared += 1
            how = mapping_difference(events[0][key], event[key])
            if how is not None:
                return Finding(check, False, phase, compared, f"{how} on ranks 0 and {rank}", event["step"], rank, side)
    return Finding(check, compared > 0, phase, compared, "equal on all ranks after every step", side=side)


def _epochs(run: Run, rank: int) -> dict[int, list[int]]:
    """The samples of each epoch in order; ~i stands for sample i, replaced."""
    found: dict[int, list[int]] = {}
    for event in run.events(rank, "step"):
        for batch in event["batches"]:
            found.setdefault(event["epoch"], []).extend(max(i, ~i) for i in batch["index"])
    return found


def check_sampler(run: Run, side: str) -> list[Finding]:
    """What a DistributedSampler promises: ranks disjoint up to its padding, all covered, another order each epoch."""
    samples = run.start["settings"].get("samples")
    by_rank = {rank: _epochs(run, rank) for rank in sorted(run.ranks)}
    world_size = len(by_rank)
    findings = []
    overlap: Finding | None = None
    compared = 0
    for epoch in by_rank[0]:
        given = [i for rank in by_rank for i in by_rank[rank].get(epoch, [])]
        compared += len(given)
        repeated = len(given) - len(set(given))
        padding = (-samples) % world_size if samples else world_size - 1
        if repeated > padding and overlap is None:
            step = next(event["step"] for event in run.events(0, "step") if event["epoch"] == epoch)
            how = f"in epoch {epoch} {repeated} samples were given more than once; padding explains {padding}"
            overlap = Finding("samples disjoint", False, "data", compared, how, step, side=side)
    findings.append(
        overlap
        or Finding("samples disjoint", compared > 0, "data", compared, f"{compared:,} samples, each on one rank", side=side)
    )
    shuffles = run.start["settings"]["data"]["shuffle"]
    orders = list(by_rank[0].items())
    same = [
        (before, epoch)
        for (before, first), (epoch, second) in zip(orders, orders[1:], strict=False)
        if first[: min(len(first), len(second))] == second[: min(len(first), len(second))]
    ]
    if shuffles and same:
        how = f"epochs {same[0][0]} and {same[0][1]} have the same order: was set_epoch forgotten?"
        step = next(event["step"] for event in run.events(0, "step") if event["epoch"] == same[0][1])
        findings.append(Finding("order changes", False, "data", len(orders), how, step, 0, side))
    elif len(orders) > 1 and shuffles:
        findings.append(
            Finding("order changes", True, "data", len(orders), f"another order in each of {len(orders)} epochs", side=side)
        )
    return findings


def check_finite(run: Run, side: str) -> Finding:
    """NaN or infinity in a loss or a gradient: nothing can be said of such a run."""
    compared = 0
    for rank in sorted(run.ranks):
        for event in run.events(rank, "step"):
            for batch in event["batches"]:
                compared += 1
                if not math.isfinite(batch["loss"]):
                    return Finding(
                        "finite", False, "forward", compared, f"the loss is {batch['loss']}", event["step"], rank, side
                    )
            for name, tensor in event["reduced"].items():
                compared += 1
                if not np.isfinite(read_sketch(tensor)).all():
                    return Finding(
                        "finite", False, "reduced gradient", compared, f"{name} is not finite", event["step"], rank, side
                    )
    return Finding("finite", compared > 0, "forward", compared, "all losses and gradients are finite", side=side)


def check_validation(run: Run, side: str) -> Finding:
    """Every validation counts the whole set, once, and all ranks say the same."""
    compared = 0
    expected = run.start["settings"].get("val_samples")
    events = [run.events(rank, "validation") for rank in sorted(run.ranks)]
    for same in zip(*events, strict=True):
        for rank, event in enumerate(same):
            compared += 1
            how = mapping_difference(same[0]["metrics"], event["metrics"])
            if how is not None:
                return Finding(
                    "validation is exact", False, "metric", compared, f"{how} on ranks 0 and {rank}", event["step"], rank, side
                )
            counted = event["metrics"].get("val/images")
            if expected is not None and counted != expected:
                how = f"{counted:.0f} images were counted, the set has {expected}"
                return Finding("validation is exact", False, "metric", compared, how, event["step"], rank, side)
    return Finding("validation is exact", True, "metric", compared, f"{compared} validations counted each image once", side=side)


def check_environment(a: Run, b: Run) -> Finding:
    """Versions, threads, device: what may change bits without a change of code."""
    how = mapping_difference(a.start["environment"], b.start["environment"])
    return Finding(
        "environment", how is None, "environment", len(a.start["environment"]), how or "equal versions, threads and device"
    )


def check_settings(a: Run, b: Run) -> Finding:
    one, other = a.start["settings"], b.start["settings"]
    how = mapping_difference(one, other)
    return Finding("settings", how is None, "environment", len(one), how or "both runs were asked for the same")


def compare_runs(a: Run, b: Run) -> list[Finding]:
    """All checks of two complete records.

    Raises:
        ValueError: a record is empty or broken: then nothing can be said.
    """
    for run in (a, b):
        reason = broken(run)
        if reason is not None:
            raise ValueError(reason)
    if set(a.ranks) != set(b.ranks):
        raise ValueError(f"{a.name} has {len(a.ranks)} ranks, {b.name} has {len(b.ranks)}")
    findings = [check_environment(a, b), check_settings(a, b)]
    findings += [compare_pair(pair, a, b) for pair in PAIRS if pair.kind == "step" or _any(a, b, pair.kind)]
    for side, run in (("a", a), ("b", b)):
        findings += [*check_sampler(run, side), check_finite(run, side), check_reduction(run, side)]
        findings += [*check_ranks_equal(run, side)] if len(run.ranks) > 1 else []
        findings += [check_validation(run, side)] if run.events(0, "validation") else []
    return findings


def _any(a: Run, b: Run, kind: str) -> bool:
    return any(run.events(rank, kind) for run in (a, b) for rank in run.ranks)


def first_difference(findings: list[Finding], a: Run) -> Finding | None:
    """Where it began: the earliest in time; at the same step, the first phase."""
    failed = [finding for finding in findings if not finding.passed]

    def when(finding: Finding) -> tuple[float, int, bool]:
        time = float(finding.after) if finding.after else _position(a, finding.step)
        return time, PHASES.index(finding.phase), bool(finding.side)

    return min(failed, key=when, default=None)


def _position(run: Run, step: int | None) -> float:
    if step is None:
        return 0.0
    events: Iterator[tuple[int, Event]] = enumerate(run.ranks[min(run.ranks)])
    return next((float(number) for number, event in events if event["event"] == "step" and event["step"] == step), math.inf)
