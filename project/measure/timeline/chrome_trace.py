"""One rank's Chrome trace as torch.profiler wrote it -> what it did, on one axis with the other ranks.

On a CPU all times are the profiler's spans on the host. On a GPU they are those of kernels: see `timeline_kernels.py`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from project.measure.timeline.kernels import KERNELS, nccl_reduces, on_gpu, span_of
from project.measure.timeline.rank_tracer import MARK
from project.measure.timeline.spans import Piece, Reduce, Span
from project.runtime.errors import UserError

Event = dict[str, Any]

# What begins at a mark. A mark that is not here begins what has no name: the rest.
_PARTS = {"copy": "copy", "ddp": "buffers", "computed": "wait", "reduced": "optimizer"}
_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "int": 4, "long int": 8}


@dataclass(frozen=True)
class RankTrace:
    """What one rank did.

    Attributes:
        facts: What the rank said of itself, see `rank.Tracer`.
        bounds: The border of each step and the last one's end.
        pieces: In time; they do not overlap.
        data: Where the host waited for a batch.
        reduces: In time.
        clock_us: How far apart the profiler's clock and the host's may be: the mark lies between two readings of the host's.
        nothing_us: Median length of a span that holds nothing.
    """

    rank: int
    facts: dict[str, Any]
    bounds: list[float]
    pieces: list[Piece]
    data: list[Span]
    reduces: list[Reduce]
    clock_us: float
    nothing_us: float


def read_file(path: Path) -> dict[str, Any]:
    """A rank's trace.

    Raises:
        UserError: it is no trace of ours, or holds nothing; the message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a trace: {error}") from error
    if not isinstance(content, dict) or not {"traceEvents", "baseTimeNanoseconds", "lockstep"} <= content.keys():
        raise UserError(f"{path} is no trace of python -m project.trace: it lacks traceEvents, baseTimeNanoseconds or lockstep.")
    if not content["traceEvents"]:
        raise UserError(f"{path} holds no event.")
    return content


def read_ranks(folder: Path) -> tuple[list[dict[str, Any]], list[RankTrace], int]:
    """All ranks' traces: as they are, as what they say, and the zero of all times, in nanoseconds of Unix time.

    Raises:
        UserError: one is missing, empty or broken; the message names it.
    """
    files = sorted(folder.glob("rank-*.json"))
    if not files:
        raise UserError(f"{folder} holds no rank-0.json: there is no trace.")
    contents = sorted((read_file(path) for path in files), key=lambda content: content["lockstep"]["rank"])
    ranks = [content["lockstep"]["rank"] for content in contents]
    expected = list(range(contents[0]["lockstep"]["world_size"]))
    if ranks != expected:
        raise UserError(f"{folder} holds traces of ranks {ranks}, and {len(expected)} ranks were started.")
    zero = min(content["baseTimeNanoseconds"] + math.floor(1000 * _first(content)) for content in contents)
    return contents, [read_rank(content, zero_ns=zero) for content in contents], zero


def _first(content: dict[str, Any]) -> float:
    """When the first of its events begins, in microseconds."""
    return min((event["ts"] for event in content["traceEvents"] if event.get("ph") == "X"), default=0.0)


def _is_mark(event: Event, name: str = "") -> bool:
    return event.get("ph") == "X" and event.get("cat") != "gpu_user_annotation" and event["name"].startswith(MARK + name)


def offset_us(facts: dict[str, Any]) -> float:
    """What is taken from a rank's times: its clock's offset where it is larger than its error, which on one host it is not."""
    best = min(facts["clocks"], key=lambda clock: clock["error_us"])
    return best["offset_us"] if abs(best["offset_us"]) > best["error_us"] else 0.0


def shift_us(content: dict[str, Any], *, zero_ns: int) -> float:
    """What is added to an event's `ts`, in microseconds, to bring it to the common axis."""
    return (content["baseTimeNanoseconds"] - zero_ns) / 1e3 - offset_us(content["lockstep"])


