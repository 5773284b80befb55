"""Weights that are not finite are never saved, validated or used; a loss that is not finite is never the best."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import project.lit.run
import project.raw.run
from project.data.loading import IGNORE
from project.lit.checkpoint import Best
from project.lit.metrics import ValMetrics as LitMetrics
from project.model.checkpoint_file import RECORD, read_checkpoint
from project.model.nonfinite import Ruined, bad_tensors, training_tensors, unusable_line
from project.ranks.state_check import Advice, LossWatch, StateCheck
from project.raw.checkpoint import Place
from project.raw.metrics import ValMetrics as RawMetrics
from project.report.curves import draw_curves
from project.report.lines import closing_lines, epoch_line
from tests.conftest import SMALL, run_jobs, run_module, training

CPU = torch.device("cpu")
ADVICE = Advice(lr=0.5, clips=False, precision="bf16-mixed", checkpoints=())


# The state


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_found(value: float) -> None:
    large = torch.full((1000,), 3e38)  # finite, and its sum is not
    ruined = torch.zeros(1000)
    ruined[517] = value
    assert bad_tensors({"large": large, "count": torch.tensor(2**40), "empty": torch.zeros(0)}) == []
    assert bad_tensors({"large": large, "ruined": ruined}) == ["ruined"]
    assert (
        bad_tensors({"half": torch.tensor([6e4, 6e4], dtype=torch.float16), "double": torch.tensor([1e300], dtype=torch.float64)})
        == []
    )


def test_the_state_is_weights_buffers_optimizer_and_average() -> None:
    model, average = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    names = list(training_tensors(model, optimizer, average))
    assert names[:5] == ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean"]
    assert "momentum_buffer of 0.weight" in names
    assert "1.running_var of the moving average" in names


def test_a_ruined_state_is_explained_to_the_trainers_user(tmp_path: Path) -> None:
    check = StateCheck(CPU)
    good, bad = {"conv1.weight": torch.ones(2), "bn1.weight": torch.ones(1)}, {"conv1.weight": torch.ones(2)}
    check(good, step=4, advice=ADVICE)
    check.watch.see(torch.tensor(math.inf), step=6)
    check.watch.see(torch.tensor(1.0), step=7)
    check.watch.see(torch.tensor(math.nan), step=8)
    last = tmp_path / "last.ckpt"
    last.touch()
    advice = Advice(lr=0.5, clips=True, precision="bf16-mixed", checkpoints=(tmp_path / "none.ckpt", last))
    with pytest.raises(Ruined) as caught:
        check({**bad, "bn1.weight": torch.tensor([math.nan])}, step=9, advice=advice)
    assert str(caught.value).splitlines() == [
        "bn1.weight is NaN or infinite after step 9.",
        "After step 4 all were finite. The loss was not finite from step 6 on.",
        "Remedies:",
        "- lower the rate (--model.lr 0.5) or lengthen its warm-up (--model.warmup_epochs)",
        "- give --trainer.precision 32-true (it is bf16-mixed)",
        "- look at the images",
        f"The ruined state was not saved. The newest good checkpoint is {last}.",
    ]


def test_no_checkpoint_is_claimed_that_was_not_written() -> None:
    check = StateCheck(CPU)
    check({"w": torch.ones(1)}, step=0, advice=ADVICE)
    with pytest.raises(Ruined, match="There is no earlier checkpoint.$") as caught:
        check({"w": torch.tensor([math.inf])}, step=1, advice=ADVICE)
    assert "So were all losses: the last update was too large" in str(caught.value)
    with pytest.raises(Ruined, match="before the first step"):
        StateCheck(CPU)({"w": torch.tensor([math.inf])}, step=7, advice=ADVICE)


def test_an_overflow_that_ruined_nothing_is_forgotten() -> None:
    """As where a GradScaler leaves its step out."""
    check = StateCheck(CPU)
    check.watch.see(torch.tensor(math.inf), step=1)
    check({"w": torch.ones(1)}, step=2, advice=ADVICE)
    assert check.watch.step == LossWatch(CPU).step


# Evaluation


def test_logits_that_are_not_finite_score_nothing_in_either_trainer() -> None:
    logits = torch.tensor([[9.0, 0, 0], [math.nan, 0, 0], [math.nan] * 3, [math.inf, 0, 0], [0, 9, 0], [math.nan] * 3])
    target = torch.tensor([0, 0, 0, 0, 0, IGNORE])
    lit, raw = LitMetrics(num_classes=3), RawMetrics(CPU)
    lit.begin()
    for images in (slice(0, 3), slice(3, 6)):
        lit.update(logits[images], target[images])
        raw.update(logits[images], target[images])
    values = {name: metric.compute().item() for name, metric in lit.named("val/").items()}
    torch.testing.assert_close(values, raw.compute(), rtol=0, atol=0, equal_nan=True)
    # Of five images that count the first and the fifth have finite logits: one hit, and both are among the best three of three.
    top1, top5 = (torch.tensor(share).item() for share in (0.2, 0.4))
    assert (values["val/top1"], values["val/top5"], values["val/images"]) == (top1, top5, 5)
    assert math.isnan(values["val/loss"])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_whose_loss_is_not_finite_is_never_the_best(loss: float) -> None:
    place = Place(metrics={"val/top1": 0.9, "val/loss": loss})
    assert not place.is_best(Path("best.ckpt"))
    place.metrics = {"val/top1": 0.1, "val/loss": 2.0}
    assert place.is_best(Path("best.ckpt"))

    class Shown:
        callback_metrics = {"val/top1": torch.tensor(0.9), "val/loss": torch.tensor(loss)}

    assert not Best().check_monitor_top_k(Shown(), torch.tensor(0.9))  # type: ignore[arg-type]
    Shown.callback_metrics["val/loss"] = torch.tensor(2.0)
    assert Best().check_monitor_top_k(Shown(), torch.tensor(0.9))  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_is_shown_noted_and_drawn(tmp_path: Path) -> None:
    good = {"step": 2, "epoch": 0, "val/top1": 0.25, "val/top5": 1.0, "val/loss": 1.5, "val/images": 8.0}
    bad = {**good, "step": 4, "epoch": 1, "val/top1": 0.75, "val/loss": math.nan}
    assert epoch_line(1.0, bad, seconds=1, images_per_s=1, wait=0).startswith("loss 1.000, val loss nan, top-1 75.00 %")
    assert closing_lines([good, bad], None) == ["best top-1 25.00 % on 8 images, after epoch 1"]
    assert closing_lines([bad], None) == ["best top-1: none, since no validation had a finite loss"]
    assert unusable_line(good) is None
    assert str(unusable_line(bad)).startswith("note  val/loss is NaN or infinite, and all weights are finite. This validation")
    for history in ([good, bad], [bad], [{**bad, "val/loss": math.inf}, {"step": 5, "train/loss": math.inf, "train/lr": 1e39}]):
        draw_curves(history, tmp_path / "curves.png")


# Whole runs

RUN = [*SMALL, "--config", "configs/digits.yaml", "--data.num_workers", "0", "--data.global_batch_size", "8"]
RUN += ["--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1", "--model.warmup_epochs", "0"]

NAN_ON_RANK_1 = """
import os, torch
from torch import nn
forward, calls = nn.CrossEntropyLoss.forward, []
def broken(self, logits, target):
    calls.append(1)
    return forward(self, logits, target) * (float("nan") if len(calls) == 4 and os.environ["RANK"] == "1" else 1.0)
