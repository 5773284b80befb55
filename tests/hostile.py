"""Runs a command in surroundings in which tests like to fail: `python -m tests.hostile COMMAND ...`, for example

    python -m tests.hostile python -m pytest

These are: SLURM's programs on the path and its variables in the environment, as on a login node; the variables of another launch;
streams that take ASCII only, another time zone, a narrow terminal; no HOME; new files that only their owner reads; a temporary
folder with a blank and letters beyond ASCII in its name; and of root's rights none, so that permissions hold (on Linux).

Its exit code is the command's.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ("srun", "scontrol", "sinfo", "squeue")  # a login node has them; nothing that runs here may call them

VARIABLES = {
    # of an allocation that this is no step of
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "nowhere[1-2]",
    # of another launch
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "nowhere.invalid",
    "MASTER_PORT": "1",
    "PL_GLOBAL_SEED": "12345",
    "LOCKSTEP_RECORD_UNTIL": "0",
    "LOCKSTEP_RECORD_TENSORS": "first",
    # of a person's shell
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "OMP_NUM_THREADS": "3",
    "MPLBACKEND": "TkAgg",
    "LC_ALL": "C",
    "PYTHONIOENCODING": "ascii",
    "PYTHONHASHSEED": "12345",
    "TZ": "Pacific/Chatham",
    "TERM": "dumb",
    "COLUMNS": "37",
    "FORCE_COLOR": "1",
}


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        bin, temporary = Path(folder) / "bin", Path(folder) / "tmp of Zoë"
        bin.mkdir()
        temporary.mkdir()
        for name in PROGRAMS:
            (bin / name).write_text(f"#!/bin/sh\necho {name}: this is a login node >&2\nexit 1\n", encoding="utf-8")
            (bin / name).chmod(0o755)
        environment = {**os.environ, **VARIABLES, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(temporary)}
        for name in ("HOME", "XDG_CACHE_HOME", "LOCKSTEP_CACHE", "MPLCONFIGDIR"):
            environment.pop(name, None)
        command = sys.argv[1:]
        if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("setpriv"):
            command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *command]
        return subprocess.run(command, env=environment, umask=0o077, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
