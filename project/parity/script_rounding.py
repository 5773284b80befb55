"""Whether two trainings differ by no more than rounding: single steps from one state, judged by a scale that is measured.

After a step whose sums were added in another order two trainings drift apart: a ResNet with BatchNorm whose samples are only
reordered within each batch differs by 13 % after ten steps. So each step of b begins where a has begun it
(`record/attached.py` puts a's state into it), and the scale of rounding is what such steps of a itself differ by when the samples
of each batch are in another order. That is no measure where the forward depends on the places of samples, as dropout does. A part
of a step, such as all gradients together, is judged as a whole: of a bias with a few elements one draw of rounding tells little.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.parity.noise import FACTOR, LIMIT
from project.parity.script_comparison import PARTS, PER_RANK, ScriptOutcome
from project.parity.script_run import ScriptRun, load_script_run
from project.record.format import distance, read_sketch

SUMS = ("reduced", "clipped", "weights", "buffers")  # parts that do not depend on the order of the samples but by rounding


@dataclass(frozen=True)
class Rounding:
    """What was found.

    Attributes:
        scale: By part: the norm of what another order of the samples changes in a step, as a share of the part's norm, at most.
        beyond: The first part of b that differs by more than FACTOR times that: step, part, its tensor with the largest
            difference, and how many times what is allowed; None where there is none.
        largest: The most that a part of b differs by, in times of what is allowed.
        unmeasured: Why nothing can be said; empty where it can.
    """

    scale: dict[str, float]
    beyond: tuple[int, str, str, float] | None = None
    largest: float = 0.0
    unmeasured: str = ""

    @property
    def explains(self) -> bool:
        return not self.unmeasured and self.beyond is None


def measure_rounding(a: ScriptRun, b: ScriptRun, reordered: ScriptRun) -> Rounding:
    """Judge b by what `reordered`, a second run of a, shows; both were anchored at a."""
    parts = [part for part in SUMS if a.world_size == b.world_size or part not in PER_RANK]
    steps = min(a.steps, b.steps, reordered.steps)
    scale = {part: max((_share(a, reordered, part, step) for step in range(steps)), default=0.0) for part in parts}
    if not any(scale.values()):
        return Rounding(scale, unmeasured="another order of the samples changes nothing, or no DataLoader gives one")
    if max(scale.values()) > LIMIT:
        part = max(scale, key=scale.__getitem__)
        said = f"another order of the samples changes {PARTS[part]} by {scale[part]:.2g}, which is no rounding (dropout?)"
        return Rounding(scale, unmeasured=said)
    beyond, largest = None, 0.0
    for step in range(steps):
        for part in parts:
            times = _share(a, b, part, step) / (FACTOR * scale[part]) if scale[part] else 0.0
            largest = max(largest, times)
            if not times <= 1 and beyond is None:
                beyond = step, part, _farthest(a, b, part, step), times
    return Rounding(scale, beyond, largest)


def judge(found: ScriptOutcome, reordered: Path) -> Rounding:
    """The rounding of two runs that were anchored, with the folder of the third."""
    return measure_rounding(found.a, found.b, load_script_run(reordered, name="reordered"))


def _farthest(a: ScriptRun, b: ScriptRun, part: str, step: int) -> str:
    """The tensor with the largest difference."""
    ours, theirs = a.ranks[0][step][part], b.ranks[0][step][part]
    both = [name for name in ours if name in theirs and _has_size(ours[name], theirs[name])]
    return max(both, key=lambda name: distance(ours[name], theirs[name]))


def _has_size(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    return one is not None and other is not None and one["shape"] == other["shape"] and "sketch" in one and "sketch" in other


def _norm(tensor: dict[str, Any]) -> float:
    return math.sqrt(float((read_sketch(tensor) ** 2).mean()))


def _share(a: ScriptRun, b: ScriptRun, part: str, step: int) -> float:
    """Of the whole part in a step: the norm of the difference by the norm."""
    ours, theirs = a.ranks[0][step][part], b.ranks[0][step][part]
    both = [name for name in ours.keys() & theirs.keys() if _has_size(ours[name], theirs[name])]
    size = math.hypot(*(distance(ours[name], theirs[name]) for name in both))
    norm = math.hypot(*(_norm(ours[name]) for name in both))
    return size / norm if norm else 0.0
