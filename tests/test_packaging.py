"""What an installed package does outside its checkout, and what `lockstep` says."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import project
from project.__main__ import COMMANDS, main, usage
from tests.conftest import REPOSITORY

SMALL = ["--model.arch", "resnet18", "--model.warmup_epochs", "0", "--data.train_size", "32", "--data.val_resize", "32"]
SMALL += [
    "--data.val_size",
    "32",
    "--data.num_workers",
    "0",
    "--trainer.max_steps",
    "1",
    "--trainer.enable_progress_bar",
    "false",
]


def test_the_help_fits_one_screen_and_names_every_command() -> None:
    assert len(usage().splitlines()) <= 24
    assert all(len(line) <= 80 for line in usage().splitlines())
    folder = Path(project.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert set(COMMANDS) == files | {path.parent.name for path in folder.glob("*/__main__.py")}


def test_an_unknown_command_is_one_message_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockstep", "compere"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: lockstep has no command compere. Did you mean compare? Its commands: fit, ")
    for flag, said in (("--version", f"lockstep {project.__version__}\n"), ("--help", f"{usage()}\n")):
        monkeypatch.setattr(sys, "argv", ["lockstep", flag])
        assert main() == 0
        assert capsys.readouterr().out == said


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as pip puts it; the libraries are those of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(build, check=True, timeout=120)
    [wheel] = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"project/py.typed", "project/configs/digits.yaml", "project/data/digits.csv.gz"} <= set(names)
    assert {"project/parity/report.html", "project/measure/timeline/timeline.html"} <= set(names)
    assert "project/record/on_path/sitecustomize.py" in names
    assert not [name for name in names if name.startswith(("project/faults", "tests"))]
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    return folder / "site"


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_folder_and_beside_a_foreign_project(installed: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "project"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("raise SystemExit('the user has a package of this name')\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "from lightning.pytorch import Callback\n\n\n"
        "class Mine(Callback):\n"
        "    def on_train_start(self, trainer, module):\n"
        "        print(f'mine on rank {trainer.global_rank}', flush=True)\n",
        encoding="utf-8",
    )

    def lockstep(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(installed / "bin" / "lockstep"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=200)

    assert lockstep("--help").stdout == f"{usage()}\n"
    record = str(tmp_path / "record")
    trained = lockstep("fit", "--devices", "2", *SMALL, "--record", record, "--trainer.callbacks+=mine.Mine")
    assert trained.returncode == 0, trained.stderr
    assert sorted(line for line in trained.stdout.splitlines() if line.startswith("mine")) == ["mine on rank 0", "mine on rank 1"]
    script = str(REPOSITORY / "tests" / "cases" / "no_loader.py")
    recorded = lockstep("record", "--out", str(tmp_path / "theirs"), "--steps", "2", "--", sys.executable, script)
    assert (recorded.returncode, recorded.stdout) == (0, ""), recorded.stderr
    assert len(list((tmp_path / "theirs").glob("process-*.jsonl"))) == 1
    shutil.copytree(record, f"{record}-2")
    compared = lockstep("compare", "--runs", record, f"{record}-2")
    assert compared.returncode == 0, compared.stderr
    broken = lockstep("compare", "--inject", "no-set-epoch", "--out", str(tmp_path / "out"))
    assert broken.returncode == 2
    assert broken.stderr == "error: --inject needs the source checkout: the installed package leaves the faults out.\n"
