"""What the ranks' traces say of each step: where its time went, and how much communication the backward pass hid.

**Parts of a step**, which goes from the end of one update to the end of the next, and is their sum:

- `data`: waiting for the loader's next batch. On a GPU only as far as the device had nothing to do meanwhile.
- `copy`: the batch becomes the network's input: to the device, and from uint8 to normalised float32.
- `buffers`: DDP's forward until the module is called: rank 0's BatchNorm statistics are broadcast to the others.
- `forward`: conv1 (with bn1 and pooling), layer1 to layer4, fc (with pooling and the loss).
- `backward`: the same groups in reverse order, up to the last gradient of this rank.
- `wait`: from there until all buckets are reduced and the gradients are in their place.
- `optimizer`: from there to the end of the update, with clipping.
- `rest`: whatever is left: the trainer's own work.

**Communication** of a step on one rank is the union of its buckets' AllReduce, each from when it runs to its end; buckets
that overlap count once. `hidden` is the part of it within this rank's `backward`; `exposed` is all other. Of the exposed
time `late` is that in which no bucket could move, since some rank had not begun it. So hidden + exposed is the
communication, and what is exposed is (nearly all of) `wait`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from project.measure.timeline.chrome_trace import RankTrace
from project.measure.timeline.spans import Piece, Reduce, Span, minus, total, union
from project.runtime.errors import UserError

PARTS = ("data", "copy", "buffers", "forward", "backward", "wait", "optimizer", "rest")


@dataclass(frozen=True)
class Bucket:
    """One bucket's AllReduce in one step on one rank; `number` is its place in the order in which DDP reduces."""

    number: int
    ready: float
    span: Span
    hidden: tuple[Span, ...]
    exposed: tuple[Span, ...]


@dataclass(frozen=True)
class Step:
    """One step on one rank; all lengths in microseconds.

    Attributes:
        parts: Length of each of PARTS.
        groups: Lengths of forward and backward by group of layers, as "forward layer1".
        bytes: Reduced.
    """

    rank: int
    number: int
    span: Span
    parts: dict[str, float]
    groups: dict[str, float]
    pieces: tuple[Piece, ...]
    data: tuple[Span, ...]
    buckets: tuple[Bucket, ...]
    bytes: int
    hidden: float
    exposed: float
    late: float


def match_buckets(reduces: Sequence[Reduce], sizes: Sequence[int], *, where: str) -> list[tuple[int, Reduce]]:
    """Which of a step's AllReduces is which bucket: DDP reduces them in order, and their bytes must agree.

    Others than DDP's (a metric, DDP's map of used parameters) have other sizes and are left out.

    Raises:
        UserError: a bucket has no AllReduce, so the trace says nothing of it.
    """
    found: list[tuple[int, Reduce]] = []
    left = sorted(reduces, key=lambda reduce: reduce.ready)
    for number, size in enumerate(sizes):
        match = next((reduce for reduce in left if reduce.bytes == size), None)
        if match is None:
            seen = [reduce.bytes for reduce in sorted(reduces, key=lambda reduce: reduce.ready)]
            raise UserError(
                f"{where}: bucket {number} of DDP holds {size} bytes, and no AllReduce has as many; there are {seen}.\n"
                "A communication hook that changes their type or number cannot be traced: leave ddp_comm_hook out."
            )
        left.remove(match)
        found.append((number, match))
    return found


def analyse(ranks: Sequence[RankTrace]) -> list[list[Step]]:
    """For each step those of all ranks, in order.

    Raises:
        UserError: the ranks have other numbers of steps or buckets, or a bucket is missing.
    """
    if not ranks:
        raise UserError("There is no trace.")
    counts = {rank.rank: len(rank.bounds) - 1 for rank in ranks}
    if len(set(counts.values())) != 1 or counts[ranks[0].rank] < 1:
        raise UserError(f"The ranks' traces hold {counts} steps: they must be the same, and one or more.")
    sizes = [[bucket["bytes"] for bucket in rank.facts["buckets"]] for rank in ranks]
    if any(each != sizes[0] for each in sizes):
        raise UserError(f"The ranks have buckets of other sizes: {sizes}.")
    steps = []
    for number in range(counts[ranks[0].rank]):
        matched = [_buckets(rank, number, sizes[0]) for rank in ranks]
        begins = [max(each[k][1].span.start for each in matched) for k in range(len(sizes[0]))]
        steps.append([_step(rank, number, buckets, begins) for rank, buckets in zip(ranks, matched, strict=True)])
    return steps


def _buckets(rank: RankTrace, number: int, sizes: list[int]) -> list[tuple[int, Reduce]]:
    start, end = rank.bounds[number], rank.bounds[number + 1]
    backward = [piece.span.start for piece in rank.pieces if piece.part == "backward" and start <= piece.span.start < end]
    own = [reduce for reduce in rank.reduces if min(backward) <= reduce.span.start < end]
    return match_buckets(own, sizes, where=f"rank {rank.rank}, step {rank.facts['first_step'] + number + 1}")


def _step(rank: RankTrace, number: int, matched: list[tuple[int, Reduce]], begins: list[float]) -> Step:
    span = Span(rank.bounds[number], rank.bounds[number + 1])
    pieces = tuple(piece for piece in rank.pieces if span.start <= piece.span.start < span.end)
    data = tuple(each for each in rank.data if span.start <= each.start < span.end)
    parts, groups = dict.fromkeys(PARTS, 0.0), dict[str, float]()
    parts["data"] = total(union(list(data)))
    for piece in pieces:
        parts[piece.part] += piece.span.length
        if piece.group:
            name = f"{piece.part} {piece.group}"
            groups[name] = groups.get(name, 0.0) + piece.span.length
    parts["rest"] = span.length - sum(parts.values())
    compute = union([piece.span for piece in pieces if piece.part == "backward"])
    buckets = []
    for k, reduce in matched:
        exposed = minus([reduce.span], compute)
        buckets.append(Bucket(k, reduce.ready, reduce.span, tuple(minus([reduce.span], exposed)), tuple(exposed)))
    communication = union([bucket.span for bucket in buckets])
    exposed = minus(communication, compute)
    # A bucket moves from when the last rank has begun it
    moving = union([Span(max(bucket.span.start, begins[bucket.number]), bucket.span.end) for bucket in buckets])
    late = minus(exposed, moving)
    return Step(
        rank.rank,
        rank.facts["first_step"] + number + 1,
        span,
        parts,
        groups,
        pieces,
        data,
        tuple(buckets),
        sum(reduce.bytes for _, reduce in matched),
        hidden=total(communication) - total(exposed),
        exposed=total(exposed),
        late=total(late),
    )
