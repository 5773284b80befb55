"""The tree is the diagram: who may import whom, and that every config is one that the commands accept."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import project
from project.lit.cli import TrainCLI
from project.settings.arguments import expand
from tests.conftest import REPOSITORY

PROJECT = REPOSITORY / "project"

ALONE = ("settings", "data", "model", "runtime", "report", "record", "preflight", "subprocesses", "parity")
PRIVATE = {"project/ranks/private_torch.py", "project/lit/private_lightning.py"}
ON_THEIR_OWN = ("replica_guard.py", "attached.py")  # files that run without the project, and have a class Private
DOCUMENTED = {"os._exit", "atexit._run_exitfuncs", "_fields"}  # of Python; the second, although it is not, has the name since 3.0


def lint(folder: Path) -> int:
    """Exit code of import-linter with the contracts of a folder's pyproject.toml."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, stdout=subprocess.DEVNULL).returncode


def test_imports_follow_the_contracts_and_a_false_contract_is_noticed(tmp_path: Path) -> None:
    assert lint(REPOSITORY) == 0
    contracts = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert contracts.count('    "model",\n    "data",\n') == 1
    turned = contracts.replace('    "model",\n    "data",\n', '    "data",\n    "model",\n')  # a model asks how its images come
    (tmp_path / "pyproject.toml").write_text(turned, encoding="utf-8")
    assert lint(tmp_path) == 1


def test_every_room_is_drawn_in_the_map() -> None:
    drawn = re.findall(r"^(\w+)/", project.__doc__ or "", re.MULTILINE)
    rooms = {path.parent.name for path in PROJECT.glob("*/__init__.py")}
    assert sorted(drawn) == sorted(rooms)
    assert all((PROJECT / room / "__init__.py").read_text(encoding="utf-8").startswith('"""') for room in rooms)


@pytest.mark.parametrize("room", ALONE)
def test_what_knows_no_process_group_talks_to_none(room: str) -> None:
    for file in (PROJECT / room).rglob("*.py"):
        if file.name == "attached.py":  # it asks which rank it is, and sends nothing
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [
                    getattr(node, "module", "") or "",
                    *(f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names),
                ]
                assert not any("torch.distributed" in name or name.endswith("distributed") for name in names), file


def private_names(text: str) -> list[str]:
    """What a file uses of other people's private names: attributes, imports, and names given to getattr and the like."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_its_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_its_own and ast.unparse(node) not in DOCUMENTED:
                found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name.startswith("_") and not name.startswith("__")]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "vars"):
            strings = [given.value for given in node.args if isinstance(given, ast.Constant) and isinstance(given.value, str)]
            found += [name for name in strings if name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED]
    return found


def test_private_names_of_others_are_in_one_file_for_each_library() -> None:
    assert private_names("from torch._C import x\ngetattr(model, '_orig_mod')\nddp._reducer\nself._own\n") == [
        "_C",
        "_orig_mod",
        "ddp._reducer",
    ]
    for path in sorted(PROJECT.rglob("*.py")):
        name, text = path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8")
        if path.name in ON_THEIR_OWN:
            text, own = text.split("\nclass Private:\n")
            assert private_names(textwrap.dedent(own))
        assert name in PRIVATE or private_names(text) == [], name
    assert all(private_names((REPOSITORY / name).read_text(encoding="utf-8")) for name in PRIVATE)


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
