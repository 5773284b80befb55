"""Trainings that are killed at random moments and go on: `python -m project.measure.soak --rounds 20`.

Each round is one training of two ranks that saves after every step. A few times a random rank, the launcher or all are killed
(SIGKILL), or the launcher gets SIGTERM, at a random moment from its start on; it goes on with `--ckpt_path last`, and at last is
left to come to its end. Then its last.ckpt is compared, bit for bit, with that of a training that nobody disturbed.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from project.model.checkpoint_file import read_checkpoint
from project.model.training_record import RECORD
from project.parity.small_training import SMALL, small_digits
from project.parity.trainers import LIGHTNING, RAW
from project.runtime.launched import ends_with_this
from project.runtime.run_folder import newest_checkpoint

COMMANDS = {"lightning": LIGHTNING, "raw": RAW}
MARK = "LOCKSTEP_SOAK"  # in the environment of all processes of one training
FLAGS = [*SMALL, "--devices", "2", "--max_epochs", "6", "--checkpoint.every_steps", "1", "--trainer.accumulate_grad_batches", "2"]
FLAGS += ["--data.global_batch_size", "8", "--data.train_size", "32", "--data.val_resize", "32", "--data.val_size", "32"]
FLAGS += ["--model.ema_decay", "0.9", "--data.mixup_alpha", "0.2", "--model.warmup_epochs", "1"]
# Of a checkpoint's record, what a training decides; the others say where and how it ran.
DECIDED = ("epoch", "step", "batches", "complete", "optimizer", "schedule", "ema", "metrics")


@dataclass
class Round:
    """What was done to one training, and how it ended."""

    impl: str
    seed: int
    kills: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from a kill until no process was left
    orphans: int = 0
    equal: bool = False
    note: str = ""


def result(folder: Path) -> dict[str, Any]:
    """All that a training has changed, by its newest last.ckpt."""
    newest = newest_checkpoint(folder)
    if newest is None:
        raise ValueError(f"no checkpoint below {folder}")
    content = read_checkpoint(newest)
    return {"weights": content["state_dict"], **{name: content[RECORD][name] for name in DECIDED}}


def marked(mark: str) -> list[int]:
    """All processes of a training, whoever their parents are now."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def ranks_of(pids: list[int]) -> dict[int, int]:
    """Process ids by rank: of each session, its leader."""
    ranks = {}
    for pid in pids:
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            if os.getsid(pid) == pid:
                ranks.update({int(entry[5:]): pid for entry in entries if entry.startswith("RANK=")})
        except (FileNotFoundError, ProcessLookupError):
            continue
    return ranks


def start(impl: str, arguments: list[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    mark = uuid.uuid4().hex
    with log.open("ab") as file:
        command = [*COMMANDS[impl], *arguments]
        environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            **ends_with_this(environment),
        )
    return process, mark


def strike(process: subprocess.Popen[bytes], mark: str, victim: str, rank: int) -> str:
    """Kill; returns what was killed, which is the launcher where no rank has been started yet."""
    ranks = ranks_of(marked(mark))
    if victim == "rank" and rank in ranks:
        os.kill(ranks[rank], signal.SIGKILL)
        return f"rank {rank}"
    if victim == "all":
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        return "all"
    if victim == "SIGTERM":
        process.terminate()
        return "SIGTERM"
    process.kill()
    return "launcher"


def soak(impl: str, seed: int, whole: dict[str, Any], seconds: float, data: Path, out: Path) -> Round:
    """One round; `seconds` is how long the undisturbed training took."""
    chosen, found = random.Random(seed), Round(impl, seed)
    arguments = [*FLAGS, "--data.root", str(data), "--trainer.default_root_dir", str(out)]
    arguments += ["--data.num_workers", chosen.choice(["0", "1"])]
    log = out.with_suffix(".log")
    for strikes_left in range(chosen.choice([1, 2, 2, 3]), -1, -1):
        resumes = any(out.glob("runs/*/checkpoints/last.ckpt"))
        process, mark = start(impl, [*arguments, *(["--ckpt_path", "last"] if resumes else [])], log)
        try:
            process.wait(chosen.uniform(0.2 * seconds, seconds) if strikes_left else 600)
        except subprocess.TimeoutExpired:
            found.kills.append(
                strike(process, mark, chosen.choice(["rank", "rank", "launcher", "all", "SIGTERM"]), chosen.choice([0, 1]))
            )
            began = time.monotonic()
            while marked(mark) and time.monotonic() - began < 60:
                process.poll()
                time.sleep(0.05)
            found.seconds.append(time.monotonic() - began)
            found.orphans += len(marked(mark))
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            code = process.wait()
        if code == 0:
            break
    try:
        torch.testing.assert_close(result(out), whole, rtol=0, atol=0)
        found.equal = True
    except (AssertionError, ValueError) as error:
        found.note = str(error).splitlines()[0]
    return found


def table(rounds: list[Round]) -> str:
    lines = ["| trainer | rounds | kills survived | bit-equal ends | orphans | seconds to end, median and longest |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for impl in dict.fromkeys(each.impl for each in rounds):
        ours = [each for each in rounds if each.impl == impl]
        kills, equal, orphans = (
            sum(len(each.kills) for each in ours),
            sum(each.equal for each in ours),
            sum(e.orphans for e in ours),
        )
        ends = sorted(second for each in ours for second in each.seconds)
        took = f"{ends[len(ends) // 2]:.1f}, {ends[-1]:.1f}" if ends else ""
        lines.append(f"| {impl} | {len(ours)} | {kills} | {equal} | {orphans} | {took} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m project.measure.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="Number of trainings of each trainer.")
    parser.add_argument("--impl", choices=list(COMMANDS), action="append", help="Trainer. Default: both.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of what is killed, and when.")
    parser.add_argument("--out", type=Path, default=None, help="Keep logs and checkpoints here.")
    given = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        data = small_digits(out / "data")
        for impl in given.impl or list(COMMANDS):
            began = time.monotonic()
            arguments = [*FLAGS, "--data.root", str(data), "--trainer.default_root_dir", str(out / f"{impl}-whole")]
            process, _ = start(impl, arguments, out / f"{impl}-whole.log")
            if process.wait(600) != 0:
                sys.exit(f"the undisturbed training failed:\n{(out / f'{impl}-whole.log').read_text(encoding='utf-8')}")
            seconds = time.monotonic() - began
            print(f"{impl}: undisturbed in {seconds:.0f} s", flush=True)
            whole = result(out / f"{impl}-whole")
            for seed in range(given.seed, given.seed + given.rounds):
                folder = out / f"{impl}-{seed}"
                found = soak(impl, seed, whole, seconds, data, folder)
                rounds.append(found)
                ends = ", ".join(f"{kill} ({second:.1f} s)" for kill, second in zip(found.kills, found.seconds, strict=True))
                verdict = "equal" if found.equal else f"DIFFERS: {found.note}"
                print(f"{impl} {seed}: {ends or 'not struck'}; {verdict}; {found.orphans} orphans", flush=True)
                if found.equal and given.out is None:
                    shutil.rmtree(folder)
    print(table(rounds))
    return 0 if all(each.equal and not each.orphans for each in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
