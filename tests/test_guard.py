"""The guard in a plain torchrun script: each mistake, as a person would type it, is named; healthy runs are left alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from project.guard.replica_guard import (
    DifferentModules,
    DifferentStart,
    Hang,
    OutOfStep,
    RepeatedSamples,
    checksums,
    compare_ends,
    compare_places,
    last_collective,
)
from tests.conftest import REPOSITORY, Ran, run_jobs, run_module
from tests.guard_healthy import BY_HAND, CASES
from tests.run_ranks import free_port

SCRIPT = (REPOSITORY / "notebooks/ddp_train.py").read_text(encoding="utf-8")
HEALTHY = (REPOSITORY / "tests/guard_healthy.py").read_text(encoding="utf-8")
LOOP = "        for images, target in guard(loader):\n"
STEP = "            guard.step()\n"
WATCHED = "guard = ReplicaGuard(ddp_model, optimizer)"


BACKWARD = "            loss.backward()\n"
OPTIMIZER_STEP = "            optimizer.step()\n"
OPTIMIZER = "    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)\n"
LOADER = "    sampler = DistributedSampler(dataset, seed=1)\n"
RAISES = "time.sleep(0.3 * rank)\n                raise ValueError('Expected more than 1 value per channel')"
TWICE = """def twice(state, bucket):
    future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(2))


