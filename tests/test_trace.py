"""`python -m project.trace`: its arithmetic on small traces made by hand, and the command with both trainers."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from project.measure.timeline.analysis import PARTS, Step, analyse, match_buckets
from project.measure.timeline.buckets import bucket_contents
from project.measure.timeline.chrome_trace import RankTrace, read_rank, read_ranks
from project.measure.timeline.page import marked, merge, write_all
from project.measure.timeline.rank_tracer import WARM_UP, Plan
from project.measure.timeline.spans import Reduce, Span, minus, total, union
from project.measure.timeline.summary import Summary, find, lines, shown_ranks, summarise
from project.measure.timeline.traced_training import QUIET
from project.runtime.errors import UserError
from project.trace import FIXED, parse
from tests.conftest import SMALL, Finished, run_module

BASE_NS = 1_790_000_000_000_000_000

# One step, in milliseconds: when what begins. Backward is 40 to 80, the wait 80 to 100, the update 100 to 110.
MARKS = {
    "step": 0,
    "copy": 10,
    "copied": 12,
    "module": 15,
    "forward conv1": 16,
    "forward layer1": 20,
    "forward fc": 30,
    "forward end": 40,
    "backward fc": 40,
    "backward layer1": 44,
    "backward conv1": 70,
    "computed": 80,
    "reduced": 100,
}
LENGTH = 110
BUCKETS = [{"bytes": 400, "names": ["fc.bias", "fc.weight"]}, {"bytes": 1200, "names": ["conv1.weight"]}]
# For each bucket: asked for, begun, ended.
REDUCES = [(50.0, 55.0, 70.0), (78.0, 78.0, 98.0)]


def span(name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": start * 1e3, "dur": (end - start) * 1e3, **more}


def mark(name: str, at: float) -> dict[str, Any]:
    return span(f"lockstep:{name}", at, at + 0.001)


def make_content(
    rank: int = 0,
    *,
    steps: int = 2,
    marks: dict[str, float] = MARKS,
    reduces: list[tuple[float, float, float]] = REDUCES,
    buckets: list[dict[str, Any]] = BUCKETS,
    world_size: int = 2,
    at: float = 10.0,
    clock: tuple[float, float] = (3.0, 40.0),
) -> dict[str, Any]:
    """A rank's trace; its steps are all alike and begin `at` milliseconds after the mark of its clock."""
    events = [mark("clock", 0.0), mark("nothing", 1.0)]
    for number in range(steps):
        zero = at + number * LENGTH
        events += [mark(name, zero + when) for name, when in marks.items()]
        events.append(span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", zero + 1, zero + 9))
        events.append(span("DistributedDataParallel.forward", zero + 12, zero + 40))
        for (asked, begun, ended), bucket in zip(reduces, buckets, strict=True):
            shape = [[bucket["bytes"] // 4]]
            events.append(span("c10d::allreduce_", zero + asked, zero + asked + 0.1, args={"Input Dims": [shape]}))
            arguments = {"Input Dims": shape, "Input type": ["float"]}
            events.append(span("gloo:all_reduce", zero + begun, zero + ended, tid=9, args=arguments))
    events.append(mark("step", at + steps * LENGTH))
    facts = {
        "trainer": "raw",
        "rank": rank,
        "world_size": world_size,
        "device": "cpu",
        "backend": "gloo",
        "arch": "resnet18",
        "batch": 4,
        "torch": "2",
        "threads": 1,
        "first_step": 6,
        "steps": steps,
        "profiled_ms": [110.0] * steps,
        "unprofiled_ms": [100.0, 102.0, 98.0],
        "clocks": [{"offset_us": 0.0 if rank == 0 else clock[0], "error_us": clock[1]}],
        "host_ns": [BASE_NS - 2000, BASE_NS + 5000],
        "parameters": sum(bucket["bytes"] for bucket in buckets) // 4,
        "buckets": buckets,
    }
    return {"baseTimeNanoseconds": BASE_NS, "traceEvents": events, "lockstep": facts}


def later(by: float) -> dict[str, float]:
    """A rank that begins backward as the first one does, and ends it later."""
    return {**MARKS, "computed": MARKS["computed"] + by}


def read(*contents: dict[str, Any]) -> list[RankTrace]:
    return [read_rank(content, zero_ns=BASE_NS) for content in contents]


def write(folder: Path, *contents: dict[str, Any]) -> Path:
    (folder / "ranks").mkdir(parents=True)
    for content in contents:
        (folder / "ranks" / f"rank-{content['lockstep']['rank']}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


# Arithmetic


def test_sets_of_times() -> None:
    assert union([Span(5, 7), Span(0, 2), Span(1, 3), Span(4, 4)]) == [Span(0, 3), Span(5, 7)]
    assert minus([Span(0, 10)], [Span(2, 3), Span(5, 12)]) == [Span(0, 2), Span(3, 5)]
    assert minus([Span(0, 1)], [Span(0, 1)]) == []
    assert total([Span(0, 2), Span(3, 5)]) == 4


def test_the_parts_of_a_step_are_the_step() -> None:
    step = analyse(read(make_content(0), make_content(1)))[0][0]
    expected = {"data": 8, "copy": 2, "buffers": 3, "forward": 24, "backward": 40, "wait": 20, "optimizer": 10}
    found = {part: round(step.parts[part] / 1e3, 6) for part in PARTS}
    assert found == {**expected, "rest": LENGTH - sum(expected.values())}
    assert sum(step.parts.values()) == pytest.approx(step.span.length)
    assert {name: round(length / 1e3, 6) for name, length in step.groups.items()} == {
        **{"forward conv1": 4, "forward layer1": 10, "forward fc": 10},
        **{"backward fc": 4, "backward layer1": 26, "backward conv1": 10},
    }
    assert step.number == 7  # counted from 1, after the 6 before


def test_hidden_is_what_backward_covers() -> None:
    """Bucket 0 is 55 to 70, within backward; bucket 1 is 78 to 98, and backward ends at 80."""
    step = analyse(read(make_content(0), make_content(1)))[0][0]
    assert (step.hidden / 1e3, step.exposed / 1e3, step.late) == (pytest.approx(17), pytest.approx(18), 0)
    assert step.bytes == 1600
    assert [len(bucket.exposed) for bucket in step.buckets] == [0, 1]
    assert step.buckets[0].ready / 1e3 == pytest.approx(10 + 50)  # asked for, and taken up 5 ms later


def test_buckets_at_the_same_time_count_once() -> None:
    """60 to 70 and 65 to 90 are 30 ms of communication, of which 20 within backward."""
    overlapping = [(60.0, 60.0, 70.0), (65.0, 65.0, 90.0)]
    step = analyse(read(make_content(0, reduces=overlapping), make_content(1, reduces=overlapping)))[0][0]
    assert (step.hidden / 1e3, step.exposed / 1e3) == (pytest.approx(20), pytest.approx(10))


def test_waiting_for_a_late_rank_is_told_from_moving() -> None:
    """Rank 1 is ready at 92: of rank 0's exposed 80 to 98 the first 12 ms move nothing."""
    slow = make_content(1, marks=later(12), reduces=[REDUCES[0], (92.0, 92.0, 98.0)])
    steps = analyse(read(make_content(0), slow))
    assert [round(s.late / 1e3, 6) for s in steps[0]] == [12, 0]
    assert [round(s.exposed / 1e3, 6) for s in steps[0]] == [18, 6]


def test_only_the_update_follows_a_reduction_of_several_batches() -> None:
    """With accumulation backward ends without an update: what comes until the next forward is the rest."""
    content = make_content(0, steps=1, world_size=1, buckets=[], reduces=[])
    first = [mark(name, 10 + when / 100) for name, when in MARKS.items() if name not in ("step", "copied")]
    content["traceEvents"] += first  # a first batch, a hundred times as fast, at the start of the step
    step = analyse(read(content))[0][0]
    assert step.parts["optimizer"] / 1e3 == pytest.approx(10)
    assert step.parts["backward"] / 1e3 == pytest.approx(40.4)


def test_clocks_of_other_hosts_are_brought_together() -> None:
    for clock, expected in (((3.0, 40.0), 10.0), ((5000.0, 40.0), 5.0)):
        assert read(make_content(1, clock=clock))[0].bounds[0] / 1e3 == pytest.approx(expected)


# Buckets


def test_buckets_are_matched_by_order_and_size() -> None:
    reduces = [Reduce(1, Span(2, 3), 8), Reduce(4, Span(5, 6), 400), Reduce(7, Span(8, 9), 1200), Reduce(8, Span(9, 9), 400)]
    assert [(k, reduce.ready) for k, reduce in match_buckets(reduces, [400, 1200], where="here")] == [(0, 4), (1, 7)]
    assert [reduce.ready for _, reduce in match_buckets(reduces, [400, 400], where="here")] == [4, 8]
    with pytest.raises(UserError, match=r"rank 1, step 7: bucket 1 of DDP holds 999 bytes(.|\n)*leave ddp_comm_hook out"):
        match_buckets(reduces, [400, 999], where="rank 1, step 7")


def test_contents_come_from_what_ddp_logs() -> None:
    parameters = [("conv1.weight", 40), ("fc.weight", 20), ("fc.bias", 4)]
    rebuilt = {"rebuilt_per_bucket_param_indices": "2 1, 0", "rebuilt_bucket_sizes": "24, 40", "bucket_sizes": "64"}
    expected = [{"bytes": 24, "names": ["fc.bias", "fc.weight"]}, {"bytes": 40, "names": ["conv1.weight"]}]
    assert bucket_contents(rebuilt, parameters) == expected
    assert bucket_contents({"bucket_sizes": "24, 40"}, parameters) == expected
    with pytest.raises(UserError, match=r"hold \[24, 41\] bytes by its own log, and \[24, 40\]"):
        bucket_contents({**rebuilt, "rebuilt_bucket_sizes": "24, 41"}, parameters)
    with pytest.raises(UserError, match="by their parameters"):
        bucket_contents({"bucket_sizes": "24"}, parameters)


# Traces that say nothing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "rank-1.json cannot be read as a trace"),
        ('{"traceEvents": [', "rank-1.json cannot be read as a trace"),
        ("[]", "rank-1.json is no trace of python -m project.trace"),
        (json.dumps({**make_content(1), "traceEvents": []}), "rank-1.json holds no event"),
        (json.dumps({"traceEvents": [1], "baseTimeNanoseconds": 1}), "rank-1.json is no trace"),
    ],
)
def test_broken_traces_are_named(text: str, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "out", make_content(0), make_content(1))
    (folder / "ranks" / "rank-1.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        read_ranks(folder / "ranks")


def test_missing_ranks_and_steps_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no rank-0.json"):
        read_ranks(tmp_path)
    folder = write(tmp_path / "out", make_content(1))
    with pytest.raises(UserError, match=r"traces of ranks \[1\], and 2 ranks were started"):
        read_ranks(folder / "ranks")
    broken = make_content(1)
    broken["traceEvents"].pop()
    with pytest.raises(UserError, match="rank 1: the trace has 1 whole steps of 2"):
        read(broken)
    with pytest.raises(UserError, match=r"hold \{0: 2, 1: 1\} steps"):
        analyse(read(make_content(0), make_content(1, steps=1)))
    with pytest.raises(UserError, match="There is no trace"):
        analyse([])
    without = make_content(0, marks={name: when for name, when in MARKS.items() if "backward" not in name})
    with pytest.raises(UserError, match="rank 0: step 0 of the trace has no forward or no backward"):
        read(without)
    other = make_content(1, buckets=[BUCKETS[1], BUCKETS[0]])
    with pytest.raises(UserError, match="buckets of other sizes"):
        analyse(read(make_content(0), other))


# GPU: times of kernels


def on_gpu(content: dict[str, Any]) -> dict[str, Any]:
    """The same step on a device that is 30 ms behind its host, with NCCL on a stream of its own."""
    events = [event for event in content["traceEvents"] if "all_reduce" not in event["name"] and "allreduce" not in event["name"]]
    number = 0

    def kernel(asked: float, start: float, end: float, name: str = "gemm", cat: str = "kernel", **more: Any) -> None:
        nonlocal number
        number += 1
        events.append(span("cudaLaunchKernel", asked, asked + 0.01, cat="cuda_runtime", args={"correlation": number}))
        events.append(span(name, start, end, cat=cat, pid=0, tid=20, args={"correlation": number, **more}))

    nccl = {"Collective name": "allreduce", "dtype": "Float"}
    for step in range(content["lockstep"]["steps"]):
        zero = 10.0 + step * LENGTH
        kernel(zero + 11, zero + 35, zero + 37, "Memcpy HtoD", "gpu_memcpy")
        kernel(zero + 17, zero + 46, zero + 50)  # forward conv1
        kernel(zero + 21, zero + 50, zero + 60)  # forward layer1
        kernel(zero + 31, zero + 60, zero + 70)  # forward fc
        kernel(zero + 41, zero + 70, zero + 74)  # backward fc
        kernel(zero + 45, zero + 74, zero + 90)  # backward layer1
        kernel(zero + 71, zero + 90, zero + 100)  # backward conv1
        for (asked, begun, ended), bucket in zip([(50, 80, 95), (79, 101, 118)], BUCKETS, strict=True):
            kernel(
                zero + asked,
                zero + begun,
                zero + ended,
                "ncclDevKernel_AllReduce_Sum_f32",
                **nccl,
                **{"In msg nelems": bucket["bytes"] // 4},
            )
        kernel(zero + 101, zero + 119, zero + 129)  # the update
    content["traceEvents"] = events
    return content


def test_gpu_times_are_those_of_kernels() -> None:
    step: Step = analyse(read(on_gpu(make_content(0)), on_gpu(make_content(1))))[1][0]
    found = {part: round(length / 1e3, 6) for part, length in step.parts.items()}
    # From the end of one update, 129, to that of the next; backward is 70 to 100, AllReduce 80 to 95 and 101 to 118
    assert step.span.length / 1e3 == pytest.approx(LENGTH)
    expected = {"copy": 2, "forward": 24, "backward": 30, "wait": 18, "optimizer": 10, "buffers": 0}
    assert {part: found[part] for part in expected} == expected
    assert found["data"] == 0  # the host waits 1 to 9, while the device still makes the update before, to 19
    assert (step.hidden / 1e3, step.exposed / 1e3) == (pytest.approx(15), pytest.approx(17))
    assert step.bytes == 1600


# Figures and what follows from them


def make_summary(*contents: dict[str, Any]) -> Summary:
    ranks = read(*contents)
    return summarise(ranks, analyse(ranks))


def test_the_slowest_rank_and_the_figures() -> None:
    slow = make_content(1, marks=later(12), reduces=[REDUCES[0], (92.0, 92.0, 98.0)])
    summary = make_summary(make_content(0), slow)
    assert (summary.slowest, summary.slowest_in) == (1, 2)
    assert summary.behind == pytest.approx(12)
    assert summary.step == {0: pytest.approx(110), 1: pytest.approx(110)}
    assert summary.overhead["share"] == pytest.approx(0.1)
    assert (summary.bytes, summary.parameters) == (1600, 400)
    assert summary.buckets[0]["queued_ms"] == pytest.approx(5)
    assert summary.resolution_us == pytest.approx(1)
    assert summary.profiler_clock_us == pytest.approx(5)
    assert summary.finding.startswith(
        "The other ranks wait 12.0 ms (11 % of the step) for rank 1, whose backward takes 12.0 ms longer"
    )


def change(part: str, ms: float, *, rank: int = 0, **communication: float) -> str:
    """The sentence for a step of 100 ms on two ranks in which one part is changed."""
    parts = {k: {**dict.fromkeys(PARTS, 0.0), "forward": 35.0, "backward": 60.0} for k in (0, 1)}
    parts[rank][part] = ms
    moved = {k: {"hidden": 10.0, "exposed": 0.0, "late": 0.0, **communication} for k in (0, 1)}
    return find(parts, moved, {0: 100.0, 1: 100.0}, slowest=0, always=True)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("data", "Data wait on rank 0, 20.0 ms (20 % of the step): give the loader more processes (--data.num_workers)"),
        ("copy", "Copy, normalise on rank 0"),
        ("buffers", "Buffers, broadcast on rank 0"),
        ("optimizer", "Optimizer on rank 0"),
        ("rest", "Rest on rank 0"),
    ],
)
def test_the_largest_part_is_named(part: str, words: str) -> None:
    assert change(part, 20.0).startswith(words)


def test_what_to_change_between_the_ranks() -> None:
    assert "Nothing between the ranks: forward and backward are 95 % of the step" in change("data", 4.9)
    assert change("data", 8.0, exposed=9.0).startswith("AllReduce outside of backward on rank 0, 9.0 ms")
    assert change("data", 8.0, exposed=9.0, late=9.0).startswith(
        "The other ranks wait 9.0 ms (9 % of the step) for rank 0, whose data"
    )
    assert change("data", 8.0, rank=1).startswith("Nothing")  # the slowest rank's parts count
    parts = {k: dict.fromkeys(PARTS, 0.0) for k in (0, 1)}
    moved = {k: {"hidden": 0.0, "exposed": 9.0, "late": 9.0} for k in (0, 1)}
    assert "not always for the same one" in find(parts, moved, {0: 100.0, 1: 100.0}, slowest=0, always=False)


@pytest.mark.parametrize("world_size", [1, 2, 12])
def test_it_fits_into_80_columns(world_size: int) -> None:
    own: dict[str, Any] = {"world_size": world_size} | ({"buckets": [], "reduces": []} if world_size == 1 else {})
    found = lines(make_summary(*(make_content(rank, **own) for rank in range(world_size))))
    assert max(map(len, found)) <= 80
    assert ("12 ranks, of which 6 are shown" in "\n".join(found)) == (world_size == 12)
    assert any(line.startswith("reduced") for line in found) == (world_size > 1)


def test_of_many_ranks_the_slowest_is_shown() -> None:
    summary = make_summary(*(make_content(rank, world_size=8) for rank in range(8)))
    assert shown_ranks(replace(summary, slowest=2)) == [0, 1, 2, 3, 4, 5]
    assert shown_ranks(replace(summary, slowest=7)) == [0, 1, 2, 3, 4, 7]


# Files


def test_one_trace_holds_all_ranks() -> None:
    contents = [make_content(0), make_content(1)]
    merged = merge(contents, analyse(read(*contents)), zero_ns=BASE_NS)
    named = {event["pid"] for event in merged["traceEvents"] if event["name"].startswith("bucket")}
    assert named == {0, 100}
    reduced = [event for event in merged["traceEvents"] if event["name"] == "bucket 1"]
    assert reduced[0]["args"] == {"bytes": 1200, "parameters": ["conv1.weight"]}
    # Perfetto draws no events that overlap without one being inside the other
    for pid in named:
        for lane in (1, 2, 3):
            spans = sorted(
                (e["ts"], -e["dur"]) for e in merged["traceEvents"] if (e["pid"], e.get("tid")) == (pid, lane) and e["ph"] == "X"
            )
            ends: list[float] = []
            for start, length in spans:
                ends = [end for end in ends if end > start + 1e-3]
                assert all(start - length <= end + 1e-3 for end in ends)
                ends.append(start - length)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("a larger --data.global_batch_size.", ["--data.global_batch_size"]),
        ("give --trainer.precision bf16-mixed, or less", ["--trainer.precision bf16-mixed"]),
        ("more of --data.num_workers on <rank 0>", ["--data.num_workers"]),
        ("nothing to change.", []),
    ],
)
def test_flags_in_a_sentence(text: str, flags: list[str]) -> None:
    html = marked(text)
    assert re.findall('<code class="flag">(.*?)</code>', html) == flags
    assert "<rank" not in html


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", make_content(0), make_content(1))
    hostile = "</script><b>"
    write_all(folder, command=f"python -m project.trace {hostile}")
    page = (folder / "timeline.html").read_text(encoding="utf-8")
    assert hostile not in page
    assert not re.findall(r'(?:src|href)\s*=|@import|url\(["\']?http', page)
    [drawn] = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', page)
    trace = json.loads(drawn)
    assert [rank["rank"] for rank in trace["ranks"]] == [0, 1]
    assert trace["ranks"][0]["buckets"][1]["exposed"] == [[80.0, 98.0]]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    for step in summary["each_step"]:
        for own in step:
            assert sum(own["parts"].values()) == pytest.approx(own["length"])


