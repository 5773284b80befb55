"""Trainings that are killed at random moments and go on: `python -m tests.soak --rounds 20 [--impl lightning|raw] [--out DIR]`.

Each round is one training of two ranks that saves after every step. A few times a random rank, the launcher or all are killed
(SIGKILL), or the launcher gets SIGTERM, at a random moment from its start on; it goes on with `--ckpt_path last`, and at last is
left to come to its end. Then its last.ckpt is compared, bit for bit, with that of a training that nobody disturbed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import REPOSITORY, write_images
from tests.test_resume import RUN, assert_equal, what_counts

COMMANDS = {"lightning": "project.fit", "raw": "project.fit_raw"}
MARK = "LOCKSTEP_SOAK"  # in the environment of all processes of one training
MORE = ["--devices", "2", "--max_epochs", "6", "--data.drop_last", "true", "--checkpoint.every_steps", "1"]


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
        command = [sys.executable, "-m", COMMANDS[impl], *arguments]
        environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=REPOSITORY, env=environment, start_new_session=True)
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


def soak(impl: str, seed: int, whole: dict[str, object], seconds: float, data: Path, out: Path) -> Round:
    """One round; `seconds` is how long the undisturbed training took."""
    chosen, found = random.Random(seed), Round(impl, seed)
    arguments = [*RUN, *MORE, "--data.root", str(data), "--trainer.default_root_dir", str(out)]
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
        assert_equal(what_counts(out), whole)
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
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--impl", choices=list(COMMANDS), action="append", help="Default: both.")
    parser.add_argument("--seed", type=int, default=1, help="Of what is killed, and when.")
    parser.add_argument("--out", type=Path, default=None, help="Keep logs and checkpoints here.")
    given = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        data = out / "data"
        for part, count in (("train", 11), ("val", 4)):
            for k, label in enumerate(("ant", "bee")):
                write_images(data / part / label, count - k * (part == "val"), shade=30 + 60 * k)
        for impl in given.impl or list(COMMANDS):
            began = time.monotonic()
            arguments = [*RUN, *MORE, "--data.root", str(data), "--trainer.default_root_dir", str(out / f"{impl}-whole")]
            process, _ = start(impl, arguments, out / f"{impl}-whole.log")
            if process.wait(600) != 0:
                sys.exit(f"the undisturbed training failed:\n{(out / f'{impl}-whole.log').read_text(encoding='utf-8')}")
            seconds = time.monotonic() - began
            print(f"{impl}: undisturbed in {seconds:.0f} s", flush=True)
            whole = what_counts(out / f"{impl}-whole")
            for seed in range(given.seed, given.seed + given.rounds):
                folder = out / f"{impl}-{seed}"
                found = soak(impl, seed, whole, seconds, data, folder)
                rounds.append(found)
                ends = ", ".join(f"{kill} ({second:.1f} s)" for kill, second in zip(found.kills, found.seconds, strict=True))
                verdict = "equal" if found.equal else f"DIFFERS: {found.note}"
                print(f"{impl} {seed}: {ends or 'not struck'}; {verdict}; {found.orphans} orphans", flush=True)
                if found.equal and given.out is None:
                    subprocess.run(["rm", "-rf", str(folder)], check=True)
    print(table(rounds))
    return 0 if all(each.equal and not each.orphans for each in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
