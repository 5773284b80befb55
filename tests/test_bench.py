"""The benchmarks: what they make of measured values, and real runs of each, short."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from project.bench import main, parse
from project.measure.bench import time_to_first_step
from project.measure.bench.machine import describe, matrix_peak
from project.measure.bench.paced_training import Count
from project.measure.bench.results import Results, Table, lines, ratio, save_chart, save_json, spread
from project.runtime.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]


def bench(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "project.bench", *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        cwd=REPOSITORY,
        start_new_session=True,
    )


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was half as fast in the second round: the median of all values would say 1.5."""
    assert ratio([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]) == 2.0
    assert ratio([2.0, 2.0, 2.0], [1.0, 2.0, 4.0]) == 1.0
    assert spread([1.0, 1.0, 1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(0.25)  # quartiles 1.5 and 2.5 around 2
    assert spread([5.0]) == 0.0


def test_reads_and_collectives_are_counted() -> None:
    with Count() as counted:
        value = torch.ones(3).sum()
        assert value.item() == 3.0
        if value > 2:  # a read as well
            nn.Linear(3, 1)(torch.ones(3))
    assert (counted.reads, counted.collectives) == (2, 0)


def test_table_json_and_chart(tmp_path: Path) -> None:
    results = Results("a title", describe(), "ms", {"one": [1.0, 2.0], "two": [3.0, 4.0]}, values={"more": 1})
    results.tables = [Table(("", "ms"), [("one", "1.5"), ("two", "13.5")])]
    results.notes = ["word " * 40]
    printed = lines(results)
    assert printed[3:6] == ["      ms", "one  1.5", "two 13.5"] or printed[3:6] == ["       ms", "one   1.5", "two  13.5"]
    assert all(len(line) <= 80 for line in printed if line not in printed[:2])
    save_json(results, tmp_path / "new" / "results.json")
    content = json.loads((tmp_path / "new" / "results.json").read_text(encoding="utf-8"))
    assert content["samples"] == results.samples
    assert {"torch", "lightning", "device"} <= content["machine"].keys()
    save_chart(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000
    save_chart(results, tmp_path / "chart.svg")
    assert "<svg" in (tmp_path / "chart.svg").read_text(encoding="utf-8")


def test_a_matrix_product_has_a_speed() -> None:
    slow, fast = (matrix_peak(torch.float64, size=size, seconds=0.05) for size in (8, 512))
    assert 0 < slow < fast


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--rounds", "0"], "--rounds 0: give 1 or more"),
        (["step", "--batch", "-1"], "--batch -1: give 1 or more"),
        (["step", "--chart", "step.xyz"], "--chart step.xyz: give a name that ends with .png, .svg or .pdf"),
        (["step", "--json", "/etc/hostname/step.json"], "--json /etc/hostname/step.json cannot be written"),
        (["step", "--json", "/"], "--json / cannot be written"),
        (["data", "--data.root", "digits", "--quality", "101"], "--quality 101: give 100 or less"),
        (["memory", "--entries", "1000"], "--entries 1000: give 4,096 or more"),
        (["memory", "--rounds", "2"], "unrecognized arguments: --rounds 2"),
        (["start", "--devices", "1"], "--devices 1: with one rank nothing is launched"),
        (["data"], "--data.root"),
        (["nonsense"], "invalid choice"),
    ],
)
def test_refusals(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(UserError, match=message):
        main()
    assert parse(["step"]).size == 224


@pytest.mark.slow
def test_bench_step_paces_both_trainers_on_two_ranks(tmp_path: Path) -> None:
    done = bench("step", "--tiny", "--devices", "2", "--rounds", "2", "--json", str(tmp_path / "step.json"))
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    found = content["values"]["contestants"]
    assert list(found) == ["bare loop", "raw trainer", "Lightning trainer"]
    for measured in found.values():
        parts = measured["parts_ms"]
        assert set(parts) == {"data wait", "forward", "backward", "reduction", "optimizer", "rest"}
        assert all(value >= 0 for value in parts.values())
        assert 0.5 < sum(parts.values()) / measured["ms"] < 1.5  # medians of parts, and of the whole
        assert measured["collectives"] >= 1  # one bucket
        assert measured["flops"] == found["bare loop"]["flops"] > 0
    assert found["raw trainer"]["reads"] == found["bare loop"]["reads"] == 0
    assert all(len(values) == 2 for values in content["samples"].values())
    assert "bare loop" in done.stdout


@pytest.mark.slow
def test_a_contestant_that_cannot_start_is_reported(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / "digits-1" / part).mkdir(parents=True)  # without an image
    environment = {**os.environ, "LOCKSTEP_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "project.bench", "step", "--tiny", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, cwd=REPOSITORY, env=environment)
    assert done.returncode == 2
    assert "raw trainer ended with exit code" in done.stderr
    assert f"{tmp_path}/digits-1/train is empty" in done.stderr


@pytest.mark.slow
def test_bench_data_beats_the_classic_path(photograph_folder: Path, tmp_path: Path) -> None:
    root = str(photograph_folder)
    done = bench("data", "--data.root", root, "--images", "40", "--rounds", "3", "--json", str(tmp_path / "data.json"))
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))["values"]
    assert values["ours, original files"]["of_classic"] > 1.6  # about 2
    assert values["ours, prepared folder"]["of_classic"] > 3.5  # about 5


@pytest.mark.slow
def test_the_memory_of_loader_processes_is_flat(tmp_path: Path) -> None:
    done = bench("memory", "--entries", "20000", "--json", str(tmp_path / "memory.json"))
    assert done.returncode == 0, done.stderr
    assert abs(json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))["values"]["growth"]) < 0.05


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bench_step_on_a_gpu(tmp_path: Path) -> None:
    done = bench("step", "--batch", "64", "--rounds", "3", "--json", str(tmp_path / "step.json"), timeout=500)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["values"]["peak_flops"]["bfloat16"] > 1e13


def test_a_start_that_takes_too_long_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_to_first_step, "LIMIT_S", 0.01)
    with pytest.raises(UserError, match=r"^python -c '.*' took more than 0 s\. Its output:\n$"):
        time_to_first_step.bench_start(devices=2, rounds=1, files=1)
