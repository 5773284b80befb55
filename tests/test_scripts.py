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
from project.parity.script_reasons import accepted, find_reasons, present
from project.parity.script_rounding import measure_rounding
from project.parity.script_run import ScriptRun
from project.parity.script_verdict import reason_lines, script_lines
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
    """What the ranks of a case have printed of their weights in the end, and of their compiled graphs."""
    return set(re.findall(r"rank \d+: [0-9a-f]{64}|\d+ graphs, \d+ breaks", out))


# Real scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        command("classifier", "--norm", ranks=2),
        command("lightning_module"),
        command("two_optimizers"),
        command("no_loader"),
        command("compiled"),
    ],
    ids=["torchrun", "lightning", "two optimizers", "no loader", "compiled"],
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
        (command("classifier"), command("classifier", "--seed", "2"), "step 0, rank 0: samples are others"),
    ],
    ids=["not deterministic", "samples"],
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
    assert re.search(r"^inputs of the forward +36  equal$", done.out, re.MULTILINE)
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


@pytest.mark.slow
def test_the_split_over_ranks_is_rounding_and_a_missing_average_is_not(tmp_path: Path) -> None:
    one, both = command("classifier"), command("classifier", ranks=2)
    done = compare(tmp_path / "split", "--anchored", "--a", one, "--b", both)
    assert done.code == 0, done.out + done.err
    text = " ".join(done.out.split())
    assert "Equal up to rounding: each of 8 steps of b began where a began it" in text
    [times] = re.findall(r"by no more than (\S+) of what is allowed", text)
    assert 0 < float(times) < 1
    done = compare(tmp_path / "fault", "--anchored", "--a", one, "--b", command("classifier", "--unwrapped", ranks=2))
    assert done.code == 1, done.out + done.err
    text = " ".join(done.out.split())
    assert "Different, first in step 0: gradients after backward" in text
    assert "It is more than rounding, first in step 0, which began where a began it: gradients after backward" in text


@pytest.mark.slow
def test_batchnorm_over_each_ranks_images_is_tested_and_named(tmp_path: Path) -> None:
    given = [
        "--anchored",
        "--steps",
        "3",
        "--a",
        command("classifier", "--norm"),
        "--b",
        command("classifier", "--norm", ranks=2),
    ]
    done = compare(tmp_path / "out", *given, "--accept", "batchnorm")
    assert done.code == 0, done.out + done.err
    text = " ".join(done.out.split())
    assert "It is more than rounding, first in step 0" in text
    assert "Tested with batchnorm-eval: nothing beyond rounding is left. Explained by batchnorm." in text
    assert "[batchnorm-eval]" in done.out


@pytest.mark.slow
def test_a_rate_is_tested_and_another_fault_is_not_explained_by_batchnorm(tmp_path: Path) -> None:
    a, b = command("classifier"), command("classifier", "--lr", "0.2")
    done = compare(tmp_path / "rate", "--anchored", "--steps", "3", "--a", a, "--b", b)
    assert done.code == 1, done.out + done.err
    text = " ".join(done.out.split())
    assert "Different, first in step 0, rank 0: learning rates are [0.1] and [0.2]" in text
    assert "Tested with rate:0.5: nothing beyond rounding is left. Explained by rate. With --accept rate" in text
    a, b = command("classifier", "--norm", ranks=2), command("classifier", "--norm", "--unwrapped", ranks=2)
    done = compare(tmp_path / "fault", "--anchored", "--steps", "2", "--a", a, "--b", b, "--accept", "batchnorm")
    assert done.code == 1, done.out + done.err
    text = " ".join(done.out.split())
    assert "Tested with batchnorm-eval: left is step 0: gradients after backward" in text
    assert text.endswith("Not explained: each reason that is present was tested.")


