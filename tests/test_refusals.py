"""Bad input: one message that names the flag, the numbers and the remedy, before any rank is started."""

import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import project.lit.run
import project.raw.run
from project.lit.checkpoint import AtomicCheckpointIO, Last
from project.lit.cli import TrainCLI
from project.runtime.errors import UserError
from project.settings.arguments import expand
from tests.conftest import REPOSITORY, run_module, write_images

Make = Callable[..., Path]


@pytest.fixture(params=[project.lit.run, project.raw.run], ids=["fit", "fit_raw"])
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """The message with which either trainer refuses a command line; fails if it would start ranks or write a file."""
    run = request.param

    def started(*_: object, **__: object) -> None:
        pytest.fail("ranks were started")

    monkeypatch.setattr(run, "launch", started)
    monkeypatch.setattr("lightning.pytorch.Trainer.fit", started)
    monkeypatch.setattr("project.raw.run.train", started)
    monkeypatch.chdir(tmp_path)

    def message(*arguments: str | Path) -> str:
        with pytest.raises(UserError) as caught:
            run.fit([str(argument) for argument in arguments])
        assert not (tmp_path / "runs").exists()
        text = str(caught.value)
        assert len(text.splitlines()) <= 4
        return text

    return message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model.lerning_rate 0.1", ["--model.lerning_rate"]),
        ("--trainer.device 2", ["--trainer.device"]),
        ("--model.num_cl 10", ["--model.num_cl"]),  # no abbreviations
        ("--model.lr abc", ["--model.lr abc: give a number."]),
        ("--model.lr nan", ["--model.lr nan: give a number."]),
        ("--model.lr inf", ["--model.lr", "inf", "give a number"]),
        ("--max_epochs nan", ["--trainer.max_epochs nan: give a whole number or null."]),
        ("--data.num_workers x", ["--data.num_workers x: give a whole number or null."]),
        ("--trainer.enable_progress_bar 3", ["--trainer.enable_progress_bar 3: give true, false or null."]),
        ("--model.lr -1", ["--model.lr", "-1"]),
        ("--model.arch resnet49", ["model.arch", "resnet49"]),
        ("--model.num_classes 5", ["--model.num_classes is 5", "10 classes"]),
        ("--model.weights nowhere.pt", ["--model.weights nowhere.pt", "no such file"]),
        ("--data.root nowhere", ["--data.root nowhere", "does not exist"]),
        ("--data.global_batch_size 7 --devices 2", ["--data.global_batch_size 7", "2 ranks", "6 or 8"]),
        ("--data.global_batch_size 2 --devices 2", ["batch of 1", "1 x 1", "--data.global_batch_size 4"]),
        ("--data.global_batch_size 4000", ["1438", "4000", "--data.drop_last"]),
        ("--data.drop_last false --data.global_batch_size 479", ["batch of 1", "--data.drop_last true"]),  # 1438 = 3 x 479 + 1
        ("--data.val_size 64", ["--data.val_size is 64", "--data.val_resize 32"]),
        ("--data.hflip 1.5", ["--data.hflip", "1.5"]),
        ("--trainer.sync_batchnorm true", ["--trainer.sync_batchnorm", "GPU"]),
        ("--precision 16-mixed", ["--precision 16-mixed", "bf16-mixed"]),
        (
            "--trainer.strategy DDPStrategy --trainer.strategy.ddp_comm_hook "
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook",
            ["--trainer.strategy.ddp_comm_hook", "needs GPUs"],
        ),
        (
            "--trainer.strategy DDPStrategy --trainer.strategy.static_graph true --trainer.accumulate_grad_batches 2",
            ["--trainer.strategy.static_graph true", "--trainer.accumulate_grad_batches 2"],
        ),
        ("--max_epochs 1 --model.schedule constant --model.warmup_epochs 2", ["--model.warmup_epochs 2", "the training has 22"]),
        ("--accelerator gpu", ["--accelerator gpu", "--accelerator cpu"]),
        ("--strategy fsdp", ["--strategy fsdp", "--strategy ddp"]),
        ("--devices -1", ["--devices -1 names GPUs", "a number of processes"]),
        ("--devices 1,3", ["--devices 1,3 names GPUs", "a number of processes"]),
        *((f"--devices {devices}", [f"--devices {devices}: give a number of processes"]) for devices in ("0", "two")),
        ("--accelerator tpu", ["--accelerator tpu: give cpu, gpu or mps"]),
        ("--accelerator mps", ["--accelerator mps", "--accelerator cpu"]),
        *(
            (f"--precision {name}", [f"--precision {name}: the weights are float32"])
            for name in ("bf16-true", "64-true", "16-true")
        ),
        ("--trainer.limit_train_batches 0", ["--trainer.limit_train_batches 0 of 22 batches per rank leaves none"]),
        ("--trainer.limit_train_batches 0.01", ["--trainer.limit_train_batches 0.01 of 22 batches per rank leaves none"]),
        ("--trainer.limit_val_batches -1", ["--trainer.limit_val_batches -1: give a number of batches"]),
        ("--trainer.accumulate_grad_batches 0", ["--trainer.accumulate_grad_batches 0: give 1 or more"]),
        ("--trainer.accumulate_grad_batches -1", ["--trainer.accumulate_grad_batches -1: give 1 or more"]),
        ("--trainer.check_val_every_n_epoch 0", ["--trainer.check_val_every_n_epoch 0: give 1 or more"]),
        ("--trainer.gradient_clip_val -1", ["--trainer.gradient_clip_val -1: give a number above 0"]),
        ("--trainer.log_every_n_steps -1", ["--trainer.log_every_n_steps -1: give 1 or more"]),
        ("--trainer.val_check_interval 0", ["trainer.val_check_interval 0"]),
        ("--trainer.default_root_dir s3://bucket", ["--trainer.default_root_dir s3://bucket: give a folder"]),
        ("--trainer.deterministic x", ["trainer.deterministic", "x"]),
        ("--trainer.profiler xla", ["trainer.profiler", "xla"]),
        ("--trainer.max_time 5", ["5"]),
        ("--max_epochs 0", ["--trainer.max_epochs"]),
        ("--seed_everything -1", ["--seed_everything -1"]),
        ("--ckpt_path nowhere.ckpt", ["--ckpt_path nowhere.ckpt", "no such file"]),
        ("--ckpt_path last", ["--ckpt_path last", "--trainer.default_root_dir"]),
        ("--config nowhere.yaml", ["nowhere.yaml"]),
        ("--config", ["--config"]),
        ("--model.schedule cosine --max_epochs -1", ["--model.schedule cosine", "--trainer.max_epochs"]),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="some of these are possible with a GPU")
