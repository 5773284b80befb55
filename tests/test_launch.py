"""All ranks start together and end together, and the reason of an end is said last, once."""

import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import project.runtime.process
from project.ranks.launch import launch
from project.runtime.errors import UserError
from project.runtime.process import TWICE_S
from tests.conftest import REPOSITORY, SMALL, run_jobs, training
from tests.run_ranks import free_port

# Rank 1 fails in its second step; whatever leaves the group of the ranks, or Lightning, would wait for ever.
FAILING = """
import json, os, time
import torch.distributed
from lightning.pytorch.strategies import DDPStrategy
import project.lit.module, project.raw.trainer
os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = os.environ["RANK"]
if "TORCHELASTIC_ERROR_FILE" in os.environ:
    os.environ["TORCHELASTIC_ERROR_FILE"] += os.environ["RANK"]
began = 0.0


def slow(original):
    return lambda *arguments, **more: time.sleep(100) if began else original(*arguments, **more)


def failing(original):
    def step(self, *arguments):
        global began
        place = self.place if hasattr(self, "place") else self.trainer
        if os.environ["RANK"] == "1" and (place.step if hasattr(place, "step") else place.global_step) == 1:
            began = time.monotonic()
            raise RuntimeError("this is rank 1")
        return original(self, *arguments)
    return step


def end(code, original=os._exit):
    os.write(1, f"ends after {time.monotonic() - began:.1f} s\\n".encode() if began else b"")
    original(code)


torch.distributed.destroy_process_group = slow(torch.distributed.destroy_process_group)
DDPStrategy.teardown = slow(DDPStrategy.teardown)
project.lit.module.Classifier.training_step = failing(project.lit.module.Classifier.training_step)
project.raw.trainer.Trainer.step = failing(project.raw.trainer.Trainer.step)
os._exit = end
"""
LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"},
    "srun": {
        **{"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"},
        **{"SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"},
    },
}
CODE = """
import os, sys
import project.ranks.launch
from project.ranks.launch import launch
project.ranks.launch.SIGNAL_GRACE_S = float(os.environ.get("GRACE_S", "25"))
sys.exit(launch("tests.rank_script", [sys.argv[1]], ranks=2, num_nodes=1, threads=1))
"""


def start(behaviour: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, behaviour],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=REPOSITORY,
        env={**os.environ, **env},
    )


def ranks_left() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"tests.rank_script" in entry.read_bytes().split(b"\0"):
                found.append(entry.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.fixture(autouse=True)
def no_rank_is_left():  # type: ignore[no-untyped-def]
    yield
    assert not ranks_left()


@pytest.mark.parametrize(
    ("behaviour", "code", "last"),
    [
        ("end", 0, ""),
        ("fail-on-1", 1, "error: rank 1: cannot read the image x.jpg\n"),
        ("fail-then-notice", 1, "error: rank 1: RuntimeError: this is rank 1\n"),
        ("fail-in-a-group", 1, "error: rank 1: RuntimeError: this is rank 1\n"),
        ("report", 1, "error: weights differ\nFix: this\n"),
        ("refuse", 2, "error: --flag is wrong\n"),
        ("killed", 137, "error: rank 1 was ended by SIGKILL (the system may have run out of memory).\n"),
    ],
)
def test_the_first_reason_is_said_last(behaviour: str, code: int, last: str) -> None:
    process = start(behaviour)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.endswith(last)
    assert ("Traceback" in err) == (behaviour in ("fail-then-notice", "fail-in-a-group"))
    assert err.count("error: ") == (behaviour != "end")
    first, second = sorted(line.split() for line in out.splitlines())
    assert (first[0], second[0]) == ("0", "1")
    assert first[1:] == second[1:]


def test_stale_ranks_of_another_launch_are_replaced() -> None:
    process = start("end", RANK="5", LOCAL_RANK="5", WORLD_SIZE="9", MASTER_ADDR="10.1.2.3")
    out, _ = process.communicate(timeout=30)
    assert {line.split()[1] for line in out.splitlines()} == {"2"}
    assert {line.split()[4] for line in out.splitlines()} == {"127.0.0.1"}


@pytest.mark.parametrize(("number", "behaviour"), [(signal.SIGTERM, "wait"), (signal.SIGINT, "wait"), (signal.SIGTERM, "deaf")])
def test_a_signal_ends_all_ranks(number: signal.Signals, behaviour: str) -> None:
    process = start(behaviour, GRACE_S="2")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    if behaviour == "deaf":
        assert err == "ended by SIGTERM before ranks 0, 1 came to the end of a step: no checkpoint was written for it\n"
    else:
        assert err == f"ended by {number.name} while no step was being trained\n"


def test_a_second_interrupt_ends_at_once() -> None:
    process = start("deaf")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert sorted(process.stdout.readline() for _ in range(2)) == ["0 hears SIGINT\n", "1 hears SIGINT\n"]
    time.sleep(2 * TWICE_S)  # or it would count as the same one, which a terminal may send twice
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < 2
    assert "no checkpoint was written" in err


def test_a_rank_that_dies_after_a_signal_is_named() -> None:
    process = start("dies-of-signal")
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 137
    assert err == "error: rank 1 was ended by SIGKILL (the system may have run out of memory).\n"


@pytest.mark.slow
def test_a_rank_that_is_stopped_before_the_first_step_ends_all_soon() -> None:
    process = start("stop-1-early")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err == "ended by SIGTERM while no step was being trained\n"


@pytest.mark.slow
def test_a_signal_to_one_rank_that_all_follow_is_the_reason() -> None:
    process = start("stopped-by-1")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err == ""


@pytest.mark.parametrize("port", ["busy", "x"])
def test_a_port_that_cannot_be_taken_is_refused_by_its_name(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]) if port == "busy" else port)
        with pytest.raises(UserError, match="^MASTER_PORT"):
            launch("tests.rank_script", ["end"], ranks=1, num_nodes=1, threads=1)