@pytest.mark.slow
def test_a_resume_is_compared_with_the_whole_run(tmp_path: Path) -> None:
    saved = str(tmp_path / "c.pt")
    whole = command("resumed", saved)
    exact = compare(tmp_path / "exact", "--from-step", "4", "--a", whole, "--b", command("resumed", saved, "--resume"))
    assert exact.code == 0, exact.out + exact.err
    assert "a  4 steps on 1 rank\nb  4 steps on 1 rank\n" in exact.out
    assert re.search(r"^weights before the first step +4  equal$", exact.out, re.MULTILINE)
    other = run_module(
        "project.record", "--out", tmp_path / "b", "--", *command("resumed", saved, "--resume", "--forget").split()
    )
    assert other.code == 0, other.err
    forgotten = compare(tmp_path / "forgotten", "--from-step", "4", "--runs", str(tmp_path / "exact" / "a"), str(tmp_path / "b"))
    assert forgotten.code == 1
    assert "Different, first in step 0, rank 0: weights after the step" in " ".join(forgotten.out.split())
    late = compare(tmp_path / "late", "--from-step", "8", "--runs", str(tmp_path / "exact" / "a"), str(tmp_path / "b"))
    assert late.code == 2
    assert "--from-step 8: a has 8 steps. Give a smaller number." in late.err


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
print("trained", flush=True)
"""


@pytest.mark.slow
def test_sharded_training_is_refused_by_name_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sharded.py").write_text(SHARDED, encoding="utf-8")
    done = compare(tmp_path / "out", "--a", f"{TORCHRUN} {tmp_path / 'sharded.py'}")
    assert done.code == 2
    assert done.out.count("trained") == 4
    assert "DTensor) cannot be compared: no rank has the whole of a tensor." in done.err


# What needs no training


def made(**changes: Any) -> dict[str, Any]:
    """A step that never was."""
    tensor = attached.digest(torch.arange(4.0))
    parts = {name: {"fc.weight": tensor} for name in ("initial", "local", "reduced", "clipped", "weights", "buffers", "state")}
    batch = {"index": [3, 1], "inputs": {"0": tensor}, "rows": {}, "outputs": {"0": tensor}}
    return {"batches": [batch], "lr": [0.1], "modules": ["Linear"], **parts, **changes}


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


def test_what_is_not_known_on_a_side_is_not_compared() -> None:
    batch = made()["batches"][0]
    found = outcome([made()], [made(batches=[{**batch, "index": None}])])
    assert found.equal
    assert found.compared["samples"] == 0
    sparse = made(local={"fc.weight": None})
    assert outcome([sparse], [sparse]).compared["local"] == 0


def stepped(change: float, *, seed: int = 0) -> ScriptRun:
    """Four steps of a run whose gradients have this much noise."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for step in range(4):
        gradient = torch.randn(2000, generator=torch.Generator().manual_seed(step))
        noisy = gradient + change * torch.randn(2000, generator=generator)
        steps.append(made(reduced={"fc.weight": attached.digest(noisy)}))
    return ScriptRun("x", {0: steps}, {0: {}})


@pytest.mark.parametrize(
    ("b", "other", "explains", "unmeasured"),
    [
        (1e-7, 1e-7, True, ""),
        (1e-5, 1e-7, False, ""),
        (0.0, 1e-7, True, ""),
        (1e-7, 0.0, False, "another order of the samples changes nothing"),
        (1e-7, 0.1, False, "which is no rounding"),
    ],
)
def test_rounding_is_judged_by_what_another_order_of_the_samples_makes(
    b: float, other: float, explains: bool, unmeasured: str
) -> None:
    found = measure_rounding(stepped(0.0), stepped(b, seed=1), stepped(other, seed=2))
    assert found.explains == explains
    assert unmeasured in found.unmeasured
    assert bool(found.unmeasured) == bool(unmeasured)
    if not explains and not unmeasured:
        assert found.beyond is not None
        assert found.beyond[:3] == (0, "reduced", "fc.weight")


def with_modules(*names: str, lr: float = 0.1) -> list[dict[str, Any]]:
    return [made(modules=list(names), lr=[lr])]


def test_reasons_are_tested_alone_and_then_together() -> None:
    found = outcome(with_modules("BatchNorm2d", "Dropout"), with_modules("BatchNorm2d", "Dropout", lr=0.2))
    assert [(reason.name, measures) for reason, measures in present(found)] == [
        ("batchnorm", ("batchnorm-eval", "batchnorm-eval")),
        ("dropout", ("dropout-off", "dropout-off")),
        ("rate", ("", "rate:0.5")),
    ]
    asked: list[tuple[str, str]] = []

    def left(measures: tuple[str, str]) -> str:
        asked.append(measures)
        return "" if measures[1].count(",") else "something"

    tested = find_reasons(found, left)
    assert asked[-1] == ("batchnorm-eval,dropout-off", "batchnorm-eval,dropout-off,rate:0.5")
    assert [each.explains for each in tested] == [False, False, False, True]
    assert accepted(tested, ["rate", "dropout", "batchnorm"])
    assert not accepted(tested, ["rate", "dropout"])
    assert "Explained by batchnorm, dropout, rate." in " ".join(reason_lines(tested))


def test_a_reason_that_is_not_present_is_not_tested_and_one_that_explains_ends_it() -> None:
    assert present(outcome(with_modules("Linear"), with_modules("Linear"))) == []
    assert find_reasons(outcome(with_modules("Linear"), with_modules("Linear")), lambda _: "") == []
    assert not accepted([], ["rate"])
    found = outcome(with_modules("BatchNorm2d", "Dropout"), with_modules("BatchNorm2d", "Dropout"))
    assert [each.names for each in find_reasons(found, lambda _: "")] == ["batchnorm"]
    nothing = find_reasons(found, lambda _: "left")
    assert "Not explained" in list(reason_lines(nothing))[-1]


