"""The report's pictures as coordinates: the template draws them, in SVG."""

import math
from dataclasses import dataclass

from project.parity.recorded_run import Run

WIDTH, LEFT, RIGHT, TOP = 860.0, 64.0, 16.0, 14.0
_POINTS = 6000  # at most, in the picture of samples; more would only be grey


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class LossPicture:
    """Both losses over each other, and below them their difference, at its own scale.

    Attributes:
        a, b, difference: SVG paths.
        largest: Largest absolute difference; NaN counts as infinite.
    """

    height: float
    panel: float
    below: float
    a: str
    b: str
    difference: str
    x: list[Tick]
    y: list[Tick]
    epochs: list[float]
    largest: float
    zero: float
    steps: int


def mean_losses(run: Run) -> list[float]:
    """Of each step: the mean over its batches and ranks, of the recorded numbers."""
    sums: list[list[float]] = []
    for rank in sorted(run.ranks):
        for number, event in enumerate(run.events(rank, "step")):
            if number == len(sums):
                sums.append([])
            sums[number] += [batch["loss"] for batch in event["batches"]]
    return [sum(losses) / len(losses) for losses in sums]


def loss_differences(a: Run, b: Run) -> list[float]:
    """Of each step that both have: the largest absolute difference over batches and ranks, with the sign of b - a."""
    found = []
    for number in range(min(a.steps, b.steps)):
        largest = 0.0
        for rank in sorted(a.ranks):
            batches = zip(*(run.events(rank, "step")[number]["batches"] for run in (a, b)), strict=False)
            for one, other in batches:
                difference = other["loss"] - one["loss"]
                largest = difference if not abs(difference) <= abs(largest) else largest
        found.append(largest)
    return found


def draw_losses(a: Run, b: Run) -> LossPicture:
    height, panel, below = 330.0, 210.0, 80.0
    ours, theirs, off = mean_losses(a), mean_losses(b), loss_differences(a, b)
    known = [loss for loss in ours + theirs if math.isfinite(loss)] or [0.0, 1.0]
    low, high = min(known), max(known)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    steps = max(len(ours), len(theirs))
    first = a.events(0, "step")[0]["step"]

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (number + 0.5) / steps

    def y(loss: float) -> float:
        return TOP + panel * (high - loss) / (high - low)

    zero = TOP + panel + 26 + below / 2
    largest = max((abs(value) if not math.isnan(value) else math.inf for value in off), default=0.0)
    scale = (below / 2 - 4) / largest if largest and math.isfinite(largest) else 0.0
    stems = [
        f"M{x(k):.1f} {zero:.1f}V{zero - value * scale:.1f}" for k, value in enumerate(off) if value and math.isfinite(value)
    ]
    epochs = [x(k - 0.5) for k, (one, two) in enumerate(_neighbours(a), start=1) if one != two]
    return LossPicture(
        height=height,
        panel=panel,
        below=below,
        a=_line([(x(k), y(loss)) for k, loss in enumerate(ours) if math.isfinite(loss)]),
        b=_line([(x(k), y(loss)) for k, loss in enumerate(theirs) if math.isfinite(loss)]),
        difference="".join(stems),
        x=[Tick(x(k), str(first + k)) for k in _spread(steps)],
        y=[Tick(y(value), f"{value:.3g}") for value in _round_values(low, high)],
        epochs=epochs,
        largest=largest,
        zero=zero,
        steps=steps,
    )


def _neighbours(run: Run) -> list[tuple[int, int]]:
    epochs = [event["epoch"] for event in run.events(0, "step")]
    return list(zip(epochs, epochs[1:], strict=False))


def _line(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _spread(count: int, most: int = 12) -> list[int]:
    every = max(1, math.ceil(count / most))
    return list(range(0, count, every))


def _round_values(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two bounds."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [k * width for k in range(math.ceil(low / width), math.floor(high / width) + 1)]


@dataclass(frozen=True)
class SamplePicture:
    """Each dot is one sample, drawn at the step that used it; its colour is its rank.

    Attributes:
        ranks: SVG path of dots for each rank: the samples that both runs gave it.
        only_a, only_b: Dots of what only one of the runs gave that rank at that step.
        steps: How many steps are drawn, and of how many.
        same: Both runs gave every rank the same samples, in the same order, at every step.
    """

    height: float
    panel: float
    ranks: list[str]
    only_a: str
    only_b: str
    x: list[Tick]
    y: list[Tick]
    epochs: list[Tick]
    steps: tuple[int, int]
    same: bool


def draw_samples(a: Run, b: Run) -> SamplePicture:
    height, panel = 380.0, 310.0
    samples = max(a.settings["samples"], b.settings["samples"])
    common = min(a.steps, b.steps)
    first = a.events(0, "step")
    per_step = sum(len(batch["index"]) for rank in a.ranks for batch in a.events(rank, "step")[0]["batches"])
    drawn = _chosen([event["epoch"] for event in first[:common]], most=max(2, _POINTS // max(1, per_step)))
    width = (WIDTH - LEFT - RIGHT) / len(drawn)

    def y(sample: int) -> float:
        return TOP + panel * (1 - (sample + 0.5) / samples)

    ranks: list[str] = []
    only: tuple[list[str], list[str]] = ([], [])
    world_size = a.world_size
    for rank in sorted(a.ranks):
        dots: list[str] = []
        events = [run.events(rank, "step") for run in (a, b)]
        for column, number in enumerate(drawn):
            seen = [[max(i, ~i) for batch in side[number]["batches"] for i in batch["index"]] for side in events]
            for k in (0, 1):
                other = set(seen[1 - k])
                for position, i in enumerate(seen[k]):
                    # A rank's own lane within the step's column, and within the lane the order in the batch
                    lane = (rank + (position + 0.5) / len(seen[k])) / world_size
                    dot = f"M{LEFT + width * (column + 0.06 + 0.88 * lane):.1f} {y(i):.1f}h0"
                    if i not in other:
                        only[k].append(dot)
                    elif k == 0:
                        dots.append(dot)
        ranks.append("".join(dots))
    epochs, last = [], None
    for column, number in enumerate(drawn):
        epoch = first[number]["epoch"]
        if epoch != last:
            epochs.append(Tick(LEFT + width * column, f"epoch {epoch}"))
        last = epoch
    return SamplePicture(
        height=height,
        panel=panel,
        ranks=ranks,
        only_a="".join(only[0]),
        only_b="".join(only[1]),
        x=[Tick(LEFT + width * (column + 0.5), str(first[drawn[column]]["step"])) for column in _spread(len(drawn))],
        y=[Tick(y(int(value)), f"{int(value):,}") for value in _round_values(0, samples - 1)],
        epochs=epochs,
        steps=(len(drawn), common),
        same=all(_samples(a, rank) == _samples(b, rank) for rank in a.ranks),
    )


def _samples(run: Run, rank: int) -> list[list[int]]:
    return [batch["index"] for event in run.events(rank, "step") for batch in event["batches"]]


def _chosen(epochs: list[int], *, most: int) -> list[int]:
    """The steps to draw: all, or the first of each epoch, evenly, as far as there is room."""
    if len(epochs) <= most:
        return list(range(len(epochs)))
    distinct = list(dict.fromkeys(epochs))[: max(1, most // 2)]
    each = max(1, most // len(distinct))
    return [k for epoch in distinct for k in [k for k, e in enumerate(epochs) if e == epoch][:each]]
