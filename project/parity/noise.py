"""Where a device does not repeat its own bits: a floor of noise, measured by running the raw trainer twice.

A GPU may add in another order each time. Two runs of one program then drift apart, and two programs can be told apart only by
what exceeds that drift. The floor of a part (logits, gradients, weights ...) at some time is the largest relative difference
of any of its tensors, on any rank, between the raw run and its repeat, up to then. A difference between the two trainers may be
FACTOR times the floor: both are single draws of noise, of norms which sketches give to about a third. Where the floor is 0,
equality is asked. Noise grows, and a floor that is high hides mistakes: what comes after it has reached LIMIT is not judged.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from project.parity.compared_parts import PAIRS
from project.parity.differences import is_tensor, keys_difference, norm
from project.parity.recorded_run import Run
from project.record.format import distance

FACTOR = 4.0
LIMIT = 1e-3

# What noise may move. All else is asked to be equal: samples, order, rates, names, keys.
NOISY = {"images", "logits", "loss", "local gradients", "reduced gradients", "weights", "buffers"}
NOISY |= {"validation images", "validation logits", "validation metrics"}
# Numbers, whose difference is a single draw, which may be small by chance: once there is noise, their floor is at least a
# rounding of 32 bits, and that of the tensors which they are computed from.
SINGLE = {"loss": "logits", "validation metrics": "validation logits"}
_ROUNDING = 2.0**-23
# Only hashes of these are recorded, or they are written after steps that are not judged.
UNSIZED = {"optimizer state", "checkpoint tensors", "checkpoint record"}


def relative(a: Any, b: Any) -> float:
    """The largest relative difference of any tensor or number in two parts of one shape; infinite where they have none."""
    if is_tensor(a) and is_tensor(b):
        return _relative_tensors(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        if keys_difference(a, b) is not None:
            return math.inf
        return max((relative(a[name], b[name]) for name in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return math.inf
        return max((relative(one, other) for one, other in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float) and math.isfinite(a) and math.isfinite(b):
        return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))
    return 0.0 if a == b else math.inf


def _relative_tensors(a: dict[str, Any], b: dict[str, Any]) -> float:
    if a["hash"] == b["hash"]:
        return 0.0
    if (a["type"], a["shape"]) != (b["type"], b["shape"]) or "sketch" not in a or "sketch" not in b:
        return math.inf
    with np.errstate(invalid="ignore"):
        size, scale = distance(a, b), max(norm(a), norm(b))
    return size / scale if math.isfinite(size) and scale else math.inf


@dataclass(frozen=True)
class Noise:
    """A measured floor.

    Attributes:
        floors: For each part, times in order with the largest relative difference up to each.
        until: The time from which nothing is judged; infinite where the floor stays below LIMIT.
        steps: Optimizer steps before that.
    """

    floors: dict[str, list[tuple[float, float]]]
    until: float
    steps: int

    def floor(self, part: str, time: float) -> float:
        return max((size for when, size in self.floors.get(part, []) if when <= time), default=0.0)

    @property
    def exists(self) -> bool:
        return any(size for sizes in self.floors.values() for _, size in sizes)

    def explains(self, part: str, time: float, a: Any, b: Any) -> bool:
        """Whether this difference is no larger than noise makes it."""
        return part in NOISY and relative(a, b) <= FACTOR * self.floor(part, time)

    @property
    def largest(self) -> float:
        """Of all that was judged."""
        return max((size for sizes in self.floors.values() for when, size in sizes if when < self.until), default=0.0)


def measure_noise(run: Run, repeat: Run) -> Noise:
    """From two runs of the same program; until the first step in which they are further apart than LIMIT."""
    floors: dict[str, list[tuple[float, float]]] = {}
    for pair in PAIRS:
        if pair.name not in NOISY:
            continue
        sizes: dict[float, float] = {}
        for rank in sorted(run.ranks):
            for (time, one), (_, other) in zip(run.timed(rank, pair.kind), repeat.timed(rank, pair.kind), strict=False):
                sizes[time] = max(sizes.get(time, 0.0), relative(pair.part(one), pair.part(other)))
        largest, floors[pair.name] = 0.0, []
        for time in sorted(sizes):
            largest = max(largest, sizes[time])
            floors[pair.name].append((time, largest))
    begins = min((time for sizes_ in floors.values() for time, size in sizes_ if size > 0), default=math.inf)
    for name, source in SINGLE.items():
        below = dict(floors.get(source, []))
        floors[name] = [
            (time, max(size, below.get(time, 0.0), _ROUNDING) if time >= begins else size) for time, size in floors.get(name, [])
        ]
    until = min((time for sizes_ in floors.values() for time, size in sizes_ if size >= LIMIT), default=math.inf)
    steps = sum(time < until for time, _ in run.timed(min(run.ranks), "step"))
    return Noise(floors, until, steps)
