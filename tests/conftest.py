"""Commands as a user starts them, each with a time limit and a process group of its own."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# What surrounds the tests does not change their results, whoever runs them and where: here go the variables of another launch, of
# an allocation of SLURM's, and of a person's terminal, before anything reads them. `tests/hostile.py` brings them.
OF_OTHERS = ("SLURM_", "TORCHELASTIC_", "TORCH_", "NCCL_", "GLOO_", "OMPI_", "PMI_", "PL_", "LOCKSTEP_RECORD_", "GROUP_", "ROLE_")
OF_OTHERS += ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_", "OMP_NUM_THREADS")
OF_OTHERS += ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "TERM", "MPLBACKEND", "PYTHONIOENCODING")
for _name in [name for name in os.environ if name.startswith(OF_OTHERS)]:
    del os.environ[_name]
os.umask(0o022)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from tests.photographs import write_sample, write_tiny  # noqa: E402

REPOSITORY = Path(__file__).parents[1]
REAL = REPOSITORY.parent / "shared" / "data"  # real photographs, where they are

# A small network and few steps: for what does not depend on the architecture.
SMALL = ["--model.arch", "resnet18", "--model.zero_init_residual", "false"]


def pytest_configure(config: pytest.Config) -> None:
    """Code under test that ends the process of the tests says where: their output is captured, and would be lost."""
    own, end = os.getpid(), os._exit

    def end_loudly(code: int) -> None:
        if os.getpid() == own:
            config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
            print(f"\nthe process of the tests is ended with exit code {code} by", file=sys.stderr)
            traceback.print_stack()
            sys.stderr.flush()
        end(code)

    os._exit = end_loudly


# Files whose tests start no other process, or next to none: `python -m pytest -m quick`, before each commit.
QUICK = {"agreement", "arguments", "checks", "differences", "files", "guard_parts", "images", "packaging", "plan", "progress"}
QUICK |= {"readme", "record", "scripts", "structure", "table"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in QUICK and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.quick)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    seconds: float

    def lines(self) -> list[str]:
        return (self.out + self.err).splitlines()


def run_module(
    module: str,
    *arguments: str | Path,
    launcher: list[str] | None = None,
    timeout: float = 120,
    env: dict[str, str] | None = None,
) -> Finished:
    """`python -m module arguments`, ended with all its children if it takes too long."""
    command = [*(launcher or [sys.executable]), "-m", module, *map(str, arguments)]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        cwd=REPOSITORY,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{' '.join(command)} took more than {timeout} s:\n{out}\n{err}")
    return Finished(process.returncode, out, err, time.monotonic() - started)


@dataclass(frozen=True)
class Ran:
    """What came of a script on ranks: exit codes and text of each, in their order."""

    codes: list[int]
    out: list[str]
    seconds: float
    left: list[int]
    late: bool

    def report(self) -> str:
        """The one report: what the last lines of its rank say."""
        assert not self.late, self.out
        assert not self.left
        assert any(code not in (0, -signal.SIGTERM) for code in self.codes), self.codes
        reports = [text.split("ReplicaError: ")[-1] for text in self.out if "Fix:" in text or "Look at" in text]
        assert len(reports) == 1, self.out
        return reports[0]


def run_jobs(folder: Path, jobs: list[dict[str, object]]) -> dict[str, Ran]:
    """Scripts on ranks of their own (`tests/run_ranks.py`), from one process that has a time limit."""
    jobs = [{"ranks": 2, "timeout": 60, **job} for job in jobs]
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    command = [sys.executable, "-m", "tests.run_ranks", str(folder / "jobs.json"), str(folder / "out.json")]
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
    try:
        assert process.wait(timeout=240) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return {name: Ran(**result) for name, result in json.loads((folder / "out.json").read_text(encoding="utf-8")).items()}


def training(name: str, module: str, arguments: list[object]) -> dict[str, object]:
    """A job that is `python -m module arguments` under torchrun."""
    wing = {"project.fit": "project.lit.run", "project.fit_raw": "project.raw.run"}[module]
    text = (
        f"from project.runtime.process import run_command\nfrom {wing} import fit\n"
        f"run_command(lambda: fit({list(map(str, arguments))}))\n"
    )
    environment = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}
    return {"name": name, "text": text, "env": environment, "modules": [wing, "torch._dynamo", "matplotlib.pyplot"]}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("LOCKSTEP_CACHE")
    os.environ["LOCKSTEP_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["LOCKSTEP_CACHE"]
    else:
        os.environ["LOCKSTEP_CACHE"] = before


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of whole photographs that are drawn: no claim waits for real ones."""
    return write_sample(tmp_path_factory.mktemp("photographs") / "imagenet-sample")


@pytest.fixture(scope="session", params=["drawn", *(["real"] if REAL.is_dir() else [])])
def photographs(request: pytest.FixtureRequest, drawn: Path) -> list[Path]:
    """40 files; once the drawn ones, and once the real ones where these are."""
    folder = drawn if request.param == "drawn" else REAL / "imagenet-sample"
    return sorted(folder.glob("*/*.JPEG"))[:40]


@pytest.fixture(scope="session")
def photograph_folder(drawn: Path) -> Path:
    """Class folders of whole photographs: the real ones where these are."""
    return REAL / "imagenet-sample" if REAL.is_dir() else drawn


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train` and `val` of ten classes of small photographs: the real ones where these are."""
    return REAL / "tinyimagenet10" if REAL.is_dir() else write_tiny(tmp_path_factory.mktemp("photographs") / "tiny")


def write_images(folder: Path, count: int, *, size: int = 40, shade: int = 0, start: int = 0) -> None:
    """JPEG files 0.jpg, 1.jpg ... of noise around one shade of grey."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(start, start + count):
        noise = np.random.default_rng(1000 * shade + i).integers(0, 60, (size, size, 3))
        Image.fromarray((shade + noise).astype(np.uint8)).save(folder / f"{i}.jpg", quality=90)


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., Path]:
    """A folder of class folders: `make_data(train=12, val=5)` has 12 training and 5 validation images in 3 classes."""

    def make(*, train: int, val: int, classes: tuple[str, ...] = ("ant", "bee", "cat"), name: str = "data") -> Path:
        for part, count in (("train", train), ("val", val)):
            for k, label in enumerate(classes):
                own = range(k, count, len(classes))
                write_images(tmp_path / name / part / label, len(own), shade=30 + 60 * k)
        return tmp_path / name

    return make