nn.CrossEntropyLoss.forward = broken
"""


@pytest.mark.slow
@pytest.mark.parametrize("fit", [project.lit.run.fit, project.raw.run.fit], ids=["project.fit", "project.fit_raw"])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_one_step_that_ruins_the_weights_ends_the_run(fit: Callable[[list[str]], int], checkpoints: bool, tmp_path: Path) -> None:
    flags = ["--devices", "1", "--max_epochs", "1", "--trainer.limit_train_batches", "1", "--model.lr", "1e39"]
    flags += ["--guard.every", "0", "--trainer.default_root_dir", str(tmp_path)]
    flags += [] if checkpoints else ["--trainer.enable_checkpointing", "false", "--trainer.limit_val_batches", "0"]
    with pytest.raises(Ruined, match="conv1.weight is NaN or infinite after step 1, and so are 61 of 307 other tensors"):
        fit([*RUN, *flags])
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
def test_a_loss_on_one_rank_ends_all_and_keeps_the_good_checkpoint(tmp_path: Path) -> None:
    flags = [*RUN, "--devices", "2", "--max_epochs", "2", "--guard.every", "0", "--trainer.default_root_dir"]
    jobs = [training(module, module, [*flags, tmp_path / module]) for module in ("project.fit", "project.fit_raw")]
    jobs = [{**job, "text": f"{NAN_ON_RANK_1}\n{job['text']}"} for job in jobs]
    for name, ran in run_jobs(tmp_path, jobs).items():
        last = tmp_path / name / "runs/0/checkpoints/last.ckpt"
        assert not ran.late, ran.out
        assert not ran.left
        assert ran.codes[0] == 1, ran.out
        reports = [text[text.index("error: ") :] for text in ran.out if "NaN or infinite" in text]
        assert len(reports) == 1, ran.out
        assert "conv1.weight is NaN or infinite after step 4" in reports[0]
        assert "After step 2 all were finite. The loss of rank 1 was not finite in step 4" in reports[0]
        assert "- look at the images of rank 1\n" in reports[0]
        assert f"The newest good checkpoint is {last}." in reports[0]
        assert read_checkpoint(last)[RECORD]["step"] == 2


@pytest.mark.slow
def test_commands_say_that_a_file_is_ruined(tmp_path: Path) -> None:
    assert project.raw.run.fit([*RUN, "--devices", "1", "--max_epochs", "1", "--trainer.default_root_dir", str(tmp_path)]) == 0
    path = tmp_path / "runs/0/checkpoints/last.ckpt"
    content = read_checkpoint(path)
    content["state_dict"]["fc.bias"][3] = math.nan
    torch.save(content, path)
    with pytest.raises(Ruined, match=r"--ckpt_path .* is ruined: fc.bias is NaN or infinite"):
        project.lit.run.fit([*RUN, "--devices", "1", "--max_epochs", "2", "--ckpt_path", str(path)])
    with pytest.raises(Ruined, match="is ruined: fc.bias"):
        project.raw.run.fit([*RUN, "--devices", "1", "--max_epochs", "2", "--ckpt_path", str(path)])
    with pytest.raises(Ruined, match="--model.weights .* is ruined"):
        project.raw.run.fit([*RUN, "--devices", "1", "--max_epochs", "2", "--model.weights", str(path)])
    done = run_module("project.validate", "--ckpt_path", path, "--devices", "1")
    assert (done.code, done.err.splitlines()[-1].startswith("error: --ckpt_path")) == (1, True), done.err
    done = run_module("project.predict", "--ckpt_path", path, Path(__file__))
    assert done.code == 1
    assert "is ruined: fc.bias is NaN or infinite." in done.err
    assert "Traceback" not in done.err
