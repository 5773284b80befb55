"""Trainings of anyone's: recorded without a changed line and a changed bit, compared, and refused where nothing can be said."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from project.compare import parse
from project.parity.recorded_run import CannotTell
from project.parity.script_comparison import ScriptOutcome, compare_records, compare_scripts
from project.parity.script_run import ScriptRun, bare
from project.parity.script_verdict import script_lines
from project.record import attached
from project.record.recorded_command import ON_PATH, recorded, recorded_processes, run_recorded
from project.runtime.errors import UserError
from tests.conftest import REPOSITORY, Finished, run_module

CASES = REPOSITORY / "tests" / "cases"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def command(case: str, *flags: str, ranks: int = 1) -> str:
    start = TORCHRUN if ranks > 1 else sys.executable
    return " ".join([start, str(CASES / f"{case}.py"), *flags])


def compare(out: Path, *arguments: str) -> Finished:
    return run_module("project.compare", "--out", out, *arguments, env=ONE_THREAD, timeout=200)


def weights_of(out: str) -> set[str]:
    """What the ranks of a case have printed of their weights in the end."""
    return set(re.findall(r"rank \d+: [0-9a-f]{64}", out))


# Real scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [command("classifier", "--norm", ranks=2), command("lightning_module"), command("two_optimizers"), command("no_loader")],
    ids=["torchrun", "lightning", "two optimizers", "no loader"],
)
def test_recording_changes_no_bit_and_a_deterministic_script_equals_itself(typed: str, tmp_path: Path) -> None:
    alone = subprocess.run(typed.split(), env={**os.environ, **ONE_THREAD}, timeout=100, capture_output=True, encoding="utf-8")
    assert alone.returncode == 0, alone.stderr
    done = compare(tmp_path / "out", "--a", typed)
    assert done.code == 0, done.out + done.err
    assert done.out.endswith("Equal, to the bit.\n")
    assert weights_of(alone.stdout) == weights_of(done.out) != set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        (command("no_loader", "--noise"), "", "step 3, rank 0: inputs of the forward ids of forward 0"),
        (command("classifier"), command("classifier", "--lr", "0.2"), "step 0, rank 0: learning rates are [0.1] and [0.2]"),
        (command("classifier"), command("classifier", "--seed", "2"), "step 0, rank 0: samples are others"),
        (
            command("classifier", ranks=2),
            command("classifier", "--unwrapped", ranks=2),
            "step 0, rank 0: gradients after backward",
        ),
    ],
    ids=["not deterministic", "rate", "samples", "not averaged"],
)
def test_the_first_difference_is_named(a: str, b: str, first: str, tmp_path: Path) -> None:
    done = compare(tmp_path / "out", "--a", a, *(["--b", b] if b else []))
    assert done.code == 1, done.out + done.err
    assert f"Different, first in {first}" in " ".join(done.out.split())


@pytest.mark.slow
def test_one_rank_and_two_take_the_same_samples_and_differ_by_little(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", "--steps", "3", "--a", command("classifier"), "--b", command("classifier", ranks=2))
    assert done.code == 1, done.out + done.err
    assert "a  3 steps on 1 rank\nb  3 steps on 2 ranks\n" in done.out
    assert re.search(r"^samples +36  equal$", done.out, re.MULTILINE)
    [size] = re.findall(r"gradients after backward +4  step 0: .*, by (\S+) of the norm", done.out)
    assert 0 < float(size) < 1e-5
    assert "How much of it is rounding was not measured" in done.out
    assert weights_of(done.out) == set()  # both were ended after their third step


@pytest.mark.slow
def test_what_a_comparison_has_started_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "forever.py"
    script.write_text("import time\nprint('there', flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    for number in (signal.SIGTERM, signal.SIGKILL):
        out = tmp_path / str(number)
        typed = [sys.executable, "-m", "project.compare", "--out", str(out), "--a", f"{sys.executable} {script}"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "encoding": "utf-8"}
        with subprocess.Popen(typed, cwd=REPOSITORY, **pipes) as process:
            assert process.stdout is not None
            assert "there\n" in iter(process.stdout.readline, "")
            assert recorded_processes(out / "a")
            process.send_signal(number)
            assert process.wait(20) != 0
        deadline = time.monotonic() + 10
        while recorded_processes(out / "a") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert recorded_processes(out / "a") == []


# What needs no training


def made(**changes: Any) -> dict[str, Any]:
    """A step that never was."""
    tensor = attached.digest(torch.arange(4.0))
    parts = {name: {"fc.weight": tensor} for name in ("initial", "local", "reduced", "clipped", "weights", "buffers", "state")}
    batch = {"index": [3, 1], "inputs": {"0": tensor}, "rows": {}, "outputs": {"0": tensor}}
    return {"batches": [batch], "lr": [0.1], **parts, **changes}


def outcome(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, ranks: tuple[int, int] = (1, 1)) -> ScriptOutcome:
    sides = zip("ab", (ours, theirs), ranks, strict=True)
    a, b = (ScriptRun(name, dict.fromkeys(range(size), steps), {0: {"torch": name}}) for name, steps, size in sides)
    return compare_scripts(a, b)


PARTS = ("initial", "local", "reduced", "clipped", "weights", "buffers", "state")


def test_equal_steps_are_equal_and_an_environment_alone_is_no_difference() -> None:
    found = outcome([made(), made()], [made(), made()])
    assert found.equal
    assert found.environment == {"torch": ("a", "b")}
    assert list(script_lines(found))[-1] == "Equal, to the bit."


@pytest.mark.parametrize("part", PARTS)
def test_each_part_that_differs_is_found_where_it_does(part: str) -> None:
    other = {"fc.weight": attached.digest(torch.tensor([0.0, 1.0, 2.0, 3.5]))}
    found = outcome([made(), made()], [made(), made(**{part: other})])
    assert not found.equal
    [difference] = found.differences
    assert (difference.part, difference.step, difference.rank) == (part, 1, 0)
    assert difference.size == pytest.approx(0.5 / 14**0.5, rel=0.6)  # estimated
    assert "Different, first in step 1, rank 0:" in " ".join(script_lines(found))


def test_a_name_that_one_side_lacks_is_listed_and_no_equality() -> None:
    tensor = attached.digest(torch.ones(1))
    found = outcome([made()], [made(weights={**made()["weights"], "extra": tensor})])
    assert not found.equal
    assert found.unmatched == ["weights after the step: extra"]


def test_samples_in_another_order_are_not_others() -> None:
    batch = made()["batches"][0]
    found = outcome([made()], [made(batches=[{**batch, "index": [1, 3]}])])
    assert [each.what for each in found.differences] == ["are the same, in another order or in other batches"]
    found = outcome([made()], [made(batches=[{**batch, "index": [1, 4]}])])
    assert [each.what for each in found.differences] == ["are others: 1 of 2"]


def test_a_run_that_takes_fewer_steps_differs() -> None:
    found = outcome([made(), made()], [made()])
    assert [(each.step, each.what) for each in found.differences] == [(1, "2 steps in a, 1 in b")]


def test_records_of_no_step_are_never_equal() -> None:
    assert not outcome([], []).equal


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("module.fc.weight", "fc.weight"),
        ("module._orig_mod.model.fc.weight", "fc.weight"),
        ("net._orig_mod.fc.weight", "net.fc.weight"),
        ("model", "model"),
        ("fc.module.weight", "fc.module.weight"),
    ],
)
def test_names_lose_their_wrappers(name: str, known_as: str) -> None:
    assert bare(name) == known_as


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is no record"),
        ('{"event": "start"}\n', "is no record"),
        ('{"event": "start", "rank": 0, "world_size": 1, "environment": {}}\n', "breaks off"),
        ('{"event": "start", "rank": 1, "world_size": 2, "environment": {}}\n{"event": "end", "steps": 0}\n', r"ranks \[1\]"),
    ],
)
def test_a_broken_record_is_never_equal(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "process-1.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(CannotTell, match=says):
        compare_records(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--b", "python x.py"], "--b needs --a"),
        (["--steps", "3"], "--steps needs --a"),
        (["--a", "python x.py", "--steps", "-1"], "--steps -1: give 1 step or more"),
        (["--a", "python x.py", "--max_epochs", "3"], "takes no --max_epochs: put it into the quotes"),
        (["--a", "python x.py", "--noise"], "--a and --noise ask for different things"),
    ],
)
def test_flags_that_make_no_sense_are_refused(typed: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(typed)


def test_commands_that_cannot_be_recorded_are_told(tmp_path: Path) -> None:
    tries: dict[str, Callable[[], object]] = {
        "nothing-here cannot be started": lambda: run_recorded(["nothing-here"], tmp_path),
        r"--timeout 0.3: sleep 60 has not ended in 0.3 s": lambda: run_recorded(["sleep", "60"], tmp_path, timeout=0.3),
        "false ended with exit code 1 before its first optimizer step": lambda: recorded(
            tmp_path, ["false"], run_recorded(["false"], tmp_path)
        ),
        "true took no optimizer step": lambda: recorded(tmp_path, ["true"], run_recorded(["true"], tmp_path)),
    }
    for says, attempt in tries.items():
        with pytest.raises(UserError, match=says):
            attempt()
    assert recorded_processes(tmp_path) == []


def test_another_sitecustomize_still_runs_and_no_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ON_PATH), str(tmp_path)]), attached.FOLDER: str(tmp_path)}
    code = "import sys; print('torch' in sys.modules, 'lockstep_recorder' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8").stdout
    assert out == "theirs\nFalse False\n"


def test_a_recorder_that_fails_is_told_and_leaves_the_script_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ON_PATH), attached.FOLDER: str(tmp_path / "r"), attached.STEPS: "many"}
    code = "import torch; print(torch.__name__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch\n", "")
    with pytest.raises(UserError, match="The recorder failed in process .*\n(.*\n)*ValueError: invalid literal"):
        recorded(tmp_path / "r", ["python"], 0)


@pytest.mark.parametrize("file", ["attached.py", "on_path/sitecustomize.py"])
def test_what_is_loaded_elsewhere_imports_nothing_of_ours(file: str) -> None:
    allowed = {"torch", "numpy", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse((REPOSITORY / "project" / "record" / file).read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.partition(".")[0] for name in names} <= allowed