"""
SUMMED = """def summed(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


"""
AT_9 = "            if rank == 1 and guard.steps == 9:\n                "  # its tenth step, in epoch 2

# name -> what is typed instead of what
MISTAKES = {
    "set-epoch": [("        sampler.set_epoch(epoch)\n", "")],
    "sampler": [("batch_size=BATCH, sampler=sampler", "batch_size=BATCH, shuffle=True"), ("sampler.set_epoch(epoch)", "pass")],
    "other-seed": [("        sampler.set_epoch(epoch)\n", "        sampler.set_epoch(2 * epoch + rank)\n")],
    "unwrapped": [("logits = ddp_model(images)", "logits = model(images)")],
    "no-sync": [("logits = ddp_model(images)", "with ddp_model.no_sync():\n                logits = ddp_model(images)")],
    "nudged": [(STEP, f"{AT_9}model.fc.weight.data[0, 0] += 1e-3\n{STEP}")],
    "rate": [(STEP, f"            optimizer.param_groups[0]['lr'] = 0.05 / (1 + rank)\n{STEP}")],
    "shorter": [("sampler=sampler)", "sampler=sampler if rank == 0 else list(sampler)[4:])")],
    "left-early": [(LOOP, f"{LOOP}            if rank == 1 and guard.steps == 12:\n                break\n")],
    "settings": [(WATCHED, "guard = ReplicaGuard(ddp_model, optimizer, settings={'lr': 0.1 * rank})")],
    "classes": [("model = SmallNet()", "dataset.classes = ['cat', 'dog'][: 1 + rank]\n    model = SmallNet()")],
    "skipped-step": [
        ("    guard = ", "    bad = rank == 1\n    guard = "),
        (LOOP, f"{LOOP}            if bad and guard.steps == 3:\n                bad = False\n                continue\n"),
    ],
    "skipped-collective": [
        (WATCHED, WATCHED.replace(")", ", timeout_s=3)")),
        (STEP, f"{STEP}            if not (rank == 1 and guard.steps == 9):\n                dist.all_reduce(loss.detach())\n"),
    ],
    "nan": [("logits = ddp", "images = images / (0 if rank == 1 and guard.steps == 9 else 1)\n            logits = ddp")],
    "averaged-twice": [(WATCHED, f"ddp_model.register_comm_hook(None, twice)\n    {WATCHED}"), ("def main", f"{TWICE}def main")],
    "summed": [(WATCHED, f"ddp_model.register_comm_hook(None, summed)\n    {WATCHED}"), ("def main", f"{SUMMED}def main")],
    "summed-after": [
        (OPTIMIZER_STEP, "            for p in model.parameters():\n                dist.all_reduce(p.grad)\n" + OPTIMIZER_STEP)
    ],
    "scaled": [
        (OPTIMIZER_STEP, f"            for p in model.parameters():\n                p.grad *= 1 + rank\n{OPTIMIZER_STEP}")
    ],
    "copied": [
        (OPTIMIZER, f"{OPTIMIZER.replace('ddp_model', 'copy.deepcopy(model)')}"),
        ("import os\n", "import copy\nimport os\n"),
    ],
    "layer": [
        ("    ddp_model = ", f"{OPTIMIZER.replace('ddp_', '')}    model.fc = nn.Linear(16, 10)\n    ddp_model = "),
        (OPTIMIZER, ""),
    ],
    "eval": [(WATCHED, f"{WATCHED}\n    ddp_model.train(rank == 0)")],
    "eval-later": [
        (
            "        sampler.set_epoch(epoch)\n",
            "        sampler.set_epoch(epoch)\n        ddp_model.train(epoch == 0 or rank == 0)\n",
        )
    ],
    "momentum": [("    ddp_model = ", "    model.bn2.momentum = 0.1 + rank\n    ddp_model = ")],
    "split": [
        (LOADER, f"    dataset, _ = random_split(dataset, [48, 16])\n{LOADER}"),
        ("DistributedSampler, ", "DistributedSampler, random_split, "),
    ],
    "seeded": [("manual_seed(0)", "manual_seed(dist.get_rank())")],
    "raises-on-all": [
        (BACKWARD, f"            if guard.steps == 9:\n                {RAISES}\n{BACKWARD}"),
        ("import os\n", "import os\nimport time\n"),
    ],
    "raises-on-one": [
        (
            BACKWARD,
            f"{AT_9}atexit.register(time.sleep, 60)\n                raise ValueError('no cat in this image')\n{BACKWARD}",
        ),
        ("import os\n", "import atexit\nimport os\nimport time\n"),
    ],
    "sleeps": [
        (WATCHED, WATCHED.replace(")", ", timeout_s=2, folder=os.environ['REPORTS'])")),
        (BACKWARD, f"{AT_9}time.sleep(60)\n{BACKWARD}"),
        ("import os\n", "import os\nimport time\n"),
    ],
}
STOPPED = [(WATCHED, WATCHED.replace(")", ", timeout_s=2)")), (BACKWARD, f"{AT_9}os.kill(os.getpid(), 19)\n{BACKWARD}")]


def changed(changes: list[tuple[str, str]]) -> str:
    text = SCRIPT
    for typed, instead in changes:
        assert text.count(typed) == 1, typed
        text = text.replace(typed, instead)
    return text


# What a training before this one has left in torchrun's store, which outlives a restart
STALE = """store = dist.distributed_c10d._get_default_store()
    for name in ("hello/1", "met/1", "state/0", "state/1"):
        store.set(f"replica_guard_0/{name}", "old")
    store.set("replica_guard_0/welcome/1", "old older")
    store.set("replica_guard_0/alarm", '{"kind": "uneven", "by": 0}')
    """
MISTAKES["restarted"] = [(WATCHED, STALE + WATCHED)]  # which is none


LATER = {  # by slow tests, to spare time
    *(
        "no-sync",
        "rate",
        "left-early",
        "settings",
        "sleeps",
        "other-seed",
        "classes",
        "summed",
        "summed-after",
        "scaled",
        "copied",
    ),
    *("restarted", "layer", "eval", "eval-later", "momentum", "split", "seeded", "raises-on-one"),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("guard")
    jobs = [{"name": name, "text": changed(MISTAKES[name])} for name in MISTAKES if name not in LATER]
    return run_jobs(folder, [{"name": "healthy", "text": SCRIPT}, *jobs])


@pytest.fixture(scope="module")
def ran_later(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("guard")
    environment = {"REPORTS": str(folder / "reports")}
    jobs = [{"name": name, "text": changed(MISTAKES[name]), "env": environment} for name in sorted(LATER)]
    results = run_jobs(folder, jobs)
    results["sleeps"].out.append((folder / "reports/stacks-rank-1.txt").read_text(encoding="utf-8").replace("Look at", ""))
    return results


def test_a_healthy_run_is_one_line_per_epoch(ran: dict[str, Ran]) -> None:
    assert ran["healthy"].codes == [0, 0]
    lines = ran["healthy"].out[0].splitlines()
    # 64 samples over 2 ranks in batches of 4 are 8 steps an epoch.
    said = [f"guard  epoch {n}: 64 samples on 2 ranks, each once; weights equal at step {8 * n}" for n in (1, 2, 3)]
    assert [line for line in lines if line.startswith("guard")] == said
    assert [line for line in ran["healthy"].out[1].splitlines() if not line.startswith("[Gloo]")] == []  # torch 2.10 prints one


def test_set_epoch_forgotten_is_named_at_the_second_epoch(ran: dict[str, Ran]) -> None:
    report = ran["set-epoch"].report()
    assert report.startswith("epoch 2 has the same order as the one before: its first samples are again ")
    assert "found after step 8" in report
    assert "set_epoch was not called" in report


def test_no_distributed_sampler_is_named_before_the_first_step(ran: dict[str, Ran]) -> None:
    report = ran["sampler"].report()
    assert report.startswith("every rank draws from the whole data set: the loader has a RandomSampler")
    assert "2 ranks x 16 batches of 4 are 128 samples an epoch, of 64" in report
    assert "before step 1" in report


def test_the_unwrapped_module_is_named_after_one_step(ran: dict[str, Ran]) -> None:
    report = ran["unwrapped"].report()
    assert report.startswith("weights differ between the ranks after step 1; they were equal before step 1")
    assert "the module was called instead of its DDP wrapper" in report
    assert "largest difference" in report


@pytest.mark.slow
def test_no_sync_is_named(ran_later: dict[str, Ran]) -> None:
    assert "each of its forwards was under no_sync()" in ran_later["no-sync"].report()


def test_weights_of_one_rank_are_named_with_tensor_and_size(ran: dict[str, Ran]) -> None:
    report = ran["nudged"].report()
    assert report.startswith("weights differ between the ranks after step 16; they were equal after step 8")
    assert "1 of 16 differ: fc.weight\n" in report
    assert "largest difference: 0.001 in fc.weight" in report
    assert "was changed by itself" in report


@pytest.mark.slow
def test_learning_rates_of_the_ranks_are_named(ran_later: dict[str, Ran]) -> None:
    assert "The learning rates differ" in ran_later["rate"].report()


def test_a_shorter_loader_is_named_before_the_first_step(ran: dict[str, Ran]) -> None:
    report = ran["shorter"].report()
    assert report.startswith("the loaders of the ranks differ before step 1: batches")
    assert [line.split()[:2] for line in report.splitlines()[2:4]] == [["0", "8"], ["1", "7"]]


@pytest.mark.slow
def test_a_rank_that_leaves_the_epoch_is_named(ran_later: dict[str, Ran]) -> None:
    assert ran_later["left-early"].report().startswith("rank 1 left the epoch after 5 batches")


@pytest.mark.slow
def test_other_settings_are_named(ran_later: dict[str, Ran]) -> None:
    assert ran_later["settings"].report().startswith("the settings of the ranks differ before step 1: lr")


def test_a_skipped_step_is_named(ran: dict[str, Ran]) -> None:
    assert ran["skipped-step"].report().startswith("rank 1 skipped a step: it made none with a batch that came before its step 4")


def test_a_skipped_collective_is_named(ran: dict[str, Ran]) -> None:
    report = ran["skipped-collective"].report()
    assert report.startswith("rank 1 skipped a collective before 'forward' of step 10: rank 0 still waits in one")
    assert ("gloo:all_reduce" in report) == records_gloo()


def records_gloo() -> bool:
    """Whether this torch records gloo's collectives, without being asked to: 2.10 does not."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        dist.all_reduce(torch.ones(1))
        return last_collective() is not None
    finally:
        dist.destroy_process_group()


def test_the_first_bad_gradient_is_named_with_its_samples(ran: dict[str, Ran]) -> None:
    report = ran["nan"].report()
    assert report.startswith("a gradient of step 10 is NaN or infinite, the first one (found after step 16)")
    rows = [line.split() for line in report.splitlines()[2:4]]
    assert rows[0][:2] == ["0", "finite"]
    assert rows[1][:3] == ["1", "not", "finite"]
    assert len(rows[0][2:]) == len(rows[1][3:]) == 4
    assert report.rstrip().endswith("Save only after guard.finite().")  # the author of a script can


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_all_stacks(ran_later: dict[str, Ran]) -> None:
    report = ran_later["sleeps"].report()
    assert report.startswith("rank 1 did not come: rank 0 has waited 2 s in step 10")
    assert "time.sleep(60)" in report
    assert "loss.backward()" in report
    assert "main" in ran_later["sleeps"].out[-1]


@pytest.mark.slow
def test_a_stopped_rank_is_named_silent(tmp_path: Path) -> None:
    report = run_jobs(tmp_path, [{"name": "stopped", "text": changed(STOPPED)}])["stopped"].report()
    assert report.startswith("rank 1 did not come: rank 0 has waited 2 s in step 10")
    assert "rank 1: no answer" in report


@pytest.mark.slow
def test_ranks_that_shuffle_differently_are_named(ran_later: dict[str, Ran]) -> None:
    report = ran_later["other-seed"].report()
    assert "see the same samples" in report or "used samples more than once" in report


@pytest.mark.slow
def test_other_classes_are_named(ran_later: dict[str, Ran]) -> None:
    assert ran_later["classes"].report().startswith("the loaders of the ranks differ before step 1: classes")


def test_gradients_that_are_averaged_twice_are_named(ran: dict[str, Ran]) -> None:
    report = ran["averaged-twice"].report()
    assert report.startswith("the gradient of step 1 is 0.5 times the mean of the ranks' own gradients: averaged twice")
    assert "tensors: 8 of 8" in report
    assert "twice, in the communication hook twice" in report


@pytest.mark.slow
def test_gradients_that_are_summed_are_named(ran_later: dict[str, Ran]) -> None:
    report = ran_later["summed"].report()
    assert report.startswith("the gradient of step 1 is 2 times the mean of the ranks' own gradients: summed")
    after = ran_later["summed-after"].report()
    assert after.startswith("the gradient of step 1 is 2 times the mean of the ranks' own gradients: summed")
    assert "Fix: leave out the all_reduce of gradients after backward." in after


@pytest.mark.slow
def test_gradients_that_one_rank_has_scaled_are_named(ran_later: dict[str, Ran]) -> None:
    report = ran_later["scaled"].report()
    assert report.startswith("weights differ between the ranks after step 1")
    rows = [line.split() for line in report.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert rows == [["0", "1"], ["1", "2"]]
    assert "The gradients of step 1 were alike on all ranks after backward." in report


@pytest.mark.slow
def test_an_optimizer_of_a_copy_is_named(ran_later: dict[str, Ran]) -> None:
    report = ran_later["copied"].report()
    assert report.startswith("the optimizer trains nothing of the model (found after step 1)")
    assert report.splitlines()[2].split() == ["0", "0", "8", "8"]  # optimizer, group, parameters, not the model's
    layer = ran_later["layer"].report()
    assert layer.startswith("the optimizer trains not all of the model: 2 of 8 parameters are left out (found after step 2)")
    assert "in no optimizer: fc.weight, fc.bias" in layer


@pytest.mark.slow
def test_other_settings_of_modules_are_named(ran_later: dict[str, Ran]) -> None:
    report = ran_later["eval"].report()
    assert report.startswith("modules have other settings on some ranks, in the forward of step 1: the model (SmallNet) training")
    assert "Fix: call ddp_model.train() on all ranks" in report
    report = ran_later["eval-later"].report()  # in no step of epoch 2 are weights compared
    assert report.startswith("modules have other settings on some ranks, in the forward of step 9: the model (SmallNet) training")
    report = ran_later["momentum"].report()
    assert report.startswith("the modules' settings of the ranks differ before step 1: bn2 (BatchNorm2d) momentum\n")
    assert [line.split() for line in report.splitlines()[2:4]] == [["0", "0.1"], ["1", "1.1"]]


@pytest.mark.slow
def test_data_that_differ_though_their_numbers_agree_are_named(ran_later: dict[str, Ran]) -> None:
    assert ran_later["split"].report().startswith("the data sets of the ranks differ before step 1: indices, sample 0")
    assert (
        ran_later["seeded"].report().startswith("the data sets of the ranks differ before step 1: tensors 0, tensors 1, sample 0")
    )


def test_an_exception_on_all_ranks_is_left_alone(ran: dict[str, Ran]) -> None:
    result = ran["raises-on-all"]
    assert not result.late
    for text in result.out:  # of rank 1, whose launcher may have ended it before
        assert "ReplicaError" not in text
        assert "left the epoch" not in text
    assert "ValueError: Expected more than 1 value per channel" in result.out[0]


@pytest.mark.slow
def test_an_exception_on_one_rank_is_named_to_the_others(ran_later: dict[str, Ran]) -> None:
    report = ran_later["raises-on-one"].report()
    assert report.startswith("rank 1 has ended in step 10: ValueError: no cat in this image")
    assert "ValueError: no cat in this image" in ran_later["raises-on-one"].out[1]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["stopped", "gone"])
def test_a_rank_whose_store_is_gone_ends(ends: str, tmp_path: Path) -> None:
    """Rank 0 keeps the store. Stopped, it is like a cut network, and rank 1 waits in gloo. Gone, it fails at once; as on a GPU
    nobody sees then whether the training thread waits or computes: it stands in one call."""
    watched = WATCHED.replace(")", ", timeout_s=3)")
    first, other = {
        "stopped": ("os.kill(os.getpid(), 19)", "None"),
        "gone": ("os._exit(0)", "time.sleep(100)"),
    }[ends]
    end = f"            if guard.steps == 9:\n                {first} if rank == 0 else {other}\n"
    changes = [(WATCHED, watched if ends == "stopped" else f"{watched}\n    guard.watchdog.device = torch.device('cuda')")]
    changes += [(LOOP, f"{LOOP}{end}"), ("import os\n", "import os\nimport time\n")]
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    result = run_jobs(tmp_path, [{"name": "gone", "text": changed(changes), "env": own, "timeout": 60}])["gone"]
    assert result.codes[1] == 1, result.out
    assert "rank 1 ends, since its training thread waits and the guard can no longer reach the other ranks" in result.out[1]


@pytest.mark.slow
def test_what_an_earlier_attempt_has_left_in_the_store_is_not_read(ran_later: dict[str, Ran]) -> None:
    assert ran_later["restarted"].codes == [0, 0], ran_later["restarted"].out
    assert "guard  epoch 3: 64 samples on 2 ranks" in ran_later["restarted"].out[0]


@pytest.mark.slow
def test_torchrun_quotes_the_report_last(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(changed(MISTAKES["unwrapped"]), encoding="utf-8")
    arguments = ["--nproc-per-node", "2", "--master-port", str(free_port()), str(script)]
    finished = run_module("torch.distributed.run", *arguments, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)})
    assert finished.code == 1
    assert finished.err.count("the module was called instead of its DDP wrapper") == 1
    assert "ReplicaError: weights differ" in "\n".join(finished.err.splitlines()[-4:])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_healthy_runs_are_left_alone(ranks: int, tmp_path: Path) -> None:
    environment = {"SAME_BITS": "1"} if ranks == 2 else {}
    job = {"name": "healthy", "text": HEALTHY, "ranks": ranks, "timeout": 150, "env": environment}
    result = run_jobs(tmp_path, [job])["healthy"]
    assert result.codes == [0] * ranks, result.out
    assert [line for line in result.out[0].splitlines() if line.startswith("fine")] == [
        f"fine: {name}" for name in [*CASES, *BY_HAND]
    ]
    assert result.out[0].count("same bits") == (ranks == 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_sees_one_element_and_an_exchange(dtype: torch.dtype) -> None:
    tensor = torch.arange(3000).remainder(2).to(dtype).reshape(3, 1000)
    other, exchanged = tensor.clone(), tensor.clone()
    other[2, 999] = 0
    exchanged[0, 0], exchanged[0, 1] = tensor[0, 1], tensor[0, 0]
    own, *different = checksums([tensor, other, exchanged]).tolist()
    assert own not in different
    assert checksums([tensor.clone(), torch.zeros(0)]).tolist() == [own, 0]


@pytest.mark.slow
def test_the_measurement_of_its_cost_runs(tmp_path: Path) -> None:
    text = (REPOSITORY / "project/measure/bench/guard_overhead.py").read_text(encoding="utf-8")
    ran = run_jobs(tmp_path, [{"name": "cost", "text": text, "env": {"ARCH": "resnet18", "PAIRS": "2"}}])["cost"]
    assert ran.codes == [0, 0]
    assert "ms in one that compares: " in ran.out[0]


def end(**changes: object) -> dict[str, object]:
    """What a rank says at the end of an epoch of 6 samples on two ranks."""
    said = {"epoch": 1, "batches": 2, "step": 2, "samples": 6, "share": 3, "spare": 0, "left": False, "first": None}
    return {**said, **changes}


def test_an_epoch_that_uses_samples_twice_is_found() -> None:
    twice = [torch.tensor([0, 1, 2]), torch.tensor([2, 3, 4])]
    breach, _ = compare_ends([end(), end()], twice, good_step=2)
    assert isinstance(breach, RepeatedSamples)
    assert (breach.repeats, breach.different, breach.own) == (1, 5, [0, 0])
    # Of 5 samples one must be repeated so that two ranks get 3 each.
    filled = [end(samples=5, spare=1)] * 2
    assert compare_ends(filled, twice, good_step=2) == (
        None,
        "5 samples on 2 ranks, each once, 1 of them twice to fill up; weights equal at step 2",
    )


def test_modes_that_differ_in_the_first_forward_of_an_epoch_are_found() -> None:
    mode = "the model (Net) training"
    breach, _ = compare_ends([end(first=(9, {})), end(first=(9, {mode: "False"}))], [None, None], good_step=8)
    assert breach == DifferentModules([mode], [["True"], ["False"]], step=9)
    alike = [end(first=(9, {mode: "False"}))] * 2
    assert compare_ends(alike, [None, None], good_step=8)[0] is None


def test_other_parameters_are_found() -> None:
    other = dict.fromkeys(("settings", "loader", "modules", "data"), {})
    facts = [{**other, "parameters": {"fc.weight": f"[{n}, 4] torch.float32"}} for n in (2, 3)]
    breach = DifferentStart.find(facts)
    assert breach is not None
    assert breach.names == ["fc.weight"]
    assert DifferentStart.find([facts[0], facts[0]]) is None


def state(step: int, phase: str, *, idle: float = 0.0, runs: list[list[int]] | None = None) -> dict[str, object]:
    passes = {"1": [step, False, step, runs or [[1, 1, 2]]]}
    return {"step": step, "phase": phase, "idle": idle, "passes": passes, "ended with": None}


def test_ranks_that_wait_for_each_other_are_found() -> None:
    places = [state(4, "after forward", idle=11), state(5, "forward", idle=12)]
    assert Hang.find(places, patience_s=10) == Hang(11)
    assert Hang.find([places[0], places[0]], patience_s=10) is None  # for the same: perhaps the network is slow
    assert Hang.find([places[0], state(5, "forward")], patience_s=10) is None  # one of them works


def test_a_step_with_fewer_collectives_is_found_once_both_have_made_it() -> None:
    ahead, behind = state(6, "forward", runs=[[1, 1, 2], [5, 1, 1]]), state(4, "forward")
    assert compare_places([ahead, behind]) is None
    assert compare_places([ahead, state(5, "forward")]) == OutOfStep(5, [[1, 1], [1, 2]])
