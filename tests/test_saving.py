"""Checkpoints survive what happens while they are written; SLURM's requeue works as Lightning has it."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, SMALL

KILLED_WHILE_SAVING = """
import os, random, resource, signal, sys, time
from pathlib import Path
import torch
from project.model.checkpoint_file import write_atomic
from project.runtime.errors import WriteError

torch.set_num_threads(1)  # a child of fork has no other threads
path, chosen = Path(sys.argv[1]), random.Random(1)
write_atomic({"number": 0, "tensor": torch.zeros(500_000)}, path)
seen = set()
for attempt in range(200):
    if attempt >= 40 and len(seen) > 10:
        break
    child = os.fork()
    if not child:
        for number in range(1, 10_000):
            write_atomic({"number": number, "tensor": torch.full((500_000,), float(number))}, path)
    time.sleep(chosen.uniform(0.005, 0.1) * (1 + attempt / 20))  # longer and longer, for a machine that is slow today
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    content = torch.load(path, weights_only=True)
    assert (content["tensor"] == content["number"]).all()
    seen.add(content["number"])
left = len(list(path.parent.iterdir())) - 1

resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, -1))
try:
    write_atomic({"number": -1, "tensor": torch.zeros(500_000)}, path)
except WriteError as error:
    print(error)
torch.load(path, weights_only=True)
print(len(seen), left, len(list(path.parent.iterdir())))
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_or_meets_a_full_disk_leaves_the_file_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path / "last.ckpt")]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr
    message, counts = done.stdout.splitlines()
    assert message == f"cannot write {tmp_path / 'last.ckpt'}: File too large; the file that was there before is whole"
    different, left_by_killed, at_the_end = map(int, counts.split())
    assert different > 10  # the kills came at different moments
    assert left_by_killed <= 1  # the next writer removes what one has left
    assert at_the_end == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", ["project.fit", "project.fit_raw"])
def test_a_full_disk_ends_the_run_with_the_path(module: str, make_data: Callable[..., Path], tmp_path: Path) -> None:
    arguments = [*SMALL, "--config", "configs/digits.yaml", "--data.root", make_data(train=24, val=6), "--max_epochs", "2"]
    arguments += ["--data.global_batch_size", "8", "--data.num_workers", "0", "--trainer.default_root_dir", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        cwd=REPOSITORY,
        timeout=90,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, -1)),
    )
    assert done.returncode == 1
    best = tmp_path / "out/runs/0/checkpoints/best.ckpt"
    assert done.stderr.splitlines()[-1] == f"error: cannot write {best}: File too large"
    assert "Traceback" not in done.stderr
    assert list(best.parent.iterdir()) == []


@pytest.mark.slow
def test_lightnings_requeue_under_slurm(make_data: Callable[..., Path], tmp_path: Path) -> None:
    """SIGUSR1 saves and asks for a requeue; SIGTERM then ends as everywhere."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n', encoding="utf-8")
    scontrol.chmod(0o755)
    slurm = {"JOB_ID": "7", "STEP_ID": "0", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "NNODES": "1"}
    slurm |= {"JOB_NAME": "train", "NODELIST": "localhost", "JOB_NODELIST": "localhost"}
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}}
    environment["PATH"] = f"{scontrol.parent}:{environment['PATH']}"
    arguments = [*SMALL, "--config", "configs/digits.yaml", "--data.root", make_data(train=24, val=6), "--max_epochs", "500"]
    arguments += ["--data.global_batch_size", "8", "--data.num_workers", "0", "--trainer.default_root_dir", tmp_path]
    command = [sys.executable, "-m", "project.fit", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8"
    )
    try:
        for number, waits_for in (
            (signal.SIGUSR1, tmp_path / "runs/0/checkpoints/last.ckpt"),
            (signal.SIGTERM, tmp_path / "asked"),
        ):
            deadline = time.monotonic() + 60
            while not waits_for.is_file():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "requeue 7\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_file()
    assert process.returncode == 143
    assert err.splitlines()[-1].startswith("ended by SIGTERM; --ckpt_path last goes on after step ")
