"""A recorded run as the checks read it, and what a check says of it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.record.format import read_record, tensor_file
from project.runtime.errors import UserError

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

# What an event must hold to be judged.
KEYS = {
    "start": {"trainer", "rank", "world_size", "environment", "settings"},
    "step": {"step", "epoch", "lr", "batches", "local", "reduced", "weights", "optimizer", "buffers"},
    "validation": {"epoch", "step", "metrics", "batches"},
    "checkpoint": {"name", "keys", "state_dict", "record"},
    "end": {"steps"},
}
_BATCH = {"index", "images", "target", "logits", "loss"}
_SETTINGS = {"model", "data", "seed", "precision", "accumulate", "samples", "val_samples"}
_SETTINGS |= {"limit_train_batches", "limit_val_batches", "backend"}

BEFORE = -math.inf  # the time of what holds for a whole run: before its first step


class CannotTell(UserError):
    """Nothing can be said: a run failed, or a record is empty or broken. Commands print it and exit with code 2."""


@dataclass(frozen=True)
class Finding:
    """What one check says.

    Attributes:
        check: Name of the check.
        passed: True only where something was compared and all of it held.
        phase: One of PHASES.
        compared: Number of things that were compared: tensors, numbers, samples.
        detail: What was compared, or in words what differs: name, values, size.
        step: Optimizer step of the first difference, from 0; None where it has none.
        rank: Rank of the first difference; None where it concerns all.
        side: "a", "b" where one run breaks its own promise; "" where two runs differ.
        time: Time of the first difference, in steps. What comes after a step has a fraction; see `Run.timed`.
        noted: It is worth knowing, and no part of the verdict.
        within_noise: It passed, and not to the bit.
    """

    check: str
    passed: bool
    phase: str
    compared: int
    detail: str
    step: int | None = None
    rank: int | None = None
    side: str = ""
    time: float = BEFORE
    noted: bool = False
    within_noise: bool = False

    @property
    def failed(self) -> bool:
        return not (self.passed or self.noted)


@dataclass(frozen=True)
class Run:
    """One recorded run.

    Attributes:
        name: How to call it.
        ranks: The events of each rank, in order.
        folder: Where it was recorded; None for one that is made by hand.
    """

    name: str
    ranks: dict[int, list[Event]]
    folder: Path | None = None

    def events(self, rank: int, kind: str) -> list[Event]:
        return [event for event in self.ranks[rank] if event["event"] == kind]

    def timed(self, rank: int, kind: str) -> Iterator[tuple[float, Event]]:
        """Events with their time: step n at n, a validation after it at n + 1/4, a checkpoint after it at n + 1/2."""
        now = BEFORE
        for event in self.ranks[rank]:
            if event["event"] == "step":
                now = float(event["step"])
            if event["event"] == kind:
                yield now + {"validation": 0.25, "checkpoint": 0.5}.get(kind, 0.0), event

    @property
    def start(self) -> Event:
        return self.ranks[min(self.ranks)][0]

    @property
    def settings(self) -> dict[str, Any]:
        return self.start["settings"]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def steps(self) -> int:
        return len(self.events(min(self.ranks), "step"))

    def stored_steps(self) -> list[int]:
        """Those whose gradients were stored as they are, by all ranks."""
        if self.folder is None:
            return []
        steps = [event["step"] for event in self.events(min(self.ranks), "step")]
        return [step for step in steps if all(tensor_file(self.folder, step=step, rank=r).is_file() for r in self.ranks)]


def broken(run: Run) -> str | None:
    """Why a record cannot be judged; None if it is complete."""
    if not run.ranks:
        return f"{run.name}: there is no record"
    for rank, events in sorted(run.ranks.items()):
        reason = _broken_rank(events)
        if reason is not None:
            return f"{run.name}: the record of rank {rank} {reason}"
    expected = set(range(run.start["world_size"]))
    if set(run.ranks) != expected:
        return f"{run.name}: there are records of ranks {sorted(run.ranks)}, and {len(expected)} ranks were started"
    steps = {rank: [event["step"] for event in run.events(rank, "step")] for rank in run.ranks}
    different = next((rank for rank in steps if steps[rank] != steps[0]), None)
    if different is not None:
        return f"{run.name}: ranks 0 and {different} took {len(steps[0])} and {len(steps[different])} steps"
    return None


def _broken_rank(events: list[Event]) -> str | None:
    if not all(isinstance(event, dict) for event in events):
        return "holds a line that is no event"
    if not events or events[0].get("event") != "start":
        return "has no beginning"
    for event in events:
        kind = event.get("event")
        if kind not in KEYS:
            return f"holds an event {kind!r}, which is unknown"
        lacks = KEYS[kind] - event.keys()
        lacks |= {key for batch in event["batches"] for key in _BATCH - batch.keys()} if kind == "step" and not lacks else set()
        lacks |= _SETTINGS - event["settings"].keys() if kind == "start" and not lacks else set()
        if lacks:
            return f"lacks {', '.join(sorted(lacks))} in a {kind}"
    if events[-1]["event"] != "end":
        return "breaks off: the run did not end well"
    steps = [event["step"] for event in events if event["event"] == "step"]
    if not steps:
        return "holds no step"
    if steps != list(range(steps[0], steps[0] + len(steps))) or len(steps) != events[-1]["steps"]:
        return f"holds {len(steps)} of {events[-1]['steps']} steps"
    if not all(event["batches"] for event in events if event["event"] == "step"):
        return "holds a step without a batch"
    return None


def load_run(folder: Path, *, name: str) -> Run:
    """A record, whole.

    Raises:
        CannotTell: it is empty or broken.
    """
    run = Run(name, read_record(folder), folder)
    reason = broken(run)
    if reason is not None:
        raise CannotTell(f"{reason} ({folder}).")
    return run
