"""The suite with the oldest and with the newest versions of the libraries: `python -m tests.versions [oldest|newest|guard ...]`.

One environment after the other is made, used and removed; each takes about 6 GB. The oldest has the lower bounds of
pyproject.toml, the newest whatever pip finds. `guard` runs project/guard alone, which reaches further back. The rows of the
table, with dates, go to notebooks/versions.md.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "notebooks" / "versions.md"
SHOWN = ("torch", "torchvision", "lightning", "torchmetrics", "jsonargparse", "numpy", "pillow")
GUARD = ("torch==2.6.0", "numpy")


def lower_bounds() -> list[str]:
    """Constraints for pip: each dependency at the oldest version that pyproject.toml allows."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for text in project["dependencies"]:
        requirement = Requirement(text)
        [bound] = [each.version for each in requirement.specifier if each.operator == ">="]
        found.append(f"{requirement.name}=={bound}")
    return found


def run(command: Sequence[str], *, limit: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """In the repository, uncapped by the settings of this machine's pip."""
    everything = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    pipe = subprocess.PIPE
    return subprocess.run(
        command, cwd=REPOSITORY, env=everything, timeout=limit, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def try_versions(name: str, python: str, tests: Sequence[str], folder: Path) -> str:
    """A row of the table."""
    made = run([python, "-m", "venv", str(folder)], limit=120)
    inside = str(folder / "bin" / "python")
    constraints = folder.parent / "constraints.txt"
    constraints.write_text("\n".join(lower_bounds() if name == "oldest" else []), encoding="utf-8")
    wanted = GUARD if name == "guard" else ("-e", ".[test]", "-c", str(constraints))
    if made.returncode == 0:
        made = run([inside, "-m", "pip", "install", "-q", *wanted], limit=3600)
    if made.returncode != 0:
        sys.exit(f"the environment {name} cannot be made:\n{made.stdout}")
    listed = run([inside, "-m", "pip", "list", "--format", "freeze"], limit=120).stdout
    versions = dict(re.findall(r"^([\w-]+)==(\S+)$", listed.lower(), re.MULTILINE))
    version = run([inside, "-c", "import platform; print(platform.python_version())"], limit=60).stdout.strip()
    if name == "guard":
        torchrun = [inside, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = [run([*torchrun, script], limit=900, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1") for script in tests]
        failed = [script for script, each in zip(tests, done, strict=True) if each.returncode]
        said = f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(f'`{script}`' for script in tests)}, two ranks"
        print("\n".join(each.stdout for each in done if each.returncode))
    else:
        ended = run([inside, "-m", "pytest", *tests], limit=3 * 3600, TMPDIR=str(folder.parent))
        said = ended.stdout.splitlines()[-1].strip("= ") if ended.stdout else f"exit code {ended.returncode}"
        print("\n".join(line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
        said = f"`{shlex.join(['pytest', *tests])}`: {said}"
    cells = [datetime.date.today().isoformat(), name, version, *(versions.get(each, "") for each in SHOWN), said]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="oldest, newest, guard. Default: all, in this order.")
    parser.add_argument("--python", default=sys.executable, help="Interpreter of the environments. Default: this one.")
    parser.add_argument("--tests", nargs="+", default=[], help="Arguments of pytest. Default: none, the default tests.")
    given = parser.parse_args()
    rows = []
    for name in given.names or ["oldest", "newest", "guard"]:
        scripts = ["notebooks/ddp_train.py", "tests/guard_healthy.py"]
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            free = shutil.disk_usage(folder).free / 1e9
            if free < 9:
                sys.exit(f"{folder} has {free:.1f} GB free, and an environment takes about 6: name another place with TMPDIR.")
            row = try_versions(name, given.python, scripts if name == "guard" else given.tests, Path(folder) / "venv")
        print(row, flush=True)
        rows.append(row)
    head = PAGE.read_text(encoding="utf-8").rstrip("\n")
    PAGE.write_text("\n".join([head, *rows, ""]), encoding="utf-8")
    print(f"written to {PAGE.relative_to(REPOSITORY)}; {platform.platform()}, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