def test_ranks_end_with_their_launcher() -> None:
    process = start("wait")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 5
    while ranks_left() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_the_launcher_gives_back_the_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert launch("tests.rank_script", ["end"], ranks=1, num_nodes=1, threads=1) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_that_a_signal_ends_says_so() -> None:
    script = "import os, signal; from project.runtime.command import end_by_exception; end_by_exception()"
    command = [sys.executable, "-c", f"{script}; os.kill(os.getpid(), signal.SIGTERM)"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (143, "ended by SIGTERM\n")


@pytest.mark.slow
def test_a_rank_ends_well_while_a_thread_of_gloos_still_holds_a_tensor(tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "x"}
    command = [sys.executable, "-m", "tests.ending_rank", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command, stderr=subprocess.PIPE, encoding="utf-8", cwd=REPOSITORY, env={**os.environ, **environment, "RANK": r}
        )
        for r in ("0", "1")
    ]
    try:
        assert [process.communicate(timeout=60)[1] for process in ranks] == ["", ""]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0]
    for r in (0, 1):  # and all that an end does was done
        assert (tmp_path / f"atexit-{r}.txt").exists()
        assert (tmp_path / f"open-{r}.txt").read_text(encoding="utf-8") == "written"


@pytest.mark.slow
def test_a_failure_in_a_step_is_said_before_a_teardown_that_waits_for_other_ranks(tmp_path: Path) -> None:
    """By torchrun and by srun, which end the other ranks themselves; once, and into torchrun's file."""
    flags = [*SMALL, "--devices", "2", "--max_epochs", "1", "--data.num_workers", "0", "--trainer.limit_train_batches", "3"]
    jobs = []
    for module, (launcher, variables) in itertools.product(("project.fit", "project.fit_raw"), LAUNCHERS.items()):
        root = tmp_path / f"{module}-{launcher}"
        job = training(root.name, module, [*flags, "--trainer.default_root_dir", root])
        environment = {**variables, "TORCHELASTIC_ERROR_FILE": f"{root}-"} if launcher == "torchrun" else variables
        jobs.append({**job, "text": FAILING + str(job["text"]), "env": environment})
    for name, ran in run_jobs(tmp_path, jobs).items():
        assert not ran.late, ran.out
        out = ran.out[1]
        assert ran.codes[1] == 1, out
        assert out.count("error: ") == 1
        said, ended = out.index("error: rank 1: RuntimeError: this is rank 1"), out.index("ends after ")
        assert said < ended
        assert float(out[ended:].split()[2]) < 5
        if name.endswith("torchrun"):
            message = json.loads((tmp_path / f"{name}-1").read_text(encoding="utf-8"))["message"]
            assert message["message"] == "RuntimeError: this is rank 1"
            assert "in failing" in message["extraInfo"]["py_callstack"] or "in step" in message["extraInfo"]["py_callstack"]


def test_a_command_ends_with_the_one_that_has_started_it(tmp_path: Path) -> None:
    """However that ends: a comparison that is killed leaves no trainer behind, a benchmark no contestant."""
    command = "import os, time; from project.runtime.process import run_command; os.write(1, b'started'); "
    command += "run_command(lambda: time.sleep(60))"
    script = (
        f"import subprocess, sys; from project.runtime.launched import ends_with_this; c = [sys.executable, '-c', {command!r}]; "
    )
    script += "subprocess.Popen(c, **ends_with_this({})).wait()"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 7) == b"started"
    process.kill()
    killed = time.monotonic()
    process.wait()
    assert process.stdout.read() == b""  # which ends when nobody holds the other end any more
    assert time.monotonic() - killed < 20
    process.stdout.close()


def test_whatever_starts_a_command_ties_it_to_itself() -> None:
    starts = [
        path
        for path in (REPOSITORY / "project").rglob("*.py")
        if re.search(r"subprocess\.(Popen|run)\(", path.read_text(encoding="utf-8"))
    ]
    assert len(starts) > 2
    for path in starts:
        for started in re.findall(
            r"subprocess\.(?:Popen|run)\(.*?\n *\)(?:\.\w+)?\n", path.read_text(encoding="utf-8"), flags=re.DOTALL
        ):
            ties = "ends_with_this(" in started or "end_with_parent(" in started  # the second of commands that are not ours
            assert ties or "ALIVE" in path.read_text(encoding="utf-8"), started


@pytest.mark.parametrize(("now", "most", "after"), [(1024, 524288, 65536), (1024, 4096, 4096), (500000, 524288, 500000)])
def test_the_open_file_limit_is_raised_and_never_lowered(
    now: int, most: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(now, most)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    project.runtime.process.allow_open_files()
    assert limits[-1] == (after, most)


@pytest.mark.slow
def test_a_broken_connection_is_no_wall_of_c10ds_frames() -> None:
    """What torch raises comes to Python as ever; what it logs besides, with the frames of its C++, is silenced."""
    script = """
from project.runtime.process import run_command

def main():
    import torch.distributed as dist
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    client.check(["key"])

run_command(main)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", cwd=REPOSITORY, timeout=60, env=environment
    )
    assert done.returncode == 1
    assert "frame #" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: DistNetworkError: ")
