"""The figures of a trace: medians over its steps, which rank is slowest, and by a stated rule what to change."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from project.measure.timeline.analysis import PARTS, Step
from project.measure.timeline.chrome_trace import RankTrace, offset_us
from project.measure.timeline.rank_tracer import PINGS
from project.report.table import Column, paragraph, table_lines

LIMIT = 0.05  # of a step: a part that is smaller is not worth a change


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


LABELS = {
    "data": "data wait",
    "copy": "copy, normalise",
    "buffers": "buffers, broadcast",
    "forward": "forward",
    "backward": "backward",
    "wait": "wait for AllReduce",
    "optimizer": "optimizer",
    "rest": "rest",
}

RULE = (
    "Of what is neither forward nor backward, on the slowest rank, the largest part is named: waiting for data, copy, buffers, "
    "AllReduce that moves outside of backward, optimizer, rest, and the time for which the other ranks wait for that rank. "
    f"Below {percent(LIMIT)} of the step none is."
)

_ADVICE = {
    "data": "give the loader more processes (--data.num_workers), or smaller files",
    "copy": "a larger share of the step than it should be: fewer pixels (--data.train_size), or a larger network",
    "buffers": "DDP's broadcast of BatchNorm's statistics, in which ranks also wait for rank 0; DDP's "
    "broadcast_buffers false leaves it out",
    "transfer": "more work per AllReduce: a larger --data.global_batch_size, or a faster link",
    "optimizer": "fewer updates per image: a larger --data.global_batch_size",
    "rest": "the trainer's own work: look between the parts in trace.json",
}
_NAMES = {**LABELS, "transfer": "AllReduce outside of backward"}


@dataclass(frozen=True)
class Summary:
    """All lengths in milliseconds, all of them medians over the steps that were traced.

    Attributes:
        parts: PARTS of each rank.
        step: A whole step of each rank. Medians need not add up; the parts of each single step do.
        communication: For each rank `hidden`, `exposed`, and of the exposed `late`.
        bytes: Reduced per step and rank.
        buckets: Parameters and bytes of each, and medians over steps and ranks.
        slowest: The rank whose last gradient was ready last in most steps.
        slowest_in: In how many.
        behind: By how much it was behind the first rank to be ready.
        finding: What to change, by RULE.
        overhead: Cost of tracing on the slowest rank: steps `profiled` and `unprofiled`, what share the profiler adds, the
            number of the `others` around the traced steps, and the `least` and `most` that these took.
        clocks: For each rank the offset of its clock from rank 0's in microseconds, its error, and what was taken off.
        resolution_us: A span that holds nothing, as the profiler records it: nothing shorter can be seen.
        profiler_clock_us: How far the profiler's and the host's clock may be apart, at most over the ranks.
    """

    steps: list[int]
    parts: dict[int, dict[str, float]]
    groups: dict[int, dict[str, float]]
    step: dict[int, float]
    communication: dict[int, dict[str, float]]
    bytes: int
    parameters: int
    buckets: list[dict[str, Any]]
    slowest: int
    slowest_in: int
    behind: float
    finding: str
    overhead: dict[str, float]
    clocks: dict[int, dict[str, float]]
    resolution_us: float
    profiler_clock_us: float
    facts: dict[str, Any]


def summarise(ranks: Sequence[RankTrace], steps: Sequence[Sequence[Step]]) -> Summary:
    numbers = [rank.rank for rank in ranks]
    own = {rank: [step[k] for step in steps] for k, rank in enumerate(numbers)}
    parts = {rank: {part: _median(s.parts[part] for s in own[rank]) for part in PARTS} for rank in numbers}
    communication = {
        rank: {name: _median(getattr(s, name) for s in own[rank]) for name in ("hidden", "exposed", "late")} for rank in numbers
    }
    whole = {rank: _median(s.span.length for s in own[rank]) for rank in numbers}
    last = [{s.rank: _last_gradient(s) for s in step} for step in steps]
    counted = Counter(max(ends, key=lambda rank: ends[rank]) for ends in last)
    slowest, slowest_in = max(counted.items(), key=lambda item: (item[1], whole[item[0]]))
    finding = find(parts, communication, whole, slowest=slowest, always=slowest_in >= 2 / 3 * len(steps))
    facts = ranks[numbers.index(slowest)].facts
    profiled, unprofiled = median(facts["profiled_ms"]), median(facts["unprofiled_ms"])
    return Summary(
        steps=[step[0].number for step in steps],
        parts=parts,
        groups={rank: {g: _median(s.groups.get(g, 0.0) for s in own[rank]) for g in own[rank][0].groups} for rank in numbers},
        step=whole,
        communication=communication,
        bytes=steps[0][0].bytes,
        parameters=facts["parameters"],
        buckets=[_bucket(k, content, steps) for k, content in enumerate(facts["buckets"])],
        slowest=slowest,
        slowest_in=slowest_in,
        behind=median((ends[slowest] - min(ends.values())) / 1e3 for ends in last),
        finding=finding,
        overhead={
            "profiled": profiled,
            "unprofiled": unprofiled,
            "share": profiled / unprofiled - 1,
            "others": len(facts["unprofiled_ms"]),
            "least": min(facts["unprofiled_ms"]),
            "most": max(facts["unprofiled_ms"]),
        },
        clocks={rank.rank: _clock(rank) for rank in ranks},
        resolution_us=max(rank.nothing_us for rank in ranks),
        profiler_clock_us=max(rank.clock_us for rank in ranks),
        facts={name: value for name, value in ranks[0].facts.items() if name in _OF_ALL},
    )


_OF_ALL = ("trainer", "world_size", "device", "backend", "torch", "threads", "arch", "batch", "steps")


def _median(lengths_us: Any) -> float:
    return median(lengths_us) / 1e3


def _last_gradient(step: Step) -> float:
    return max(piece.span.end for piece in step.pieces if piece.part == "backward")


def _clock(rank: RankTrace) -> dict[str, float]:
    best = min(rank.facts["clocks"], key=lambda clock: clock["error_us"])
    return {**best, "taken_off_us": offset_us(rank.facts)}


def _bucket(number: int, content: dict[str, Any], steps: Sequence[Sequence[Step]]) -> dict[str, Any]:
    found = [s.buckets[number] for step in steps for s in step]
    return {
        "number": number,
        **content,
        "ms": _median(bucket.span.length for bucket in found),
        "exposed_ms": _median(sum(span.length for span in bucket.exposed) for bucket in found),
        "queued_ms": _median(bucket.span.start - bucket.ready for bucket in found),
    }


def find(
    parts: dict[int, dict[str, float]],
    communication: dict[int, dict[str, float]],
    whole: dict[int, float],
    *,
    slowest: int,
    always: bool,
) -> str:
    """One sentence on what to change, by RULE."""
    own, step = parts[slowest], whole[slowest]
    costs = {name: own[name] for name in ("data", "copy", "buffers", "optimizer", "rest")}
    costs["transfer"] = communication[slowest]["exposed"] - communication[slowest]["late"]
    costs["late"] = max(each["late"] for each in communication.values())
    name = max(costs, key=lambda name: costs[name])
    share = costs[name] / step
    if share < LIMIT:
        compute = (own["forward"] + own["backward"]) / step
        return (
            f"Nothing between the ranks: forward and backward are {percent(compute)} of the step, and no other part reaches "
            f"{percent(LIMIT)}; only faster arithmetic helps (--precision bf16-mixed, --model.channels_last true)."
        )
    if name != "late":
        title = _NAMES[name][0].upper() + _NAMES[name][1:]
        return f"{title} on rank {slowest}, {costs[name]:.1f} ms ({percent(share)} of the step): {_ADVICE[name]}."
    if not always:
        return (
            f"Ranks wait for one another, {costs[name]:.1f} ms ({percent(share)} of the step), and not always for the same one: "
            "their speed varies; give each rank cores or a device of its own."
        )
    others = [rank for rank in parts if rank != slowest]
    more = {part: own[part] - median(parts[rank][part] for rank in others) for part in PARTS if part != "wait"}
    longest = max(more, key=lambda part: more[part])
    return (
        f"The other ranks wait {costs[name]:.1f} ms ({percent(share)} of the step) for rank {slowest}, whose {LABELS[longest]} "
        f"takes {more[longest]:.1f} ms longer than theirs: even that out."
    )


def table(summary: Summary) -> list[tuple[str, dict[int, float], bool]]:
    """The rows that a person reads: label, milliseconds of each rank, and whether it is a part of the row before."""
    rows = [(LABELS[part], {rank: own[part] for rank, own in summary.parts.items()}, False) for part in PARTS]
    rows.append(("step", summary.step, False))
    if summary.buckets:
        for name, label in (
            ("hidden", "AllReduce, hidden"),
            ("exposed", "AllReduce, exposed"),
            ("late", "of it for a late rank"),
        ):
            rows.append((label, {rank: own[name] for rank, own in summary.communication.items()}, name == "late"))
    return rows


COLUMNS = 6  # ranks that fit into 80 columns


def shown_ranks(summary: Summary) -> list[int]:
    """All, or, of more than fit, the first ones and the slowest."""
    ranks = sorted(summary.step)
    first = ranks[:COLUMNS]
    return first if summary.slowest in first else [*first[:-1], summary.slowest]


def lines(summary: Summary) -> list[str]:
    """For the terminal, at most 80 columns."""
    ranks = shown_ranks(summary)
    count = len(summary.steps)
    columns = [Column(f"ms per step, median of {count}", width=26)]
    columns += [Column(f"rank {rank}", right=True, width=6) for rank in ranks]
    found = table_lines(
        columns, [("  " * inner + label, *(f"{own[rank]:.1f}" for rank in ranks)) for label, own, inner in table(summary)]
    )
    if len(ranks) < len(summary.step):
        found.append(f"{len(summary.step)} ranks, of which {len(ranks)} are shown; all are in summary.json")
    if summary.buckets:
        mean = {
            name: sum(own[name] for own in summary.communication.values()) / len(summary.step) for name in ("hidden", "exposed")
        }
        both = mean["hidden"] + mean["exposed"]
        found += _wrap(
            "reduced   ",
            f"{summary.bytes / 1e6:,.1f} MB per step and rank in {len(summary.buckets)} buckets, "
            f"{percent(mean['hidden'] / both)} of AllReduce's time hidden by backward",
        )
        found += _wrap(
            "slowest   ",
            f"rank {summary.slowest}, last in {summary.slowest_in} of {count} steps, "
            f"{summary.behind:.1f} ms behind the first to be ready",
        )
    found += _wrap("change    ", summary.finding)
    cost = summary.overhead
    found += _wrap(
        "profiler  ",
        f"{100 * cost['share']:+.1f} %: steps of {cost['profiled']:.0f} ms with it, {cost['unprofiled']:.0f} ms without "
        f"(the {cost['others']:.0f} around them: {cost['least']:.0f} to {cost['most']:.0f}); a span of nothing is "
        f"{summary.resolution_us:.1f} us",
    )
    if len(summary.step) > 1:
        found += _wrap("clocks    ", clock_sentence(summary))
    return found


def clock_sentence(summary: Summary) -> str:
    others = {rank: clock for rank, clock in summary.clocks.items() if rank}
    worst = max(others, key=lambda rank: abs(others[rank]["offset_us"]) + others[rank]["error_us"])
    clock = others[worst]
    taken = "corrected" if any(clock["taken_off_us"] for clock in others.values()) else "less than its error, so not corrected"
    return (
        f"rank {worst} {clock['offset_us']:+.0f} us against rank 0, +/- {clock['error_us']:.0f} us "
        f"(half the fastest of {2 * PINGS} messages to and fro); {taken}"
    )


def _wrap(head: str, text: str) -> list[str]:
    return paragraph(head + text, width=79, more=" " * len(head))
