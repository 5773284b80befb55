"""Lightning's own callbacks and flags work, or are refused by name before anything starts; the page says which."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision, TorchSyncBatchNorm
from lightning.pytorch.plugins.environments import LightningEnvironment

import project.lit.run
from project.lit.ending import as_refusal
from project.lit.extensions import CALLBACKS, FLAGS, TRIED, refuse_callbacks, refuse_flags, refuse_plugins, refuse_untried
from project.raw.cli import NEUTRAL, TrainerConfig
from project.runtime.errors import UserError
from tests.conftest import REPOSITORY, SMALL

PAGE = REPOSITORY / "notebooks" / "lightning_extensions.md"
ACCEPTED = {name: accepted[0] for name, (accepted, _) in FLAGS.items()}


def table(title: str) -> dict[str, str]:
    """Name -> works or refused, of a table of the page."""
    [part] = [part for part in PAGE.read_text(encoding="utf-8").split("\n## ") if part.startswith(title)]
    rows = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| `")]
    return {name: says.strip(" *") for names, says in rows for name in re.findall("`(.+?)`", names)}


def refuse(*given: Callback, **changed: Any) -> None:
    refuse_callbacks(given, **{"logger": None, "validates": True, "ema": False, **changed})


def test_the_page_says_what_the_code_refuses() -> None:
    found = table("Callbacks")
    assert {name for name, says in found.items() if says == "refused"} == set(CALLBACKS)
    assert set(found.values()) == {"works", "refused"}
    assert all(hasattr(callbacks, name) for name in found)
    found = table("Flags")
    assert {name for name, says in found.items() if says == "refused"} == set(FLAGS)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_cannot_work_is_refused_and_so_is_one_derived_from_it(name: str) -> None:
    kind = type("Mine", (getattr(callbacks, name),), {"__init__": lambda _: None})
    assert CALLBACKS[name].count(";") == 1 or name in ("BatchSizeFinder", "Timer")  # a reason and a remedy, or the remedy alone
    with pytest.raises(UserError, match=re.escape(f"--trainer.callbacks Mine: {CALLBACKS[name]}.")):
        refuse(kind())


@pytest.mark.parametrize(
    ("callback", "changed", "words"),
    [
        (callbacks.EarlyStopping("train/loss"), {}, "monitors train/loss, which no validation has: there are val/top1, val/top5"),
        (callbacks.EarlyStopping("val/ema_loss"), {}, "monitors val/ema_loss"),
        (callbacks.ModelCheckpoint(monitor="val/loss"), {"validates": False}, ".*: without a validation there is no metric"),
        (callbacks.ModelCheckpoint(save_on_exception=True), {}, "with save_on_exception: what it saves lies between two steps"),
        (callbacks.LearningRateMonitor(), {"logger": False}, "writes to loggers, and --trainer.logger is false"),
        (callbacks.DeviceStatsMonitor(), {"logger": False}, "writes to loggers"),
    ],
)
def test_a_callback_that_would_fail_later_is_refused(callback: Callback, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"--trainer.callbacks {type(callback).__name__} {words}"):
        refuse(callback, **changed)


def test_what_works_is_let_through() -> None:
    mine = type("Mine", (Callback,), {})()
    refuse(mine, callbacks.EarlyStopping("val/loss"), callbacks.ModelCheckpoint(), callbacks.LearningRateMonitor())
    refuse(callbacks.EarlyStopping("val/ema_loss"), ema=True)
    refuse(type("Timer", (Callback,), {})())  # a class of one's own that has a name of Lightning's
    refuse_flags(ACCEPTED)
    refuse_plugins([])
    refuse_plugins([LightningEnvironment(), TorchSyncBatchNorm()])


@pytest.mark.parametrize(
    ("flag", "value", "shown"),
    [
        ("barebones", True, "true: it allows no checkpoint"),
        ("use_distributed_sampler", False, "false: every rank would"),
        ("model_registry", "x", "x: nothing is uploaded"),
        ("limit_test_batches", 1, "1: there is no test set"),
        ("limit_predict_batches", 2, "2: nothing is predicted"),
        ("overfit_batches", 0.5, "0.5: each epoch would have other batches"),
    ],
)
def test_a_flag_that_cannot_work_is_refused(flag: str, value: Any, shown: str) -> None:
    with pytest.raises(UserError, match=f"--trainer.{flag} {re.escape(shown)}"):
        refuse_flags({**ACCEPTED, flag: value})


def test_a_keyword_that_the_installed_trainer_has_and_nobody_has_tried_is_refused_by_name() -> None:
    installed = inspect.signature(Trainer.__init__)
    newer = [inspect.Parameter("turbo", inspect.Parameter.KEYWORD_ONLY, default=default) for default in (None, False)]
    for added in newer:
        signature = installed.replace(parameters=[*installed.parameters.values(), added])
        defaults = {name: parameter.default for name, parameter in signature.parameters.items() if name != "self"}
        refuse_untried(defaults, signature)
        for name in {*defaults} - TRIED:  # what the installed version has beyond our table, and the invented one
            with pytest.raises(UserError, match=f"--trainer.{name} 3: Lightning .* takes it, and .*; leave it out"):
                refuse_untried({**defaults, name: 3}, signature)
    assert "turbo" not in TRIED


def test_both_trainers_know_the_same_keywords() -> None:
    assert {*TrainerConfig.__dataclass_fields__, *NEUTRAL} == TRIED
    assert not {*TrainerConfig.__dataclass_fields__} & {*NEUTRAL}
    refuse_flags({})  # of a Lightning that has none of them any more


def test_plugins_that_replace_what_the_training_relies_on_are_refused() -> None:
    with pytest.raises(UserError, match="--trainer.plugins AsyncCheckpointIO: checkpoints are written atomically"):
        refuse_plugins([AsyncCheckpointIO()])
    with pytest.raises(UserError, match="--trainer.plugins MixedPrecision: give --precision"):
        refuse_plugins([MixedPrecision("bf16-mixed", "cpu")])


def test_the_command_refuses_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["--config", str(REPOSITORY / "configs" / "digits.yaml"), "--accelerator", "cpu", "--devices", "2"]
    for arguments, words in (
        (["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"], "--model.ema_decay"),
        (["--trainer.barebones", "true"], "--trainer.barebones true: "),
        (["--trainer.logger", "WandbLogger"], "Requirement 'wandb"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            project.lit.run.fit([*base, *arguments])
        assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_what_lightning_refuses_later_has_no_traceback_either() -> None:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    refusal = as_refusal(MisconfigurationException("words"))
    assert (type(refusal), str(refusal)) == (UserError, "words")
    other = RuntimeError()
    assert as_refusal(other) is other


@pytest.mark.slow
def test_some_that_work_in_one_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    arguments = [*SMALL, "--config", "configs/digits.yaml", "--accelerator", "cpu", "--devices", "1", "--max_epochs", "2"]
    arguments += ["--data.num_workers", "0", "--data.global_batch_size", "8", "--trainer.default_root_dir", str(tmp_path)]
    arguments += ["--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1"]
    arguments += ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"]
    arguments += ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/loss"]
    arguments += ["--trainer.callbacks.filename={epoch}"]
    arguments += ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks+=DeviceStatsMonitor"]
    arguments += ["--trainer.callbacks.cpu_stats=true", "--trainer.callbacks+=SpikeDetection"]
    arguments += ["--trainer.max_time", "00:01:00:00", "--trainer.reload_dataloaders_every_n_epochs", "1"]
    arguments += ["--trainer.log_every_n_steps", "1"]
    assert project.lit.run.fit(arguments) == 0
    run = tmp_path / "runs/0"
    saved = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"best.ckpt", "last.ckpt"} < saved
    assert any(name.startswith("epoch=") for name in saved)
    names = (run / "metrics.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in names
    assert "lr-" in names
