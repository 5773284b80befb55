"""Spans of time, what they stand for, and sets of them. All times are microseconds since the traces' common zero."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """From `start` to `end`."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Piece:
    """A part of a step, as data, forward or optimizer; forward and backward by group of layers, else "" ."""

    part: str
    group: str
    span: Span


@dataclass(frozen=True)
class Reduce:
    """One AllReduce.

    Attributes:
        ready: When the bucket's last gradient was there and the AllReduce was asked for; on a GPU when it begins.
        span: When it ran; in gloo a thread of its own takes it up, later where those are busy.
        bytes: Elements times their size.
    """

    ready: float
    span: Span
    bytes: int


def union(spans: list[Span]) -> list[Span]:
    """The same times in spans that do not touch, in order."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        elif span.length > 0:
            found.append(span)
    return found


def minus(spans: list[Span], taken: list[Span]) -> list[Span]:
    """The times of the first that are in none of the second; both without overlaps within themselves."""
    found = []
    for span in spans:
        start = span.start
        for other in taken:
            if other.end <= start or other.start >= span.end:
                continue
            if other.start > start:
                found.append(Span(start, other.start))
            start = max(start, other.end)
        if start < span.end:
            found.append(Span(start, span.end))
    return found


def total(spans: list[Span]) -> float:
    return sum(span.length for span in spans)