# The command line


def test_flags() -> None:
    own, others = parse(["--steps", "3", "--impl", "raw", "--model.lr", "1"])
    assert (own.steps, own.impl, others) == (3, "raw", ["--devices", "2", "--model.lr", "1"])
    assert parse(["--devices=4"])[1] == ["--devices=4"]
    for arguments, words in (
        (["--steps", "0"], "--steps 0: give 1 to 100"),
        (["--impl", "jax"], "invalid choice: 'jax'"),
        (["--timeout", "0"], "--timeout 0: give a number"),
        (["--max_epochs", "3"], "--max_epochs: --steps says"),
        (["--model.warmup_epochs", "2"], "--model.warmup_epochs: a trace is too short"),
        (["--trainer.max_steps=3"], "--trainer.max_steps: --steps says"),
        (["--record", "x"], "--record: recording would be timed"),
    ):
        with pytest.raises(UserError, match=words):
            parse(arguments)


def test_what_a_trace_sets_itself_is_refused_by_name() -> None:
    assert QUIET.keys() <= FIXED.keys()


def test_the_steps_that_are_traced_lie_between_others() -> None:
    plan = Plan(5)
    assert (plan.first, plan.last, plan.total) == (WARM_UP + 3, WARM_UP + 8, WARM_UP + 11)
    assert replace(plan, steps=1).total == WARM_UP + 3


