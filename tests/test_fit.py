"""`python -m project.fit` as a user types it: two real ranks, one run asserted from many sides."""

import csv
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import project.lit.run as run
from project.lit.checkpoint import newest_validation
from project.model.checkpoint_file import RECORD
from project.runtime.errors import UserError
from tests.conftest import REPOSITORY, SMALL, Finished, run_module

Make = Callable[..., Path]

# 2 epochs of 6 steps; a checkpoint after every fourth step beside our own
FIT = [
    *SMALL,
    *("--devices", "2", "--strategy", "ddp", "--max_epochs", "2", "--trainer.limit_train_batches", "6"),
    *("--trainer.log_every_n_steps", "2", "--trainer.num_sanity_val_steps", "1"),
    *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename={step}"),
    *("--trainer.callbacks.every_n_train_steps=4", "--trainer.callbacks.save_top_k=-1"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def fitted(root: Path) -> Finished:
    return run_module("project.fit", *FIT, "--trainer.default_root_dir", root)


@pytest.fixture(scope="module")
def folder(fitted: Finished, root: Path) -> Path:
    assert fitted.code == 0, fitted.err
    return root / "runs" / "0"


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def load(path: Path) -> dict:  # type: ignore[type-arg]
    return torch.load(path, map_location="cpu", weights_only=True)


def test_what_a_person_sees(fitted: Finished, folder: Path) -> None:
    assert fitted.err == ""
    lines = [line for line in fitted.out.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 prints some
    assert len(lines) < 20
    assert len(lines) == len(set(lines))
    assert max(len(line) for line in lines if str(folder) not in line and "digits-1" not in line) <= 80
    assert "1,438 training and 359 validation images, 10 classes" in fitted.out
    assert "--data.root FOLDER" in fitted.out
    assert "64 images per step = 2 ranks x 32, 6 steps per epoch, 2 epochs" in fitted.out
    assert re.search(
        r"epoch 2/2: loss \d+\.\d+, val loss \d+\.\d+, top-1 \d+\.\d+ %, \d+ s, \d+ img/s, wait \d+ %",
        fitted.out,
    )
    assert re.search(r"best top-1 \d+\.\d\d % on 359 images, after epoch \d", fitted.out)
    assert str(folder) in lines[-2]
    assert lines[-1] == "checkpoints/{best,last}.ckpt, curves.png, metrics.csv, config.yaml"
    for name in ("checkpoints/best.ckpt", "checkpoints/last.ckpt", "curves.png", "metrics.csv", "config.yaml"):
        assert (folder / name).is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    assert not list(folder.rglob(".*"))


def test_metrics(folder: Path) -> None:
    found = rows(folder)
    validations = [row for row in found if "val/top1" in row]
    assert [row["val/images"] for row in validations] == [359, 359]
    assert [row["step"] for row in validations] == [6, 12]
    assert all(0 <= row["val/top1"] <= row["val/top5"] <= 1 and row["val/loss"] > 0 for row in validations)
    training = [row for row in found if "train/loss" in row]
    assert [row["step"] for row in training] == [2, 4, 6, 8, 10, 12]
    # The rates that the steps took: step 6 is 5/6 of the way from 1 % to the peak of 0.001, step 12 5/6 down half a cosine.
    assert training[2]["train/lr"] == pytest.approx(0.001 * (0.01 + 0.99 * 5 / 6))
    assert training[-1]["train/lr"] == pytest.approx(0.001 * 0.5 * (1 + math.cos(math.pi * 5 / 6)))
    assert all(0 <= row["train/data_wait"] <= 1 and row["train/images_per_s"] > 0 for row in training)


def test_checkpoints_say_what_they_are(folder: Path) -> None:
    last, best = load(folder / "checkpoints/last.ckpt"), load(folder / "checkpoints/best.ckpt")
    for content in (last, best):
        record = content[RECORD]
        assert record["classes"] == [str(digit) for digit in range(10)]
        assert (record["world_size"], record["samples"], record["seed"]) == (2, 1438, 1)
        assert record["model"]["arch"] == "resnet18"
    assert last["global_step"] == 12
    assert len(last["optimizer_states"][0]["state"]) == 62  # each parameter of a resnet18 has its moments
    top1 = [row["val/top1"] for row in rows(folder) if "val/top1" in row]
    assert best[RECORD]["metrics"]["val/top1"] == pytest.approx(max(top1))


def test_the_newest_validation_may_be_from_before_a_resume() -> None:
    history = [{"step": 2, "epoch": 0, "val/top1": 0.2}, {"step": 4, "epoch": 1, "val/top1": 0.5}, {"step": 6, "train/loss": 1.0}]
    assert newest_validation(history) == {"val/top1": 0.5}
    assert newest_validation(history[2:]) == {}


def test_config_can_be_fed_back(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(run, "launch", lambda module, arguments, **_: started.append(arguments) or 0)
    assert run.fit(["--config", str(folder / "config.yaml")]) == 0
    assert started
    saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert saved["data"]["root"] == "digits"
    assert saved["model"]["arch"] == "resnet18"
    assert saved["seed_everything"] == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--devices", "3", "--config", "FILE"],
        ["--config", "FILE", "--trainer.devices", "3"],
        ["--config", "FILE", "--devices=3"],
        ["--trainer.devices=3", "--config=FILE"],
    ],
)
def test_a_flag_wins_over_a_file_wherever_it_stands(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(
        "trainer: {devices: 2, strategy: ddp}\ndata: {root: digits, global_batch_size: 63}", encoding="utf-8"
    )
    ranks: list[int] = []
    monkeypatch.setattr(run, "launch", lambda *_, ranks: ranks, raising=True)
    monkeypatch.setattr(run, "launch", lambda *_, **more: ranks.append(more["ranks"]) or 0)
    run.fit([flag.replace("FILE", str(tmp_path / "c.yaml")) for flag in flags])
    assert ranks == [3]


def test_print_config_and_help_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.fit(["--print_config", "--devices", "4", "--strategy", "ddp", "--model.lr", "1e-3"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert int(printed["trainer"]["devices"]) == 4
    assert printed["model"]["lr"] == 0.001
    assert printed["data"]["root"] == "digits"
    with pytest.raises(SystemExit) as ended:
        run.fit(["--help"])
    assert ended.value.code == 0
    assert "--data.global_batch_size" in capsys.readouterr().out


@pytest.mark.slow
def test_resume_is_exact_on_two_ranks_and_makes_a_second_folder(folder: Path, root: Path) -> None:
    """From the middle of an epoch: the bits of weights, buffers and moments."""
    whole = load(folder / "checkpoints/last.ckpt")
    assert sorted(path.name for path in (folder / "checkpoints").glob("step*")) == ["step=12.ckpt", "step=4.ckpt", "step=8.ckpt"]
    finished = run_module(
        "project.fit", *FIT, "--trainer.default_root_dir", root, "--ckpt_path", folder / "checkpoints" / "step=8.ckpt"
    )
    assert finished.code == 0, finished.err
    assert finished.err == ""
    assert sorted(path.name for path in (root / "runs").iterdir()) == ["0", "1"]
    again = load(root / "runs/1/checkpoints/last.ckpt")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(again[part], whole[part], rtol=0, atol=0)
    assert rows(root / "runs/1")[-1]["val/loss"] == rows(folder)[-1]["val/loss"]


def test_resuming_what_is_finished_or_differs_is_refused(folder: Path) -> None:
    last = str(folder / "checkpoints/last.ckpt")
    for flags, word in {
        (): "already taken 12 of 12 steps",
        ("--data.global_batch_size", "600"): "6 steps per epoch",
        ("--model.arch", "resnet34"): "--model.arch resnet18",
        ("--model.optimizer", "sgd"): "--model.optimizer adamw",
    }.items():
        with pytest.raises(UserError, match=word):
            run.fit([*FIT, "--ckpt_path", last, *flags])


@pytest.fixture
def bad_image(make_data: Make) -> Path:
    bad = make_data(train=40, val=6) / "train" / "bee" / "3.jpg"
    bad.write_bytes(b"broken")
    return bad


def with_bad_image(bad: Path, out: Path) -> list[str | Path]:
    flags = [*SMALL, "--config", "configs/digits.yaml", "--devices", "2", "--max_epochs", "1"]
    return [*flags, "--data.root", bad.parents[2], "--data.global_batch_size", "8", "--trainer.default_root_dir", out]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["project.fit", "project.fit_raw"])
def test_an_unreadable_image_ends_all_ranks_with_its_path(module: str, bad_image: Path, tmp_path: Path) -> None:
    finished = run_module(module, *with_bad_image(bad_image, tmp_path / "out"), "--data.num_workers", "1")
    assert finished.code == 1
    assert finished.seconds < 60
    assert "Traceback" not in finished.err
    [line] = [line for line in finished.err.splitlines()[-2:] if str(bad_image) in line]
    assert re.match(r"error: rank [01]: cannot read the image ", line)
    kept = [file.read_text(encoding="utf-8") for file in (tmp_path / "out/runs/0/errors").glob("rank-*.json")]
    assert any("cannot read the image" in text for text in kept)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["project.fit", pytest.param("project.fit_raw", marks=pytest.mark.slow)])
def test_an_unreadable_image_is_replaced_and_counted(module: str, bad_image: Path, tmp_path: Path) -> None:
    more = ["--data.on_bad_image", "skip", "--trainer.accumulate_grad_batches", "2"]
    finished = run_module(module, *with_bad_image(bad_image, tmp_path / "out"), *more)
    assert finished.code == 0, finished.err
    assert "unreadable training images were replaced once" in finished.out
    assert finished.err == ""


@pytest.mark.slow
def test_torchrun_starts_as_many_processes_as_it_says(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    short = [*SMALL, "--max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.default_root_dir", tmp_path]
    env = {"OMP_NUM_THREADS": "1"}
    finished = run_module("project.fit", *short, "--devices", "2", launcher=torchrun, env=env)
    assert finished.code == 0, finished.err
    assert "= 2 ranks x 32" in finished.out
    assert finished.out.count("best top-1") == 1
    assert len(list((tmp_path / "runs").iterdir())) == 1
    refused = run_module("project.fit", *short, "--devices", "4", launcher=torchrun, env=env)
    assert refused.code != 0
    assert refused.err.count("is not the 2 processes that the launcher has started") == 1


@pytest.mark.slow
def test_photographs_in_class_folders_are_trained_on(photograph_folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    train, val = (sum(1 for _ in (tiny_folder / part).rglob("*.JPEG")) for part in ("train", "val"))
    finished = run_module(
        *("project.fit", "--config", "configs/imagenet_resnet50.yaml", *SMALL, "--data.root", tiny_folder, "--devices", 2),
        *("--strategy", "ddp", "--data.train_size", 64, "--data.val_resize", 64, "--data.val_size", 64, "--max_epochs", 1),
        *("--data.global_batch_size", 128, "--trainer.limit_train_batches", 8, "--trainer.default_root_dir", tmp_path),
        *("--data.num_workers", 1),  # in the precision that this processor is fast in
    )
    assert finished.code == 0, finished.err
    assert f"{train:,} training and {val:,} validation images, 10 classes" in finished.out
    finished = run_module(
        *("project.fit", *SMALL, "--data.root", photograph_folder, "--trainer.limit_train_batches", 2),
        *("--max_epochs", 1, "--data.global_batch_size", 16, "--trainer.default_root_dir", tmp_path),
    )
    assert finished.code == 0, finished.err
    assert f"{sum(1 for _ in photograph_folder.iterdir())} classes" in finished.out
    assert finished.err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (2, "SIGINT")])
def test_a_signal_ends_a_single_process_with_its_own_code(number: int, name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "project.fit", *SMALL, "--max_epochs", "500", "--trainer.default_root_dir", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell starts what it runs in the background with SIGINT ignored, which children inherit.
    process = subprocess.Popen(command, cwd=REPOSITORY, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes)
    try:
        while "epoch 1/500" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert re.fullmatch(rf"ended by {name}; --ckpt_path last goes on after step \d+: .*last\.ckpt", err.splitlines()[-1])
    assert not list(tmp_path.rglob("checkpoints/.*"))


def test_validate_helps_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.validate(["--help"])
    assert ended.value.code == 0
    assert "--weights" in capsys.readouterr().out
