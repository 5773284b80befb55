"""The end of a process with all that it has started, for launcher, comparison and benchmarks."""

import contextlib
import os
import signal
import subprocess


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, with its group, of which something may be left after its own end.

    Ranks that it has launched have sessions of their own, and end with it: they watch a pipe that closes then.
    """
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):  # it has ended, with all that it started
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
