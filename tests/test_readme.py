"""Every command in the README is one that the programs accept."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import project.bench
import project.compare
import project.export
import project.predict
import project.prepare
import project.record.__main__
import project.trace
from project.faults.catalogue import FAULTS
from project.lit.cli import TrainCLI, ValidateCLI
from project.parity.matrix import EQUIVALENT, MATRIX, choose
from project.raw.cli import parse
from project.runtime.errors import UserError
from project.settings.arguments import expand
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Lines of bash blocks, and commands in backticks, from `python -m project` on."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    inline = re.findall(r"`(python -m project\.[^`]*)`", README)
    found = [match for line in [*blocks.splitlines(), *inline] for match in re.findall(r"-m (project\.\w+(?= |$).*)", line)]
    assert len(found) > 10
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_command_parses(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, *arguments = shlex.split(command)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    if module == "project.fit":
        arguments = expand([*arguments, "--print_config"], train=True)
        with pytest.raises(SystemExit) as ended:
            TrainCLI(arguments)
        assert ended.value.code == 0
    elif module == "project.compare":
        own, others = project.compare.parse(arguments)
        assert bool(own.runs) == ("--runs" in arguments)
        if own.inject:
            assert own.inject in {fault.name for fault in FAULTS}
        if own.matrix:
            assert choose(own.matrix)
        if not own.runs and own.a is None:
            with pytest.raises(SystemExit):
                parse(expand([*others, "--print_config"], train=True))
    elif module == "project.bench":
        assert project.bench.parse(arguments).what in module + " ".join(arguments)
    elif module == "project.trace":
        _, others = project.trace.parse(arguments)
        with pytest.raises(SystemExit):
            parse(expand([*others, "--print_config"], train=True))
    elif module == "project.fit_raw":
        with pytest.raises(SystemExit) as ended:
            parse(expand([*arguments, "--print_config"], train=True))
        assert ended.value.code == 0
    elif module == "project.validate":
        with pytest.raises(SystemExit) as ended:
            ValidateCLI(expand([*arguments, "--print_config"], train=False))
        assert ended.value.code == 0
    elif module == "project.record":
        assert project.record.__main__.parse(arguments)[1]
    elif module == "project.prepare":
        monkeypatch.setattr("sys.argv", [module, *arguments])
        with pytest.raises(UserError, match="--src .* is no folder"):
            project.prepare.main()
    else:
        program = {"project.predict": project.predict, "project.export": project.export}[module]
        monkeypatch.setattr("sys.argv", [module, *arguments])
        with pytest.raises(Exception, match="CKPT: there is no such file"):
            program.main()


def test_every_file_that_the_readme_names_is_there() -> None:
    rooms = "|".join(path.parent.name for path in (REPOSITORY / "project").glob("*/__init__.py"))
    for name in re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", README):
        assert (REPOSITORY / "project" / name).is_file(), name
    for name in re.findall(r"`((?:configs|tests)/[\w.]+)`", README):
        assert (REPOSITORY / name).exists(), name
    for name in re.findall(r"\]\((notebooks/[^)#]+)[)#]", README):
        assert (REPOSITORY / name).is_file(), name


def test_the_matrix_is_the_one_that_is_run() -> None:
    """Its table is matrix.md of a run; when rows are added or changed, it must be run again."""
    [table] = re.findall(r"<!-- matrix -->\n(.*?)<!-- /matrix -->", README, re.DOTALL)
    head, _, *found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    assert head == ["settings", "seed", "ranks", "steps", "compared", "result", "s"]
    assert [(row[0].replace(", ", "+"), int(row[1])) for row in found] == [(row.name, row.seed) for row in MATRIX]
    assert all(f"{row[2]}-rank" in row[0] and row[5] == EQUIVALENT for row in found)
    assert f"{len(MATRIX)} of {len(MATRIX)} equivalent, bit for bit" in table


def test_the_versions_that_were_tested_are_ones_that_can_be_installed() -> None:
    """Those that the README names, against the lower bounds of pyproject.toml; not those that are installed here."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    [tested] = re.findall(r"Tested on Linux with CPUs: (.*?), over gloo", README, re.DOTALL)
    named = dict(part.split() for part in tested.split(", "))
    assert named.pop("Python") in SpecifierSet(project["requires-python"])
    assert {"torch", "torchvision", "lightning"} <= named.keys()
    for name, version in named.items():
        assert floors[name].contains(version), f"{name} {version}"
