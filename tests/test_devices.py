"""What happens on GPUs, shown on a CPU: tensors of another device, other numbers of GPUs than there are here, unlike ones."""

import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import project.lit.run
import project.raw.run
from project.data.mixing import Mixing
from project.data.transforms import Normalize
from project.lit.accelerator import OwnGPU
from project.lit.checkpoint import AtomicCheckpointIO
from project.lit.metrics import TrainMetrics, ValMetrics
from project.lit.module import Classifier
from project.lit.preflight import check_validations
from project.measure.bench.paced_training import take_device
from project.model.checkpoint_file import RECORD, on_cpu, read_checkpoint, write_atomic
from project.model.ema import build_ema
from project.model.inference import load_trained
from project.model.optim import build_optimizer, build_schedule
from project.model.resnet import build_model
from project.model.weights import read_weights
from project.ranks.agreement import STOP, Agreement
from project.ranks.same_settings import check_alike, shared_settings
from project.raw import distributed
from project.raw.distributed import find_rank
from project.runtime.device import find_ranks
from project.runtime.errors import UserError
from project.settings.config import DataConfig, ModelConfig
from project.settings.plan import BatchPlan
from tests.a_record import a_record
from tests.conftest import REPOSITORY, run_jobs, training
from tests.test_resume import RUN, assert_equal, data, what_counts

__all__ = ["data"]

