"""The tree is the diagram: who may import whom, and that every config is one that the commands accept."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from project.core.arguments import expand
from project.lit.cli import TrainCLI
from tests.conftest import REPOSITORY

PROJECT = REPOSITORY / "project"

# folder or command -> what of ours, and of the trainers' frameworks, it may import
MAY_IMPORT = {
    "core": {"core"},
    "guard": {"guard"},
    "lit": {"core", "guard", "lit", "lightning"},
    "raw": {"core", "guard", "raw"},
    "parity": {"core", "parity"},
    "parity/faults.py": {"core", "parity", "raw"},  # which these two patch from outside
    "parity/mistakes.py": {"core", "parity", "raw"},
    "fit": {"core", "lit", "lightning"},
    "validate": {"core", "lit", "lightning"},
    "predict": {"core"},
    "export": {"core"},
    "prepare": {"core"},
    "fit_raw": {"core", "raw"},
    "compare": {"core", "parity"},
    "measure": {"core", "guard", "lit", "raw", "parity", "measure", "lightning"},
    "bench": {"core", "guard", "lit", "raw", "parity", "measure", "lightning"},
    "trace": {"core", "guard", "lit", "raw", "parity", "measure", "lightning"},
}


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def breaches(part: str, names: set[str]) -> set[str]:
    ours = {name.split(".")[1] for name in names if name.startswith("project.")}
    frameworks = {name.split(".")[0] for name in names} & {"lightning", "pytorch_lightning", "lightning_fabric"}
    return (ours | frameworks) - MAY_IMPORT[part]


def part_of(file: Path) -> str:
    inside = file.relative_to(PROJECT)
    return inside.as_posix() if inside.as_posix() in MAY_IMPORT else inside.parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", sorted(PROJECT.rglob("*.py")), ids=lambda file: str(file.relative_to(PROJECT)))
def test_imports_follow_the_table(file: Path) -> None:
    if file == PROJECT / "__init__.py":
        assert not imported(file)
    else:
        assert not breaches(part_of(file), imported(file))


def test_the_table_would_notice() -> None:
    assert breaches("core", {"project.lit.module.Classifier", "torch.nn"}) == {"lit"}
    assert breaches("predict", {"lightning.pytorch.Trainer"}) == {"lightning"}


@pytest.mark.parametrize("folder", ["project", "tests"])
def test_no_file_is_read_or_written_in_the_encoding_of_the_locale(folder: str) -> None:
    """`open` and `Path.open` of text, `read_text` and `write_text` name theirs."""
    found = []
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and opens_text(node) and not any(word.arg == "encoding" for word in node.keywords):
                found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert found == []


def opens_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return isinstance(call.func, ast.Attribute)  # of a path
    owner = getattr(call.func, "value", None)
    if name != "open" or getattr(owner, "id", "") in ("os", "tarfile", "gzip", "Image"):
        return False
    given = call.args[1:2] if owner is None else call.args[:1]
    modes = [mode.value for mode in given if isinstance(mode, ast.Constant)] or (["r"] if owner is None else [])
    return any(isinstance(mode, str) and set(mode) <= set("rwxa+t") for mode in modes)


def test_light_commands_load_no_lightning() -> None:
    """A comparison reads records: torchvision, which it does not need, takes as long to import as torch."""
    light = "project.predict, project.export, project.prepare, project.fit_raw, project.raw.run"
    frameworks = "('lightning', 'pytorch_lightning', 'lightning_fabric')"
    code = "import sys, project.parity.report; print('torchvision' in sys.modules); "
    code += f"import {light}; print([m for m in {frameworks} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout
    assert found.split() == ["False", "[]"]


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_configs_parse(config: Path) -> None:
    cli = TrainCLI(expand(["--config", str(config), "--data.root", "digits", "--devices", "1"], train=True))
    assert cli.config.seed_everything == 1
    header = config.read_text(encoding="utf-8").split("\n\n")[0]
    for word in ("Command:", "Hardware:", "Cost:", "Expected:", "per-rank batch"):
        assert word in header
