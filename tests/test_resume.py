"""A training that is interrupted anywhere and goes on ends with the bits of one that was not."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import project.lit.run
import project.raw.run
from project.model.checkpoint_file import RECORD, extract_state_dict
from project.ranks.agreement import STOP, Agreement
from tests.conftest import REPOSITORY, SMALL, run_jobs, run_module, write_images

FIT = {"project.fit": project.lit.run.fit, "project.fit_raw": project.raw.run.fit}

# 22 images in 6 batches of 4 and 2, in windows of 2: 3 steps an epoch, the last one over what is left. 7 validation images.
RUN = [
    *(*SMALL, "--config", str(REPOSITORY / "configs/digits.yaml"), "--max_epochs", "2", "--data.drop_last", "false"),
    *("--data.global_batch_size", "8", "--trainer.accumulate_grad_batches", "2", "--data.train_size", "32"),
    *("--data.val_resize", "32", "--data.val_size", "32", "--data.num_workers", "0"),
    *("--model.ema_decay", "0.9", "--data.mixup_alpha", "0.2", "--model.warmup_epochs", "1"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "data"
    for part, count in (("train", 11), ("val", 4)):
        for k, label in enumerate(("ant", "bee")):
            write_images(folder / part / label, count - k * (part == "val"), shade=30 + 60 * k)
    return folder


def what_counts(folder: Path) -> dict[str, Any]:
    """Of the newest run's last.ckpt: all that a training has changed, but for the speeds in its rows."""
    newest = max((folder / "runs").glob("*/checkpoints/last.ckpt"), key=lambda path: int(path.parts[-3]))
    content = torch.load(newest, map_location="cpu", weights_only=True)
    record = content[RECORD]
    kept = {name: record[name] for name in ("epoch", "step", "batches", "complete", "optimizer", "schedule", "ema", "metrics")}
    validations = [row for row in record["history"] if "val/top1" in row]
    return {**kept, "state_dict": extract_state_dict(content, path=str(newest), flag=""), "validations": validations}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(scope="module", params=list(FIT))