ONE = ["--devices", "1", "--guard.every", "0"]
FIT = {"project.fit": project.lit.run.fit, "project.fit_raw": project.raw.run.fit}
SETTINGS = {
    **{"precision": "bf16-mixed", "max_epochs": 1, "max_steps": -1, "accumulate_grad_batches": 1},
    **{"gradient_clip_val": None, "limit_train_batches": None},
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch say that this machine has so many GPUs, of these compute capabilities."""

    def have(count: int, *, capabilities: tuple[tuple[int, int], ...] = ()) -> None:
        of_each = dict(enumerate(capabilities or ((9, 0),) * count))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", of_each.__getitem__)

    return have


@pytest.fixture
def stored_by_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Path], None]:
    """Write a file whose tensors say that they were on the first GPU."""

    def write(content: Any, path: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
            torch.save(content, path)

    return write


# Checkpoints


def test_a_gpus_checkpoint_opens_without_one(stored_by_a_gpu: Callable[[Any, Path], None], tmp_path: Path) -> None:
    network = build_model(ModelConfig(arch="resnet18"), num_classes=2, seed=1)
    record = a_record(classes=["ant", "bee"]).to_dict()
    path = tmp_path / "last.ckpt"
    score = {"Best": {"best_model_score": torch.tensor(0.5)}}
    stored_by_a_gpu({"state_dict": network.state_dict(), "loops": {}, "callbacks": score, RECORD: record}, path)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, weights_only=True)
    content = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)  # as Lightning's strategies call it
    assert content["callbacks"]["Best"]["best_model_score"].device.type == "cpu"
    tensors, _ = read_weights(str(path), flag="--model.weights")
    trained = load_trained(ckpt_path=str(path), weights=None)  # of predict and export
    for found in (content["state_dict"], read_checkpoint(path)["state_dict"], tensors, trained.network.state_dict()):
        torch.testing.assert_close(dict(found), dict(network.state_dict()), rtol=0, atol=0)


def test_what_is_written_on_a_gpu_says_cpu(tmp_path: Path) -> None:
    with FakeTensorMode():
        weight = torch.zeros(3, device="cuda")
        state = OrderedDict(weight=weight)
        state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
        found = on_cpu({"state": state, "again": [weight, {"step": 3}], "pair": (weight,)}, {})
    assert found["state"]["weight"].device.type == "cpu"
    assert found["again"][0] is found["pair"][0] is found["state"]["weight"]  # stored once
    assert found["again"][1] == {"step": 3}
    assert found["state"]._metadata == state._metadata  # type: ignore[attr-defined]
    write_atomic({"weight": torch.ones(3)}, tmp_path / "last.ckpt")
    assert torch.equal(torch.load(tmp_path / "last.ckpt", weights_only=True)["weight"], torch.ones(3))


@pytest.mark.slow
def test_both_trainers_go_on_from_a_gpus_checkpoint(
    data: Path, stored_by_a_gpu: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    arguments = [*RUN, *ONE, "--data.root", str(data), "--trainer.default_root_dir"]
    assert FIT["project.fit_raw"]([*arguments, str(tmp_path / "whole")]) == 0
    first = [*arguments, str(tmp_path / "first"), "--trainer.max_steps", "3"]
    assert FIT["project.fit"]([*first, "--model.schedule", "cosine"]) == 0
    path = tmp_path / "first/runs/0/checkpoints/last.ckpt"
    stored_by_a_gpu(torch.load(path, weights_only=True), path)
    for module, fit in FIT.items():
        assert fit([*arguments, str(tmp_path / module), "--ckpt_path", str(path)]) == 0
    assert_equal(what_counts(tmp_path / "project.fit"), what_counts(tmp_path / "project.fit_raw"))


# What is made where another device is the default, as in Lightning's `configure_model`


def test_all_begins_on_the_cpu_with_the_seeds_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    recipe = {"arch": "resnet18", "ema_decay": 0.9, "optimizer": "adamw", "channels_last": True}
    config, mixes = ModelConfig(**recipe), DataConfig(mixup_alpha=0.2, cutmix_alpha=1.0)
    expected = build_model(config, num_classes=4, seed=1)
    module = Classifier(**recipe)
    datamodule = SimpleNamespace(num_classes=4, config=mixes, seed=1)
    module.trainer = SimpleNamespace(datamodule=datamodule, state=SimpleNamespace(fn="fit"))  # type: ignore[assignment]
    images, target = torch.rand(4, 3, 32, 32), torch.arange(4)
    mixed = [Mixing(mixes, num_classes=4, seed=1)(images, target, epoch=0, batch=k, rank=0) for k in range(4)]
    with torch.device("meta"):
        built = build_model(config, num_classes=4, seed=1)
        mixing, normalize = Mixing(mixes, num_classes=4, seed=1), Normalize()
        module.configure_model()
        assert module.model is not None
        ema = build_ema(module.model, config, warmup_steps=0)
        optimizer = build_optimizer(module.model, config)
        build_schedule(optimizer, config, steps_per_epoch=1, total_steps=2)
    assert ema is not None
    for network in (built, module.model, ema.model):
        torch.testing.assert_close(network.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert module.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]
    held = [*module.parameters(), *module.buffers(), *normalize.buffers()]
    metrics = [
        value for part in (module.val, module.val_ema) for metric in part.children() for value in metric.metric_state.values()
    ]
    assert {value.device.type for value in [*held, *metrics]} == {"cpu"}
    for each in (mixing, module.mixing):
        found = [each(images, target, epoch=0, batch=k, rank=0) for k in range(4)]
        torch.testing.assert_close(found, mixed, rtol=0, atol=0)
    module(images).sum().backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert {value.device.type for value in state} == {"cpu"}


def test_lightning_makes_the_model_where_another_device_is_the_default() -> None:
    """Why it matters: this is the context that `configure_model` is called in."""
    with SingleDeviceStrategy(device="meta").tensor_init_context():
        assert torch.zeros(1).device.type == "meta"
        assert next(build_model(ModelConfig(arch="resnet18"), num_classes=2, seed=1).parameters()).device.type == "cpu"


# Inference mode


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_sums_that_a_validation_has_begun_go_on_outside_of_it(mode: Callable[[], Any]) -> None:
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    state = SimpleNamespace(fn="fit")
    trainer: Any = SimpleNamespace(
        **{"log_every_n_steps": 50, "sanity_checking": False, "state": state, "callback_metrics": {}, "global_step": 1},
        **{"current_epoch": 0, "world_size": 1, "accumulate_grad_batches": 1, "loggers": []},
    )
    metrics = TrainMetrics()
    metrics.on_fit_start(trainer, module)
    metrics.on_train_start(trainer, module)
    batch = (None, torch.zeros(4), torch.arange(4))
    for loss in (1.0, 3.0):
        metrics.on_train_batch_end(trainer, module, {"batch_loss": torch.tensor(loss)}, batch, 0)
        with mode():
            metrics.on_validation_start(trainer, module)
            metrics.on_validation_end(trainer, module)
    assert [row["train/loss"] for row in metrics.means.history if "train/loss" in row] == [1.0, 3.0]
    val = ValMetrics(num_classes=2)
    for context in (mode(), nullcontext()):
        with context:
            val.begin()
            val.update(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
            assert val.images.compute() == 1
            for metric in val.children():
                metric.reset()


def test_lightnings_fit_validates_without_inference_mode() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, inference_mode=True)
    assert not trainer.fit_loop.epoch_loop.val_loop.inference_mode
    assert trainer.validate_loop.inference_mode


# Validations inside an epoch


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("interval", "places"), [("2", (3, 4, 5, 23)), ("0.34", (3,)), ("4", (4, 6))])
def test_a_validation_inside_an_epoch_resumes_exactly(
    interval: str, places: tuple[int, ...], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before one, inside it, after it and at the epoch's end, of 6 batches in windows of 2."""
    asked, at, answer = [], [0], Agreement.answer

    def counting(self: Agreement) -> str:
        asked.append(1)
        return STOP if len(asked) == at[0] else answer(self)

    monkeypatch.setattr(Agreement, "answer", counting)
    fit = FIT["project.fit"]
    arguments = [*RUN, *ONE, "--data.root", str(data), "--trainer.val_check_interval", interval, "--trainer.default_root_dir"]
    assert fit([*arguments, str(tmp_path / "whole")]) == 0
    expected = what_counts(tmp_path / "whole")
    assert [row["step"] for row in expected["validations"]] == ([2, 5] if interval == "4" else [1, 2, 3, 4, 5, 6])
    for n in places:
        asked.clear()
        at[0] = n
        assert fit([*arguments, str(tmp_path / str(n))]) == 128 + signal.SIGTERM
        at[0] = 0
        assert fit([*arguments, str(tmp_path / str(n)), "--ckpt_path", "last"]) == 0
        assert_equal(what_counts(tmp_path / str(n)), expected)


IN_VALIDATION = """
import os, signal, time
from project.lit.run import fit
from project.ranks.agreement import Agreement
from project.runtime.process import run_command

asks, seen = Agreement.after_validation_batch, []

def after_validation_batch(self, number):
    seen.append(number)
    if os.environ["RANK"] == "1" and len(seen) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    while len(seen) == 1 and not self._asked:  # or a quick validation would be over before anybody has heard of it
        time.sleep(0.01)
    return asks(self, number)

{stop}
run_command(lambda: fit({arguments}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_validation_inside_an_epoch_resumes_exactly_on_two_ranks(data: Path, tmp_path: Path) -> None:
    jobs = []
    for name, folder, stop, more in (
        ("whole", "whole", "", []),
        ("stopped", "resumed", "Agreement.after_validation_batch = after_validation_batch", []),
        ("resumed", "resumed", "", ["--ckpt_path", "last"]),
    ):
        arguments = [*RUN, "--devices", "2", "--data.root", str(data), "--trainer.val_check_interval", "2", *more]
        arguments += ["--data.drop_last", "true", "--trainer.default_root_dir", str(tmp_path / folder)]
        text = IN_VALIDATION.format(arguments=arguments, stop=stop)
        environment = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}
        jobs.append({"name": name, "text": text, "env": environment, "timeout": 100})
    ran = run_jobs(tmp_path, jobs)
    assert ran["whole"].codes == ran["resumed"].codes == [0, 0], ran
    assert ran["stopped"].codes == [128 + signal.SIGTERM] * 2, ran["stopped"].out
    assert "goes on after step 1" in "".join(ran["stopped"].out)
    assert_equal(what_counts(tmp_path / "resumed"), what_counts(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"val_check_interval": "00:00:00:30"}, ["--trainer.val_check_interval of 30 s", "its own clock"]),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, ["val_check_interval 3", "inside a step", "multiple of 2"]),
        ({"val_check_interval": 0.5, "accumulate_grad_batches": 2}, ["val_check_interval 0.5", "every 3 batches"]),
        ({"val_check_interval": 7}, ["val_check_interval 7", "an epoch has 6 batches"]),
        (
            {"val_check_interval": 4, "check_val_every_n_epoch": None, "accumulate_grad_batches": 4},
            ["val_check_interval 4", "inside a step"],
        ),
        ({"val_check_interval": 4, "accumulate_grad_batches": 2}, []),
        ({"val_check_interval": 1.0, "accumulate_grad_batches": 4}, []),
        ({"val_check_interval": 8, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2}, []),
    ],
)
def test_validations_come_after_steps_or_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **settings)
    accumulate = trainer.accumulate_grad_batches
    plan = BatchPlan(
        global_batch_size=4 * accumulate, world_size=1, accumulate=accumulate, samples=24, drop_last=False, limit=1.0
    )
    with pytest.raises(UserError) if words else nullcontext() as caught:
        check_validations(trainer, plan)
    assert all(word in str(caught.value) for word in words) if caught else True


# Which GPU a rank takes


def test_devices_are_read_as_lightning_reads_them(gpus: Callable[..., None]) -> None:
    gpus(4)
    values: list[Any] = ["auto", "-1", -1, 2, "2", "1,3", "2,", [1, 3], [3]]
    for value in values:
        trainer = Trainer(accelerator="cuda", devices=value, logger=False, enable_checkpointing=False, strategy="ddp")
        assert find_ranks(value, device_type="cuda") == [device.index for device in trainer.strategy.parallel_devices]  # type: ignore[attr-defined]
    assert find_ranks("[1, 3]", device_type="cuda") == [1, 3]  # as a flag gives it to the raw trainer
    for value, words in (("5", "has 4 GPUs. Give at most 4"), ("0", "give a number"), ("1,4", "has 4 GPUs"), ("1,1", "once")):
        with pytest.raises(UserError, match=f"--devices {value}.*{words}"):
            find_ranks(value, device_type="cuda")
    assert find_ranks("auto", device_type="cpu") == [0]
    assert find_ranks("3", device_type="cpu") == [0, 1, 2]
    for value in ("-1", "1,3", "2,"):
        with pytest.raises(UserError, match=f"--devices {value} names GPUs, and this training runs on cpu"):
            find_ranks(value, device_type="cpu")


@pytest.fixture
def second_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process that torchrun has started."""
    names = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**names, "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


def test_a_rank_takes_the_gpu_that_the_list_gives_it(gpus: Callable[..., None], second_of_four: None) -> None:
    gpus(8)
    assert find_rank("cuda", find_ranks("1,3,5,7", device_type="cuda")).device == torch.device("cuda", 3)
    assert find_rank("cuda", find_ranks(4, device_type="cuda")).device == torch.device("cuda", 1)


def test_a_rank_that_sees_one_gpu_takes_that_one(
    gpus: Callable[..., None], second_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As srun --gpus-per-task 1 starts them: the second of four processes has no cuda:1."""
    gpus(1)
    with pytest.raises(UserError, match="--devices 4: this machine has 1 GPU\\."):  # one GPU for all four, as far as one can see
        find_ranks(4, device_type="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    ranks = find_rank("cuda", find_ranks(4, device_type="cuda"))
    assert (ranks.local_rank, ranks.device) == (1, torch.device("cuda", 0))
    trainer = Trainer(accelerator=OwnGPU(), devices=4, strategy="ddp", logger=False, enable_checkpointing=False)
    assert (trainer.strategy.local_rank, trainer.strategy.root_device, trainer.world_size) == (1, torch.device("cuda", 0), 4)
    given = []
    monkeypatch.setattr(distributed, "DistributedDataParallel", lambda model, device_ids: given.append(device_ids))
    distributed.wrap(nn.Linear(1, 1), ranks)
    assert given == [[0]]


def test_a_benchmark_sets_its_device(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert take_device(1, ranks=2) == torch.device("cpu")
    gpus(2)
    assert take_device(1, ranks=2) == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    with pytest.raises(UserError, match="has 2 GPUs"):
        take_device(2, ranks=3)


# One decision for all ranks


def test_ranks_with_other_settings_are_named() -> None:
    fast = ModelConfig(channels_last=False)
    ours = shared_settings(SimpleNamespace(**SETTINGS), fast, DataConfig(root="a", num_workers=1), seed=1)
    same = shared_settings(SimpleNamespace(**SETTINGS), fast, DataConfig(root="b", num_workers=2), seed=1)
    check_alike([ours, same])
    slower = SimpleNamespace(**{**SETTINGS, "precision": "32-true"})
    other = shared_settings(slower, ModelConfig(channels_last=True), DataConfig(), seed=1)
    with pytest.raises(UserError) as caught:
        check_alike([ours, same, other, other])
    lines = str(caught.value).splitlines()
    assert lines[1:3] == [
        "--trainer.precision: bf16-mixed on ranks 0, 1; 32-true on ranks 2, 3",
        "--model.channels_last: False on ranks 0, 1; True on ranks 2, 3",
    ]


UNLIKE = """
import os
import project.settings.arguments

project.settings.arguments.fast_precision = lambda *_: ("bf16-mixed", "32-true")[int(os.environ["RANK"])]
"""


@pytest.mark.slow
def test_ranks_on_unlike_machines_end_with_one_message(data: Path, tmp_path: Path) -> None:
    """Each has taken the precision of its own hardware."""
    (tmp_path / "c.yaml").write_text("trainer: {max_epochs: 1}\n", encoding="utf-8")
    flags = ["--config", tmp_path / "c.yaml", "--devices", "2", "--data.root", data, "--trainer.default_root_dir", tmp_path]
    flags += ["--model.arch", "resnet18", "--data.global_batch_size", "8", "--data.train_size", "32", "--data.num_workers", "0"]
    jobs = [training(module, module, flags) for module in FIT]
    jobs = [{**job, "text": UNLIKE + str(job["text"])} for job in jobs]
    for result in run_jobs(tmp_path, jobs).values():
        assert 2 in result.codes, result.out
        message = "--trainer.precision: bf16-mixed on rank 0; 32-true on rank 1"
        assert [message in text for text in result.out] == [True, False], result.out
        assert "Traceback" not in "".join(result.out)


# No barrier, and no host that waits


def test_an_interval_of_metrics_has_no_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's `strategy.reduce` has one: with NCCL the host then waits for the device."""
    calls: list[str] = []
    all_gather = dist.all_gather
    monkeypatch.setattr(dist, "barrier", lambda **_: calls.append("barrier"))
    monkeypatch.setattr(dist, "all_gather", lambda *given: calls.append("all_gather") or all_gather(*given))
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        trainer: Any = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        trainer.strategy.reduce = lambda values, **_: calls.append("reduce") or values
        metrics = TrainMetrics()
        module: Any = SimpleNamespace(device=torch.device("cpu"))
        metrics.on_fit_start(trainer, module)
        metrics.on_train_start(trainer, module)
        batch = (None, torch.zeros(4), torch.arange(4))
        metrics.on_train_batch_end(trainer, module, {"batch_loss": torch.tensor(1.0)}, batch, 0)
        metrics.on_train_epoch_end(trainer, module)
    finally:
        dist.destroy_process_group()
    assert calls == ["all_gather"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_trainers_run_on_a_device_that_is_not_the_cpu(data: Path, tmp_path: Path) -> None:
    """No operation on tensors of two devices, no step in which the host waits, and the CPU's bits in the end."""
    flags = [*RUN, *ONE, "--data.root", str(data), "--precision", "32-true", "--model.channels_last", "false"]
    flags += ["--data.cutmix_alpha", "1.0"]
    assert FIT["project.fit_raw"]([*flags, "--trainer.default_root_dir", str(tmp_path / "cpu")]) == 0
    command = [sys.executable, "-m", "tests.other_device", str(tmp_path), *flags]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    waits = json.loads((tmp_path / "waits.json").read_text(encoding="utf-8"))
    assert waits["probe"]["steps"] == ["other_device.py::probe"]  # it is seen where it happens
    assert waits["lit"]["steps"] == waits["raw"]["steps"] == []
    looks = {"state_check.py::_gather", "nonfinite.py::bad_tensors"}  # before a validation or a save
    assert set(waits["raw"]["elsewhere"]) == {"checkpoint_file.py::on_cpu", "metrics.py::compute", *looks, "run.py::train"}
    expected = what_counts(tmp_path / "cpu")
    for wing in ("lit", "raw"):
        assert_equal(what_counts(tmp_path / wing), expected)
