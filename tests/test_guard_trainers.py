"""The guard in our trainers changes no bit, and as a callback it works in anyone's Trainer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import project.lit.run
import project.raw.run
from project.guard import ReplicaGuard
from project.guard.replica_guard import NotFinite
from project.lit.cli import TrainCLI, ValidateCLI
from project.lit.guard import ReplicaGuardCallback
from project.model.checkpoint_file import extract_state_dict
from project.model.nonfinite import IF_NOT_FINITE, Ruined
from project.raw.guard import Guard
from project.runtime.errors import UserError
from project.settings.arguments import expand
from project.settings.config import GuardConfig
from tests.conftest import SMALL, run_jobs, training

RUN = [
    *(*SMALL, "--devices", "2", "--max_epochs", "2", "--data.num_workers", "1", "--trainer.limit_train_batches", "3"),
    *("--trainer.limit_val_batches", "1"),
]

CALLBACK = """
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from project.lit.guard import ReplicaGuardCallback


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if NUDGED and self.global_rank == 1 and self.global_step == 3:
            self.layer.weight.data[0, 0] += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)), torch.arange(32))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
callback = ReplicaGuardCallback(every=2, indices=lambda batch: batch[2])
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[callback], **quiet)
trainer.fit(Module(), DataLoader(data, batch_size=4, shuffle=True, num_workers=0))
"""


@pytest.mark.slow
def test_the_guard_changes_no_bit(tmp_path: Path) -> None:
    """Of either trainer: without a guard both do the same."""
    runs = {"without": ("project.fit_raw", 0), "lit": ("project.fit", 1), "raw": ("project.fit_raw", 1)}
    jobs = [
        training(name, module, [*RUN, "--trainer.default_root_dir", tmp_path / name, "--guard.every", every])
        for name, (module, every) in runs.items()
    ]
    ends = {}
    for name, ran in run_jobs(tmp_path, jobs).items():
        assert ran.codes == [0, 0], ran.out
        content = torch.load(tmp_path / name / "runs/0/checkpoints/last.ckpt", map_location="cpu", weights_only=True)
        ends[name] = extract_state_dict(content, path=name, flag="")
    assert len(ends["without"]) > 100
    for name in ("lit", "raw"):
        torch.testing.assert_close(ends[name], ends["without"], rtol=0, atol=0)


def test_a_report_of_a_gradient_advises_the_trainers_user_by_flags() -> None:
    trainer = TrainCLI(expand(["--devices", "1"], train=True)).trainer
    [callback] = [each for each in trainer.callbacks if isinstance(each, ReplicaGuardCallback)]  # type: ignore[attr-defined]
    model = nn.Linear(2, 2)
    own, raw = ReplicaGuard(model, SGD(model.parameters(), lr=0.1), **callback.options), Guard(GuardConfig())
    raw.attach(model, SGD(model.parameters(), lr=0.1))
    assert raw.replica_guard is not None
    for guard in (own, raw.replica_guard):
        report = NotFinite(3, guard.if_not_finite, step=3).report({}, 1)
        assert report.endswith(IF_NOT_FINITE)
        assert "--model.lr" in report
        assert "guard." not in report
        guard.close()


@pytest.mark.slow
@pytest.mark.parametrize("fit", [project.lit.run.fit, project.raw.run.fit], ids=["project.fit", "project.fit_raw"])
def test_nothing_is_saved_after_a_gradient_that_is_not_finite(
    fit: Callable[[list[str]], int], make_data: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = nn.CrossEntropyLoss.forward, []

    def nan_at_the_fourth(self: nn.CrossEntropyLoss, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(self, logits, target) * (float("nan") if len(calls) == 4 else 1.0)

    monkeypatch.setattr(nn.CrossEntropyLoss, "forward", nan_at_the_fourth)
    flags = [*SMALL, "--config", "configs/digits.yaml", "--devices", "1", "--max_epochs", "1", "--data.num_workers", "0"]
    flags += ["--data.root", str(make_data(train=48, val=6)), "--data.global_batch_size", "8", "--checkpoint.every_steps", "1"]
    with pytest.raises(Ruined, match=r"after step 4.*\nAfter step 3 all were finite. The loss was not finite from step 4 on"):
        fit([*flags, "--trainer.default_root_dir", str(tmp_path)])
    saved = torch.load(tmp_path / "runs/0/checkpoints/last.ckpt", map_location="cpu", weights_only=True)
    assert saved["lockstep"]["step"] == 3
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


@pytest.mark.slow
def test_the_callback_in_a_trainer_of_ones_own(tmp_path: Path) -> None:
    jobs = [
        {"name": name, "text": f"NUDGED = {name == 'nudged'}\n{CALLBACK}", "env": {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"}}
        for name in ("healthy", "nudged")
    ]
    ran = run_jobs(tmp_path, jobs)
    assert ran["healthy"].codes == [0, 0], json.dumps(ran["healthy"].out)
    # 32 samples over 2 ranks in batches of 4 are 4 steps an epoch.
    lines = [line for line in ran["healthy"].out[0].splitlines() if line.startswith("guard")]
    assert lines == [f"guard  epoch {n}: 32 samples on 2 ranks, each once; weights equal at step {4 * n}" for n in (1, 2)]
    assert "1 of 2 differ: layer.weight" in ran["nudged"].report()


def test_what_the_guard_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="--guard.every is -1: give a number of steps, or 0 for no guard"):
        GuardConfig(every=-1)
    with pytest.raises(UserError, match="--guard.timeout is 0"):
        GuardConfig(timeout=0)


def test_validate_accepts_the_config_of_a_run(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("guard:\n  every: 5\ntrainer:\n  accelerator: cpu\n  devices: 1\n", encoding="utf-8")
    cli = ValidateCLI(["--config", str(config)])
    assert not any(isinstance(callback, ReplicaGuardCallback) for callback in cli.trainer.callbacks)
