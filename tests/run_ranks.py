"""Runs scripts on ranks of their own as torchrun does, each in milliseconds: `python -m tests.run_ranks JOBS.json OUT.json`.

torch is imported once, and what a job names as "modules", then each rank is forked. As under torchrun the store outlives the
ranks, and the first rank to fail ends the others. A job is {"name", "text", "ranks", "timeout", "env", "modules"}; of each comes
{"codes": [per rank, negative for signals], "out": [text per rank, both streams], "seconds", "left": processes that outlived
their rank, "late": ended by the timeout}.
"""

import atexit
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.parallel
import torch.utils.data

_GRACE_S = 5.0  # after the first failure; torchrun gives 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_rank(script: Path, rank: int, environment: dict[str, str]) -> int:
    """The process id of a rank, whose streams go to a file beside the script."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    output = os.open(script.parent / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # which torch reads when it is imported
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_store(port: int) -> None:
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        while store:
            time.sleep(60)
    finally:
        os._exit(1)


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    ranks, script, port = job["ranks"], folder / f"{job['name']}.py", free_port()
    script.write_text(job["text"], encoding="utf-8")
    environment = {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", **job.get("env", {})},
    }
    started = time.monotonic()
    keeper = os.fork()  # of the store, which is a thread: nothing is forked after it
    if not keeper:
        keep_store(port)
    running = {fork_rank(script, rank, environment): rank for rank in range(ranks)}
    groups, codes, deadline = list(running), [0] * ranks, started + job["timeout"]
    late = failed = False
    while running and not late:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                for other in running:
                    os.kill(other, signal.SIGTERM)
                    os.kill(other, signal.SIGCONT)
        elif time.monotonic() > deadline:
            late = True
        else:
            time.sleep(0.02)
    left = [group for group in groups if group not in running and is_alive(group)]
    for group in groups:
        if is_alive(group):
            os.killpg(group, signal.SIGKILL)
    for pid, rank in running.items():
        codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    out = [(folder / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(ranks)]
    return {"codes": codes, "out": out, "seconds": time.monotonic() - started, "left": left, "late": late}


def main() -> None:
    jobs, results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), {}
    for module in dict.fromkeys(module for job in jobs for module in job.get("modules", [])):  # always in one order
        importlib.import_module(module)
    for job in jobs:
        folder = Path(tempfile.mkdtemp())  # not TemporaryDirectory: each rank would remove it when it exits
        results[job["name"]] = run(job, folder)
        shutil.rmtree(folder)
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