def test_refused(arguments: str, words: list[str], refused: Callable[..., str]) -> None:
    message = refused(*arguments.split())
    for word in words:
        assert word in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="possible with a GPU")
@pytest.mark.parametrize("flags", [["--devices", 2], ["--strategy", "ddp"]])
def test_a_variable_with_which_torch_crashes(
    flags: list[object], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert "TORCH_DISTRIBUTED_DEBUG is DETAIL" in refused(*flags)


@pytest.mark.parametrize(
    "arguments",
    [
        "--trainer.plugins SLURMEnvironment",
        "--trainer.plugins [SLURMEnvironment]",
        "--trainer.callbacks LearningRateMonitor",
        "--trainer.callbacks [LearningRateMonitor,DeviceStatsMonitor]",
        "--trainer.logger CSVLogger --trainer.logger.save_dir x",
        "--trainer.strategy DDPStrategy",
        "--trainer.profiler simple",
        "--trainer.max_time 00:00:01:00",
    ],
)
def test_lightnings_extensions_may_be_given_in_any_of_its_forms(arguments: str) -> None:
    """One class, a list, a name: each makes a trainer, beside what this project adds."""
    trainer = TrainCLI(expand(["--devices", "1", *arguments.split()], train=True)).trainer
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)
    assert any(isinstance(callback, Last) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def test_a_class_that_lacks_an_argument_is_told_so() -> None:
    for name, needed in {"callbacks EarlyStopping": "callbacks.monitor", "logger CSVLogger": "logger.save_dir"}.items():
        with pytest.raises(UserError, match=rf"--trainer\.{name.split()[0]} \S+{name.split()[1]} needs --trainer\.{needed}\."):
            TrainCLI(expand(f"--trainer.{name}".split(), train=True))


def test_bad_configs_name_the_key(refused: Callable[..., str], tmp_path: Path) -> None:
    for text, word in {
        "model: {lerning_rate: 0.1}": "lerning_rate",
        "trainer: {device: 2}": "device",
        "trainer: {strategy: [ddp]}": "strategy",
        "model:\n\tlr: 0.1": "bad.yaml",
    }.items():
        (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
        assert word in refused("--config", "bad.yaml")


def test_one_class(refused: Callable[..., str], make_data: Make) -> None:
    assert "one class, ant" in refused("--data.root", make_data(train=8, val=2, classes=("ant",)))


def test_few_samples(refused: Callable[..., str], make_data: Make) -> None:
    root = make_data(train=3, val=3)
    assert "3 training images for 4 ranks are too few" in refused("--data.root", root, "--devices", 4)
    assert "lacks 1 of the classes" in refused("--data.root", make_renamed(root))


def make_renamed(root: Path) -> Path:
    (root / "val" / "bee").rename(root / "val" / "boa")
    return root


def test_damaged_and_foreign_checkpoints(refused: Callable[..., str], tmp_path: Path) -> None:
    torch.save({"state_dict": {"conv1.weight": torch.zeros(100, 100)}}, tmp_path / "foreign.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "foreign.ckpt").read_bytes()[:1000])
    (tmp_path / "empty.ckpt").write_bytes(b"")
    assert "no checkpoint of a training run" in refused("--ckpt_path", "foreign.ckpt")
    for name in ("cut.ckpt", "empty.ckpt"):
        message = refused("--ckpt_path", name)
        assert re.search(rf"{name} \([\d,]+ bytes\) is damaged", message)
        assert "newest whole" not in message
    torch.save({"lockstep": {}}, tmp_path / "ours.ckpt")
    assert refused("--ckpt_path", "cut.ckpt").endswith("The newest whole checkpoint beside it is ours.ckpt.")


def test_last_or_best_without_any(refused: Callable[..., str], tmp_path: Path) -> None:
    for name in ("last", "best"):
        assert refused("--ckpt_path", name).startswith(
            f"--ckpt_path {name}: there is no checkpoint below runs. Leave the flag out"
        )


def test_too_few_open_files(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    assert refused("--data.num_workers", 2).startswith("ulimit -n 40 allows too few open files for 2 loader processes per rank")


def test_shared_memory_that_is_too_small(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    free = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free if str(path) == "/dev/shm" else usage(path))
    message = refused("--devices", 2, "--data.num_workers", 3)
    assert message.startswith("/dev/shm has 1 MB free, and 2 ranks x 3 loader processes need about 1 MB in it.\n")
    assert "--data.num_workers" in message


@pytest.mark.parametrize("module", ["project.fit", "project.fit_raw"])
def test_a_refusal_is_one_message_without_traceback_and_exit_code_2(module: str, tmp_path: Path) -> None:
    root = tmp_path / "Zoë"  # which these streams cannot show
    write_images(root / "train" / "ant", 2)
    flags = ["--data.root", root, "--devices", 2, "--trainer.default_root_dir", root]
    finished = run_module(module, *flags, env={"PYTHONIOENCODING": "ascii"})
    assert (finished.code, finished.out) == (2, "")
    shown = str(root).encode("ascii", "backslashreplace").decode()
    assert finished.err == f"error: --data.root {shown} has train/ but no val/: add val/<class>/ with the validation images.\n"
    assert sorted(path.name for path in root.iterdir()) == ["train"]
    assert (REPOSITORY / "configs").is_dir()