MEASURES = """
import importlib.util, sys, torch
from torch import nn
spec = importlib.util.spec_from_file_location("intervene", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.intervene("batchnorm-eval,dropout-off,rate:3")
norm, block = nn.BatchNorm1d(2), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
x = torch.randn(4, 2)
print(torch.allclose(norm(x), x, atol=1e-4), norm.training, norm.num_batches_tracked.item())
y = torch.randn(2, 3, 8)
print(torch.equal(block(y), block(y)))
weight = nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
print(weight.item(), optimizer.param_groups[0]["lr"])
try:
    module.intervene("nothing")
except ValueError as error:
    print(error)
"""


FAILING = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import attached
recorder = attached.Recorder(None, None, sys.argv[2])
attached.digest = lambda *_, **__: 1 / 0
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
print(torch.is_tensor(batch), (model.weight.grad != 0).all().item())
"""


def test_a_recorder_that_fails_in_a_hook_leaves_the_training_alone_and_is_told(tmp_path: Path) -> None:
    script = [sys.executable, "-c", FAILING, str(Path(attached.__file__).parent), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")
    with pytest.raises(UserError, match="The recorder failed in process (.*\n)*ZeroDivisionError"):
        recorded(tmp_path, ["python"], 0)


def test_counter_measures_switch_one_thing_off() -> None:
    file = REPOSITORY / "project" / "record" / "intervene.py"
    done = subprocess.run([sys.executable, "-c", MEASURES, str(file)], capture_output=True, encoding="utf-8")
    assert done.stdout == "True True 0\nTrue\n-1.5 0.5\nthere is no counter-measure nothing\n", done.stderr


def test_a_batch_is_reordered_with_all_that_belongs_to_its_samples() -> None:
    batch = {"x": torch.arange(3), "more": [torch.arange(3) * 10, (torch.zeros(2), "name")]}
    found = attached.reordered(batch, torch.tensor([2, 0, 1]))
    assert found["x"].tolist() == [2, 0, 1]
    assert found["more"][0].tolist() == [20, 0, 10]
    assert found["more"][1][0].tolist() == [0, 0]
    assert found["more"][1][1] == "name"


def test_the_state_of_another_run_is_put_in_place() -> None:
    nets = [torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 1))]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        net(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    names = [
        {"module.weight": nets[0].weight, "module.bias": nets[0].bias},
        {"weight": nets[1][0].weight, "bias": nets[1][0].bias},
    ]
    kept = attached.whole(optimizers[0], names[0], None)
    assert attached.put_back(kept, optimizers[1], names[1], None) == []
    assert torch.equal(nets[0].weight, nets[1][0].weight)
    ours, theirs = (o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (nets[0].bias, nets[1][0].bias), strict=True))
    assert torch.equal(ours, theirs)
    assert attached.put_back(kept, optimizers[1], {"weight": nets[1][0].weight}, None) == ["bias"]


def test_contents_of_samples_are_compared_across_numbers_of_ranks() -> None:
    rows = [{"0": ["a", "b"]}, {"0.0": ["b"], "0.1": ["y"]}, {"0.0": ["a"], "0.1": ["x"]}, {"0.0": ["other"], "0.1": ["y"]}]
    whole, first, second, changed = (
        {**made()["batches"][0], "index": index, "rows": each} for index, each in zip([[3, 1], [1], [3], [1]], rows, strict=True)
    )
    one = ScriptRun("a", {0: [made(batches=[whole])]}, {0: {}})
    two = ScriptRun("b", {0: [made(batches=[first])], 1: [made(batches=[second])]}, {0: {}})
    assert compare_scripts(one, two).equal
    two = ScriptRun("b", {0: [made(batches=[changed])], 1: [made(batches=[second])]}, {0: {}})
    assert [each.what for each in compare_scripts(one, two).differences] == [
        "of 1 of 2 samples are others: augmentation, padding or noise"
    ]


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
    assert attached.bare(name) == known_as


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
        (["--anchored"], "--anchored needs --a"),
        (["--a", "python x.py", "--anchored", "--from-step", "2"], "--anchored and --from-step ask for different things"),
        (["--from-step", "3"], "--from-step needs --a and --b, or --runs"),
        (["--a", "python x.py", "--from-step", "-1"], "--from-step -1: give 0 or more"),
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


@pytest.mark.parametrize("file", ["attached.py", "intervene.py", "on_path/sitecustomize.py"])
def test_what_is_loaded_elsewhere_imports_nothing_of_ours(file: str) -> None:
    allowed = {"torch", "numpy", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse((REPOSITORY / "project" / "record" / file).read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.partition(".")[0] for name in names} <= allowed