# Whole runs

SHORT = [*SMALL, "--data.num_workers", "0", "--data.global_batch_size", "16", "--accelerator", "cpu", "--steps", "2"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def check_run(finished: Finished, out: Path, *, impl: str) -> dict[str, Any]:
    """What holds of each trace of two ranks."""
    assert finished.code == 0, finished.out + finished.err
    assert max(len(line) for line in finished.out.splitlines() if str(out) not in line) <= 80
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["facts"]["trainer"] == impl
    assert summary["bytes"] == 4 * summary["parameters"] == sum(bucket["bytes"] for bucket in summary["buckets"])
    assert len({name for bucket in summary["buckets"] for name in bucket["names"]}) == 62  # resnet18's tensors
    assert [own["rank"] for own in summary["each_step"][0]] == [0, 1]
    for step in summary["each_step"]:
        for own in step:
            assert sum(own["parts"].values()) == pytest.approx(own["length"])
            assert min(own["parts"].values()) >= 0
            assert own["bytes"] == summary["bytes"]
            assert own["hidden"] + own["exposed"] > 0
            # It is waited for; or the thread stands between two operations, for as long as a busy machine keeps it there.
            assert own["exposed"] <= own["parts"]["wait"] + own["parts"]["rest"]
            assert set(own["groups"]) == {f"{part} {name}" for part in ("forward", "backward") for name in GROUPS}
    apart = [own["exposed"] - own["parts"]["wait"] for step in summary["each_step"] for own in step]
    assert min(apart) <= 1000  # us: where nothing keeps it, all of it is waited for
    merged = json.loads((out / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in merged if event["ph"] == "X")
    assert {event["pid"] // 100 for event in merged} == {0, 1}
    return summary


GROUPS = ("conv1", "layer1", "layer2", "layer3", "layer4", "fc")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Finished, Path]]:
    done: dict[str, tuple[Finished, Path]] = {}

    def run(impl: str) -> tuple[Finished, Path]:
        if impl not in done:
            out = tmp_path_factory.mktemp(impl) / "out"
            done[impl] = run_module("project.trace", *SHORT, "--impl", impl, "--out", out, timeout=200), out
        return done[impl]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["lightning", "raw"])
