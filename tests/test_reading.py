"""What the pages in `notebooks/` say is there: links, names, tests; commands parse, and those that a CPU can run are run."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import project.lit.cli
from project.raw.cli import parse
from project.raw.distributed import find_rank
from project.runtime.errors import UserError
from project.runtime.launched import world_of_launcher
from project.settings.arguments import expand
from tests.conftest import REPOSITORY, run_module

NOTEBOOKS = REPOSITORY / "notebooks"
PAGES = {
    name: (NOTEBOOKS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("what_happens_in_one_step", "from_laptop_to_cluster", "guarantees")
}
BLOCKS = re.findall(
    r"<!-- (run|parse)(?:: (\w+) (\d) x (\d))? -->\n```bash\n(.*?)```", PAGES["from_laptop_to_cluster"], re.DOTALL
)


def names_in(file: Path) -> set[str]:
    """Functions, methods and classes."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


def named(page: str) -> list[tuple[str, str]]:
    """(name, file) wherever a page says "`name` in [file](link)", also of several names and several files."""
    link = r"\[[^\]]+\]\(([^)]+\.py)\)"
    found = []
    for names, links in re.findall(
        rf"((?:`\w+`(?: and )?)+)\s(?:in|of)(?: `\w+` of)?\s({link}(?:\s(?:and|or)\s{link})?)".replace("([^)]+", "(?:[^)]+"), page
    ):
        found += [(name, file) for name in re.findall(r"`(\w+)`", names) for file in re.findall(r"\(([^)]+)\)", links)]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)#]+)\)", PAGES[page]):
        assert (NOTEBOOKS / target).is_file(), target


def test_the_functions_that_a_step_goes_through_are_there() -> None:
    found = named(PAGES["what_happens_in_one_step"])
    assert len(found) > 25
    for name, file in found:
        assert name in names_in(NOTEBOOKS / file), f"{name} in {file}"
    assert "images/timeline.png" in PAGES["what_happens_in_one_step"]


def test_a_name_that_is_not_there_would_be_noticed() -> None:
    assert named("(`a` and `b` in [x](../x.py) and [y](y.py))") == [
        ("a", "../x.py"),
        ("a", "y.py"),
        ("b", "../x.py"),
        ("b", "y.py"),
    ]
    assert "wrap" in names_in(REPOSITORY / "project/raw/distributed.py")
    assert "unwrap" not in names_in(REPOSITORY / "project/raw/distributed.py")


def test_each_guarantee_names_a_test_that_exists() -> None:
    page = PAGES["guarantees"]
    tests = re.findall(r"`(tests/test_\w+\.py)::(\w+)`", page)
    assert len(tests) > 15
    for file, name in tests:
        assert name in names_in(REPOSITORY / file), f"{file}::{name}"
    rows = page.split("## What is equal\n")[1].split("\n## ")[0].split("\n- ")[1:]
    assert len(rows) > 8
    assert all(re.search(r"`(tests/|python -m project\.)", row) for row in rows)


def test_the_page_says_what_was_not_run() -> None:
    page = PAGES["from_laptop_to_cluster"]
    assert len(BLOCKS) == page.count("```bash") == 7
    for before, (kind, *_) in zip(page.split("```bash")[:-1], BLOCKS, strict=True):
        said = before.split("```")[-1]
        assert ("Runs in the tests" if kind == "run" else "Not run on such hardware") in said


def command_of(text: str) -> tuple[list[str], str, list[str]]:
    """(launcher and its options, module, arguments) of a block's last line."""
    words = [word for word in shlex.split(text.replace("\\\n", " ").strip().splitlines()[-1]) if not re.match(r"[A-Z_]+=", word)]
    at = words.index("-m")
    return words[:at], words[at + 1], words[at + 2 :]


def simulate(launcher: str, nodes: int, local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the second process on the last node, as torchrun or srun sets them."""
    rank = (nodes - 1) * local + 1
    if launcher == "torchrun":
        variables = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": nodes * local, "LOCAL_WORLD_SIZE": local, "RANK": rank}
        variables |= {"LOCAL_RANK": 1, "GROUP_RANK": nodes - 1, "MASTER_ADDR": "node0", "MASTER_PORT": 29500}
    else:
        own = {"STEP_ID": "0", "JOB_ID": "7", "JOB_NAME": "train", "NTASKS": nodes * local, "NTASKS_PER_NODE": local}
        own |= {
            "NNODES": nodes,
            "PROCID": rank,
            "LOCALID": 1,
            "NODEID": nodes - 1,
            "NODELIST": "node[0-1]",
            "JOB_NODELIST": "node[0-1]",
        }
        variables = {f"SLURM_{name}": value for name, value in own.items()}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block[0] == "parse"], ids=lambda block: block[4].split()[0])
def test_commands_for_clusters_parse(block: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, by, *size, text = block
    launcher, module, arguments = command_of(text)
    assert module == "project.fit"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    if by:
        nodes, local = map(int, size)
        simulate(by, nodes, local, monkeypatch)
        assert world_of_launcher() == (nodes * local, local)
        ranks = find_rank("cpu", [0] * local)
        assert (ranks.rank, ranks.local_rank, ranks.world_size) == ((nodes - 1) * local + 1, 1, nodes * local)
        given = launcher + re.findall(r"^#SBATCH (\S+)=(\S+)$", text, re.MULTILINE)
        assert options(given) >= {("nodes", str(nodes)), ("tasks", str(local))}
    else:
        found = dict(zip(arguments, arguments[1:], strict=False))
        nodes, local = int(found.get("--num_nodes", 1)), int(found["--devices"])
    trainer = project.lit.cli.TrainCLI(expand(arguments, train=True)).trainer
    assert (trainer.num_nodes, trainer.num_devices, trainer.world_size) == (nodes, local, nodes * local)
    own = parse(expand(arguments, train=True)).trainer
    assert (own.num_nodes, own.devices) == (nodes, local)
    if by:
        arguments = [*arguments, "--devices", str(local + 1)]
        with pytest.raises(UserError, match=f"is not the {nodes * local} processes"):
            parse(expand(arguments, train=True))


def options(given: list[str | tuple[str, str]]) -> set[tuple[str, str]]:
    """Nodes and tasks per node, by whatever name a launcher has for them; torchrun's own parser must take its options."""
    names = {
        "--nodes": "nodes",
        "--nnodes": "nodes",
        "--ntasks-per-node": "tasks",
        "--nproc-per-node": "tasks",
        "--gpus-per-node": "tasks",
    }
    if given[0] == "torchrun":
        parsed = get_args_parser().parse_args([*map(str, given[1:]), "script.py"])
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend) == ("2", "4", "c10d")
    pairs = [*zip(given, given[1:], strict=False), *(each for each in given if isinstance(each, tuple))]
    return {(names[name], value) for name, value in pairs if name in names}


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block[0] == "run"], ids=lambda block: block[4].split()[0])
def test_commands_for_a_laptop_run(block: tuple[str, ...], tmp_path: Path) -> None:
    launcher, module, arguments = command_of(block[4])
    elsewhere = ["--trainer.default_root_dir", tmp_path, "--accelerator", "cpu"]
    if launcher[0] == "torchrun":
        module, arguments = "torch.distributed.run", [*launcher[1:], "-m", module, *arguments]
    finished = run_module(module, *arguments, *elsewhere, env={"OMP_NUM_THREADS": "1"}, timeout=200)
    assert finished.code == 0, finished.err
    assert "64 images per step = 2 ranks x 32" in finished.out
    assert (tmp_path / "runs/0/checkpoints/last.ckpt").is_file()
