"""The pieces of a step on a GPU, from the records of its kernels. Not run: there was no GPU; tested on traces made by hand.

A kernel belongs to the piece of the step in which the host launched it. NCCL's kernels are the AllReduce.
"""

import bisect
from collections.abc import Iterator
from typing import Any

from project.measure.timeline.spans import Piece, Reduce, Span, minus, union

Event = dict[str, Any]

KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8}


def span_of(event: Event, shift: float) -> Span:
    return Span(event["ts"] + shift, event["ts"] + event.get("dur", 0.0) + shift)


def _launched(events: list[Event], shift: float) -> dict[int, float]:
    """When the host launched what has this correlation number."""
    host = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {event["args"]["correlation"]: event["ts"] + shift for event in host if "correlation" in event.get("args", {})}


def _is_nccl(kernel: Event) -> bool:
    return "nccl" in kernel["name"].lower()


def on_gpu(
    marks: list[tuple[float, str]],
    named: list[tuple[str, str, Span]],
    bounds: list[float],
    data: list[Span],
    events: list[Event],
    kernels: list[Event],
    shift: float,
) -> tuple[list[Piece], list[float], list[Span]]:
    """Pieces, borders and waits on the device's time axis.

    A piece goes from the start of its first kernel to the end of its last one; a step ends with the last kernel of its
    update. The wait for AllReduce goes from the end of backward's last kernel to that of the last NCCL kernel before the
    update. The host's wait for data counts only while the device had nothing to do.
    """
    launched = _launched(events, shift)
    starts = [at for at, _ in marks[:-1]]
    own: dict[int, list[Span]] = {}
    nccl: list[tuple[float, Span]] = []  # when the host asked, and when the device did it
    for kernel in kernels:
        at = launched.get(kernel["args"].get("correlation"))
        if _is_nccl(kernel):
            nccl.append((kernel["ts"] + shift if at is None else at, span_of(kernel, shift)))
        elif at is not None and (number := bisect.bisect_right(starts, at) - 1) >= 0 and at <= marks[-1][0]:
            own.setdefault(number, []).append(span_of(kernel, shift))
    pieces: list[Piece] = []
    ends = [bounds[0]]
    for number, (part, group, span) in enumerate(named):
        spans = own.get(number, [])
        last = pieces[-1].span.end if pieces else ends[0]
        start = max(last, min((each.start for each in spans), default=last))
        end = max(start, max((each.end for each in spans), default=start))
        if part == "wait":  # the device's, not the host's: to the end of the last NCCL kernel of this step
            following = bounds[bisect.bisect_right(bounds, span.start)]
            start, end = last, max([last, *(each.end for at, each in nccl if at < following)])
        if part != "rest" and end > start:
            pieces.append(Piece(part, group, Span(start, end)))
        if span.end in bounds:
            ends.append(max([pieces[-1].span.end, *(each.end for each in spans)]) if pieces else span.end)
    busy = union([span_of(kernel, shift) for kernel in kernels])
    idle = [part for span in data for part in minus([span], busy)]
    return pieces, ends, idle


def nccl_reduces(kernels: list[Event], shift: float) -> Iterator[Reduce]:
    """Kernels whose records carry the collective's name and size. What one waits for in its stream is not recorded."""
    for kernel in kernels:
        arguments = kernel.get("args", {})
        if _is_nccl(kernel) and "allreduce" in (arguments.get("Collective name") or kernel["name"]).lower():
            span = span_of(kernel, shift)
            yield Reduce(span.start, span, int(arguments.get("In msg nelems", 0)) * BYTES.get(arguments.get("dtype", ""), 0))