def test_both_trainers_are_traced(impl: str, traced: Callable[[str], tuple[Finished, Path]]) -> None:
    check_run(*traced(impl), impl=impl)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_draws_the_timeline(traced: Callable[[str], tuple[Finished, Path]], tmp_path: Path) -> None:
    _, out = traced("raw")
    shot = tmp_path / "shot.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,900"]
    command += ["--blink-settings=preferredColorScheme=1", f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}"]
    subprocess.run([*command, (out / "timeline.html").as_uri()], capture_output=True, timeout=100, check=True)
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    # forward, backward, hidden buckets and the optimizer are there, and more of them than a legend's key has
    for colour in ((0x56, 0xB4, 0xE9), (0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73), (0xCC, 0x79, 0xA7)):
        assert (abs(pixels - colour).sum(axis=2) < 12).sum() > 600, colour


@pytest.mark.slow
def test_what_the_trainer_refuses_is_said_last(tmp_path: Path) -> None:
    finished = run_module("project.trace", *SHORT, "--model.compile", "true", "--impl", "raw", "--out", tmp_path / "out")
    assert finished.code == 2
    assert "The raw trainer ended with exit code 2. Its own message:" in finished.err
    assert finished.err.splitlines()[-1].startswith("error: --model.compile true: a compiled network has no layers")
    assert "Traceback" not in finished.err


@pytest.mark.gpu
@pytest.mark.slow
def test_on_gpus(tmp_path: Path) -> None:
    """NCCL's kernels carry the buckets; needs two GPUs to reduce anything."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flags = [flag for flag in SHORT if flag not in ("--accelerator", "cpu")]
    finished = run_module("project.trace", *flags, "--out", tmp_path / "out", timeout=280)
    summary = check_run(finished, tmp_path / "out", impl="lightning")
    assert summary["facts"]["backend"] == "nccl"
