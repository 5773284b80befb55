"""`bench start`: seconds from the command to the first step, and where they go; and those of an index of many files."""

import json
import sys
import tempfile
import time
from pathlib import Path

from project.data.index_cache import cached_index, load_index
from project.measure.bench.machine import describe
from project.measure.bench.results import Results, Table, median, ratio
from project.measure.bench.staged_start import STAMPS
from project.runtime.errors import UserError
from project.runtime.launched import python_module
from project.runtime.progress import Bar
from project.subprocesses.clean_process import last_lines, run_to_end

IMPORTS = "import torch, lightning, torchvision"
PARTS = {"imports": "imported", "index, checks": "launched", "ranks: imports": "rank imported"}
PARTS |= {"ranks: set up, first batch": "first batch", "first step": "first step"}
LIMIT_S = 600.0


def bench_start(*, devices: int, rounds: int, files: int) -> Results:
    """The real commands on the digits, up to their first step, and Python with the same imports alone, in turns.

    Args:
        devices: Ranks, 2 or more.
        rounds: That count; one before them warms the page cache.
        files: Images of the index that is made, read, and read again.
    """
    if devices < 2:
        raise UserError(f"--devices {devices}: with one rank nothing is launched; give 2 or more.")
    commands = {"Lightning trainer": "project.fit", "raw trainer": "project.fit_raw"}
    totals: dict[str, list[float]] = {name: [] for name in ("imports alone", *commands)}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    bar = Bar(lines=True)
    bar.open("measuring", rounds + 1)
    for number in range(rounds + 1):
        bar.advance(number, "imports alone")
        totals["imports alone"].append(_imports())
        for name, command in commands.items():
            bar.advance(number, name)
            parts[name].append(_until_first_step(command, devices))
            totals[name].append(sum(parts[name][-1].values()))
    first, second = _index(files, bar)
    bar.close()
    title = f"from the command to the first step, {devices} ranks, median of {rounds} rounds"
    results = Results(title, describe(), "seconds", {name: values[1:] for name, values in totals.items()})
    summary = Table(("seconds", "median", "of imports alone"))
    for name, values in results.samples.items():
        times = ratio(values, results.samples["imports alone"])
        summary.rows.append((name, f"{median(values):.1f}", f"{times:.2f}"))
        results.values[name] = {"seconds": median(values), "of_imports": times}
    where = Table(("seconds", *commands))
    for part in PARTS:
        where.rows.append((part, *(f"{median([split[part] for split in parts[name][1:]]):.1f}" for name in commands)))
    results.tables = [summary, where]
    results.values["index"] = {"files": files, "first_s": first, "second_s": second}
    results.notes = [
        f"Imports alone: python -c '{IMPORTS}'.",
        f"An index of {files:,} files: {first:.2f} s when first read, {second:.2f} s from then on.",
    ]
    return results


def _imports() -> float:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        began = time.monotonic()
        code = run_to_end([sys.executable, "-c", IMPORTS], Path(name) / "output.txt", timeout=LIMIT_S)
        _check(f"python -c '{IMPORTS}'", code, Path(name))
        return time.monotonic() - began


def _until_first_step(command: str, devices: int) -> dict[str, float]:
    """Seconds of each part."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        stamps, output = Path(name) / "stamps.jsonl", Path(name) / "output.txt"
        flags = ["--devices", str(devices), "--trainer.default_root_dir", name]
        began = time.time()
        staged = [*python_module("project.measure.bench.staged_start"), command, *flags]
        code = run_to_end(staged, output, timeout=LIMIT_S, **{STAMPS: str(stamps)})
        rows = [json.loads(line) for line in stamps.read_text(encoding="utf-8").splitlines()] if stamps.is_file() else []
        at = {row["what"]: row["time"] for row in reversed(rows) if row["rank"] in (0, None)}
        _check(command, code, Path(name), complete=set(PARTS.values()) <= set(at))
    spent = {}
    for part, what in PARTS.items():
        spent[part], began = at[what] - began, at[what]
    return spent


def _check(command: str, code: int | None, folder: Path, *, complete: bool = True) -> None:
    """What a command has printed says why it came to no first step.

    Raises:
        UserError: it failed, took too long, or lacks a part.
    """
    if code is None:
        raise UserError(f"{command} took more than {LIMIT_S:.0f} s. Its output:\n{last_lines(folder)}")
    if code or not complete:
        raise UserError(f"{command} ended with exit code {code} before its first step. Its own message:\n{last_lines(folder)}")


def _index(files: int, bar: Bar) -> tuple[float, float]:
    """Seconds to read an index of so many files for the first time, and again."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        bar.open("making files", files)
        for number in range(files):
            if number % 1000 == 0:
                (Path(name) / f"class-{number // 1000}").mkdir()
                bar.advance(number, "")
            (Path(name) / f"class-{number // 1000}" / f"{number}.jpg").touch()
        time.sleep(2.5)  # a folder that changed within two seconds is read again
        times = []
        for _ in range(2):
            began = time.monotonic()
            load_index(Path(name))
            times.append(time.monotonic() - began)
        cached_index(Path(name)).unlink()
    return times[0], times[1]