def read_rank(content: dict[str, Any], *, zero_ns: int) -> RankTrace:
    """What a rank did, on the common axis.

    Raises:
        UserError: it has fewer steps than it says, or a step without forward or backward.
    """
    facts, shift = content["lockstep"], shift_us(content, zero_ns=zero_ns)
    events = sorted((event for event in content["traceEvents"] if event.get("ph") == "X"), key=lambda event: event["ts"])
    marks = _marks(events, shift)
    data = [span_of(event, shift) for event in events if event["name"].startswith("enumerate(DataLoader)#")]
    bounds = [at for at, name in marks if name == "step"]
    if len(bounds) != facts["steps"] + 1:
        raise UserError(f"rank {facts['rank']}: the trace has {max(0, len(bounds) - 1)} whole steps of {facts['steps']}.")
    kernels = [event for event in events if event.get("cat") in KERNELS]
    if kernels:
        pieces, bounds, data = on_gpu(marks, list(_named(marks)), bounds, data, events, kernels, shift)
        reduces = list(nccl_reduces(kernels, shift))
    else:
        pieces = _on_host(marks)
        reduces = list(_gloo(events, shift))
    for number in range(len(bounds) - 1):
        found = {piece.part for piece in pieces if bounds[number] <= piece.span.start < bounds[number + 1]}
        if not {"forward", "backward"} <= found:
            raise UserError(f"rank {facts['rank']}: step {number} of the trace has no forward or no backward.")
    empty = [event["dur"] for event in events if _is_mark(event, "nothing")]
    clock = next(event for event in events if _is_mark(event, "clock"))
    host_us = [(at - content["baseTimeNanoseconds"]) / 1e3 for at in facts["host_ns"]]
    clock_us = max(abs(clock["ts"] - at) for at in host_us)
    return RankTrace(facts["rank"], facts, bounds, pieces, data, reduces, clock_us=clock_us, nothing_us=median(empty or [0.0]))


def _marks(events: list[Event], shift: float) -> list[tuple[float, str]]:
    """From the first step's border to the last one's: time and name of each."""
    found = [(event["ts"] + shift, event["name"].removeprefix(MARK)) for event in events if _is_mark(event)]
    found += [(event["ts"] + shift, "ddp") for event in events if event["name"] == "DistributedDataParallel.forward"]
    found.sort(key=lambda each: each[0])  # at the same time, as they were recorded
    borders = [number for number, (_, name) in enumerate(found) if name == "step"]
    return found[borders[0] : borders[-1] + 1] if borders else []


def _named(marks: list[tuple[float, str]]) -> Iterator[tuple[str, str, Span]]:
    """Each piece between two marks: its part, its group, its span."""
    for (start, name), (end, following) in zip(marks, marks[1:], strict=False):
        part, _, group = name.partition(" ")
        if part not in ("forward", "backward") or group == "end":
            # A gradient that was reduced and not followed by an update is one of several that are added up
            part, group = _PARTS.get(name, "rest") if name != "reduced" or following == "step" else "rest", ""
        yield part, group, Span(start, end)


def _on_host(marks: list[tuple[float, str]]) -> list[Piece]:
    return [Piece(part, group, span) for part, group, span in _named(marks) if part != "rest"]


def _gloo(events: list[Event], shift: float) -> Iterator[Reduce]:
    """Asked for on one thread, done on another: gloo takes them up in order."""
    asked = [event for event in events if event["name"] == "c10d::allreduce_"]
    for event in events:
        if event["name"] != "gloo:all_reduce":
            continue
        elements = _elements(event["args"]["Input Dims"])
        same = [a for a in asked if _elements(a["args"]["Input Dims"]) == elements and a["ts"] <= event["ts"]]
        ready = event["ts"]
        if same:
            ready = same[0]["ts"]
            asked.remove(same[0])
        kind = event["args"]["Input type"][0]
        yield Reduce(ready + shift, span_of(event, shift), elements * _BYTES.get(kind, 0))


def _elements(shapes: Any) -> int:
    """In [[3, 4], [5]] or deeper lists of shapes: 17."""
    if not shapes:
        return 0
    if all(isinstance(size, int) for size in shapes):
        product = 1
        for size in shapes:
            product *= size
        return product
    return sum(_elements(shape) for shape in shapes if isinstance(shape, list))