def module(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def uninterrupted(module: str, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole")
    assert FIT[module]([*RUN, "--devices", "1", "--data.root", str(data), "--trainer.default_root_dir", str(out)]) == 0
    return what_counts(out)


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """From the next training on, act as if a signal had come before its n-th question; who asks is kept."""
    answer, asked, at, asks = Agreement.answer, [], [0], [("", 0)]

    def counting(self: Agreement) -> str:
        asked.append(asks[0])
        return STOP if len(asked) == at[0] else answer(self)

    def interrupt(n: int) -> list[Any]:
        asked.clear()
        at[0] = n
        return asked

    def named(name: str) -> Callable[..., str]:
        question = getattr(Agreement, name)

        def ask(self: Agreement, *given: int) -> str:
            asks[0] = name, *given
            return question(self, *given)

        return ask

    monkeypatch.setattr(Agreement, "answer", counting)
    for name in ("after_step", "after_validation_batch", "after_validation_batches"):
        monkeypatch.setattr(Agreement, name, named(name))
    return interrupt


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_at_every_boundary(
    module: str,
    data: Path,
    uninterrupted: dict[str, Any],
    interrupt_at: Callable[[int], list[Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Steps 1 and 3 of the first epoch; its validation's first batch and end; the last step, inside that validation; none."""
    fit, places = FIT[module], {}
    for n in (1, 3, 4, 6, 9, 11, 13):
        out = tmp_path / str(n)
        arguments = [*RUN, "--devices", "1", "--data.root", str(data), "--trainer.default_root_dir", str(out)]
        asked = interrupt_at(n)
        code = fit(arguments)
        if n == 13:
            assert code == 0
            break
        assert code == 128 + signal.SIGTERM
        places[n] = asked[-1]
        if n == 4:  # and in the validation that goes on, before any step
            interrupt_at(1)
            capsys.readouterr()
            assert fit([*arguments, "--ckpt_path", "last"]) == 128 + signal.SIGTERM
            assert "goes on after step 3: " in capsys.readouterr().err
        interrupt_at(0)
        assert fit([*arguments, "--ckpt_path", "last"]) == 0
        assert_equal(what_counts(out), uninterrupted)
        shutil.rmtree(out)
    assert [n for n, (place, *number) in places.items() if place == "after_validation_batch" and number != [0]] == [11]
    assert places[4] == ("after_validation_batch", 0)  # a boundary that all come to


def start(module: str, *arguments: str | Path) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    # A shell starts what it runs in the background with SIGINT ignored, which children inherit.
    return subprocess.Popen(
        command, cwd=REPOSITORY, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), start_new_session=True, **pipes
    )


def wait_for(path: Callable[[], bool], process: subprocess.Popen[str], *, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not path():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a launcher has started, in the order of their ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    ranks = {}
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        ranks.update({int(entry[5:]): int(child) for entry in environment if entry.startswith("RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def alive(group: int) -> bool:
    """Whether a process of this group runs; one that has ended may still have to be waited for."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


# Without an average and AdamW's second moment, whose checkpoints are twice as large
LONG = [
    *("--model.ema_decay", "null", "--model.optimizer", "sgd", "--devices", "2", "--max_epochs", "8"),
    *("--data.drop_last", "true", "--checkpoint.every_steps", "2"),
]


# Rank 0 goes into its first forward, which waits for rank 1's; this one has made its buffers equal and gets a signal now.
AHEAD = """
import os, signal, time
import {module}
from {wing}.run import fit
from project.ranks.agreement import Agreement
from project.runtime.process import run_command

begins, step, trained = {module}.{begins}, Agreement.after_step, []

def after_step(self, number):
    trained.append(number)
    return step(self, number)

def validation_begins(*arguments, **more):
    begins(*arguments, **more)
    if os.environ["RANK"] == "1" and 3 in trained:
        trained.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)

Agreement.after_step, {module}.{begins} = after_step, validation_begins
run_command(lambda: fit({arguments}))
"""
BEGINS = {
    "project.lit": {"module": "project.lit.checkpoint", "begins": "EqualBuffers.on_validation_start"},
    "project.raw": {"module": "project.raw.trainer", "begins": "equal_buffers"},
}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_signal_between_the_first_forwards_of_a_validation_stops_both(data: Path, tmp_path: Path) -> None:
    """DDP sends buffers in a validation's first forward: a rank that stopped before it took them for the checkpoint's."""
    jobs = []
    for wing, begin in BEGINS.items():
        arguments = [*RUN, *LONG, "--data.root", str(data), "--trainer.default_root_dir", str(tmp_path / wing)]
        text = AHEAD.format(wing=wing, arguments=arguments, **begin)
        jobs.append({"name": wing, "text": text, "env": {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}})
    for wing, result in run_jobs(tmp_path, jobs).items():
        assert result.codes == [128 + signal.SIGTERM] * 2, result.out
        assert "ended by SIGTERM; --ckpt_path last goes on after step 3" in result.out[0], result.out
        assert (tmp_path / wing / "runs/0/checkpoints/last.ckpt").is_file()


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On two ranks, by the raw trainer: Lightning's must end with the same bits."""
    out = tmp_path_factory.mktemp("undisturbed")
    finished = run_module("project.fit_raw", *RUN, *LONG, "--data.root", data, "--trainer.default_root_dir", out, timeout=150)
    assert finished.code == 0, finished.err
    return what_counts(out)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("whole", ["project.fit", "project.fit_raw"])
def test_ends_and_exact_resume_on_two_ranks(whole: str, data: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """SIGTERM to the launcher, SIGINT to one rank, SIGKILL of one: codes, last lines, no process left, and then the same bits."""
    out = tmp_path / "out"
    arguments = [*RUN, *LONG, "--data.root", data, "--trainer.default_root_dir", out, "--data.num_workers", 1]
    killed = {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": 137}
    for number, (name, code) in enumerate(killed.items()):
        process = start(whole, *arguments, *(["--ckpt_path", "last"] if number else []))
        try:
            wait_for((out / f"runs/{number}/checkpoints/last.ckpt").is_file, process)
            ranks = ranks_of(process)
            os.kill(process.pid if name == "SIGTERM" else ranks[1], getattr(signal, name))
            began = time.monotonic()
            _, err = process.communicate(timeout=60)
            seconds = time.monotonic() - began
        finally:
            process.kill()
        assert process.returncode == code, err
        assert seconds < 15
        assert not any(alive(rank) for rank in ranks)
        last = err.splitlines()[-1]
        if name == "SIGKILL":
            assert last.startswith("error: rank 1 was ended by SIGKILL"), err
        else:
            assert last.startswith(f"ended by {name}; --ckpt_path last goes on after step "), err
            assert "Traceback" not in err
    finished = run_module(whole, *arguments, "--ckpt_path", "last", timeout=150)
    assert finished.code == 0, finished.err
    assert "goes on after step " in finished.out
    assert_equal(what_counts(out), undisturbed)
    if whole == "project.fit":
        return  # what follows is decided by what both share
    fewer = [*arguments, "--devices", "1", "--max_epochs", "9", "--model.lr", "0.002"]
    finished = run_module(whole, *fewer, "--ckpt_path", "last")
    assert finished.code == 0, finished.err
    assert "note  2 -> 1 rank: each step takes the same images" in finished.out
    assert "note  changed since then, and this run's value counts: --model.lr 0.001 -> 0.002" in finished.out
    again = run_module(whole, *fewer, "--ckpt_path", "last")
    assert again.code == 0
    assert "there is nothing left to train" in again.err
    assert len(list((out / "runs").iterdir())) == 5
