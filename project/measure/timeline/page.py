"""What a trace is written to: trace.json for Perfetto, timeline.html for a browser, summary.json for a program."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from project.measure.timeline.analysis import Step, analyse
from project.measure.timeline.chrome_trace import read_ranks, shift_us
from project.measure.timeline.spans import Span
from project.measure.timeline.summary import RULE, Summary, clock_sentence, shown_ranks, summarise, table
from project.runtime.files import write_text

_LANES = ["parts of the step", "layers", "gradient buckets"]  # threads 1, 2 and from 3 on, which no thread has as its number

_LEFT_OUT = {"Ev Idx", "Input Strides", "Concrete Inputs", "Record function id"}  # half of the file; they stay in ranks/


def merge(contents: Sequence[dict[str, Any]], steps: Sequence[Sequence[Step]], *, zero_ns: int) -> dict[str, Any]:
    """All ranks' records on one axis: a process per rank and device, and lanes more per rank of what was found.

    Process rank * 100 is the rank's host, the numbers after it are its devices; correlations and flows keep to their rank.
    """
    events: list[dict[str, Any]] = []
    for content in contents:
        rank, shift = content["lockstep"]["rank"], shift_us(content, zero_ns=zero_ns)
        pids: dict[Any, int] = {}
        for event in content["traceEvents"]:
            pid = pids.setdefault(event.get("pid"), rank * 100 + len(pids))
            moved = {**event, "pid": pid}
            if "args" in event:
                moved["args"] = {name: value for name, value in event["args"].items() if name not in _LEFT_OUT}
            if "ts" in event:
                moved["ts"] = round(event["ts"] + shift, 3)
            if event.get("ph") in ("s", "f", "t"):
                moved["id"] = f"{rank}.{event['id']}"
            if event.get("name") == "process_name":
                moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            if event.get("name") == "process_sort_index":
                moved["args"] = {"sort_index": pid}
            events.append(moved)
        host = rank * 100
        lanes = [each for step in steps for each in _lanes(step[rank], content["lockstep"]["buckets"], host)]
        for lane in sorted({each["tid"] for each in lanes}):
            name = _LANES[min(lane, len(_LANES)) - 1]
            events.append({"ph": "M", "name": "thread_name", "pid": host, "tid": lane, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": host, "tid": lane, "args": {"sort_index": lane - 10}})
        events += lanes
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": zero_ns, "traceEvents": events}


def _lanes(step: Step, contents: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    def event(lane: int, name: str, span: Span, **more: Any) -> dict[str, Any]:
        start, end = round(span.start, 3), round(span.end, 3)
        times = {"ts": start, "dur": round(end - start, 3)}
        return {"ph": "X", "cat": "lockstep", "pid": pid, "tid": lane, "name": name, **times, "args": more}

    found = [event(1, f"step {step.number}", step.span)]
    found += [event(1, "data", span) for span in step.data]
    for piece in step.pieces:
        found.append(event(2 if piece.group else 1, f"{piece.part} {piece.group}".strip(), piece.span))
    ends: list[float] = []  # of the last bucket in each lane: Perfetto draws no overlaps within one
    for bucket in sorted(step.buckets, key=lambda bucket: bucket.span.start):
        content = contents[bucket.number]
        row = next((row for row, end in enumerate(ends) if end <= bucket.span.start), len(ends))
        ends[row : row + 1] = [bucket.span.end]
        found.append(event(3 + row, f"bucket {bucket.number}", bucket.span, bytes=content["bytes"], parameters=content["names"]))
    return found


def drawing(summary: Summary, steps: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """What the page draws, in milliseconds since the first step's start."""
    zero = min(step.span.start for step in steps[0])

    def ms(span: Span) -> list[float]:
        return [round((span.start - zero) / 1e3, 4), round((span.end - zero) / 1e3, 4)]

    ranks = []
    for k, rank in enumerate(sorted(summary.step)):
        own = [step[k] for step in steps]
        ranks.append(
            {
                "rank": rank,
                "steps": [{"number": s.number, "at": ms(s.span)} for s in own],
                "pieces": [["data", "", *ms(span)] for s in own for span in s.data]
                + [[piece.part, piece.group, *ms(piece.span)] for s in own for piece in s.pieces],
                "buckets": [
                    {
                        "number": b.number,
                        "step": s.number,
                        "ready": ms(Span(b.ready, b.span.end))[0],
                        "at": ms(b.span),
                        "hidden": [ms(span) for span in b.hidden],
                        "exposed": [ms(span) for span in b.exposed],
                    }
                    for s in own
                    for b in s.buckets
                ],
            }
        )
    return {"ranks": ranks, "buckets": [{"names": b["names"], "bytes": b["bytes"]} for b in summary.buckets]}


def marked(text: str) -> Markup:
    """Flags, with a value before a comma or the like, in the font of code."""
    return Markup(re.sub(r"--\w+(\.\w+)*( [\w-]+(?=[,;).]))?", r'<code class="flag">\g<0></code>', str(escape(text))))


def as_html(summary: Summary, steps: Sequence[Sequence[Step]], *, command: str) -> str:
    """One page that needs nothing but itself."""
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        files("project.measure.timeline").joinpath("timeline.html").read_text(encoding="utf-8")
    )
    drawn = json.dumps(drawing(summary, steps), separators=(",", ":")).replace("</", "<\\/")
    return template.render(
        summary=summary,
        finding=marked(summary.finding),
        drawn=drawn,
        table=table(summary),
        ranks=shown_ranks(summary),
        groups=[name.split()[1] for name in next(iter(summary.groups.values())) if name.startswith("forward")],
        rule=RULE,
        clock=clock_sentence(summary) if len(summary.step) > 1 else "",
        command=command,
    )


def write_all(folder: Path, *, command: str) -> Summary:
    """From FOLDER/ranks to the three files in FOLDER.

    Raises:
        UserError: a rank's trace is missing, empty or broken.
    """
    contents, ranks, zero_ns = read_ranks(folder / "ranks")
    steps = analyse(ranks)
    summary = summarise(ranks, steps)
    write_text(folder / "trace.json", json.dumps(merge(contents, steps, zero_ns=zero_ns), separators=(",", ":")))
    plain = {**asdict(summary), "rule": RULE, "command": command, "each_step": [[_plain(s) for s in step] for step in steps]}
    write_text(folder / "summary.json", json.dumps(plain, indent=1, allow_nan=False) + "\n")
    write_text(folder / "timeline.html", as_html(summary, steps, command=command))
    return summary


def _plain(step: Step) -> dict[str, Any]:
    names = ("rank", "number", "bytes", "hidden", "exposed", "late", "parts", "groups")
    return {**{name: getattr(step, name) for name in names}, "length": step.span.length, "unit": "us"}
