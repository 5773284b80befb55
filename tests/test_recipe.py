"""Recipes are those of their sources: rates, decay groups, averages, mixing, sizes; and what cannot be is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from project.data.mixing import Mixing
from project.data.transforms import TrainTransform, train_size
from project.model.ema import EMA, build_ema
from project.model.optim import build_optimizer, build_schedule, decay_groups, lr_factor
from project.model.resnet import build_model, new_model
from project.preflight.recipe import recipe_lines
from project.preflight.refusals import check_recipe
from project.runtime.device import tune
from project.runtime.errors import UserError
from project.settings.config import CONFIGS, DataConfig, ModelConfig
from project.settings.plan import BatchPlan

IMAGENET = 1_281_167  # training images


def recipe(name: str) -> tuple[ModelConfig, DataConfig, int]:
    """A config's model, data, and number of epochs."""
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return ModelConfig(**content["model"]), DataConfig(**content["data"]), content["trainer"]["max_epochs"]


def rates(config: ModelConfig, *, steps_per_epoch: int, epochs: int) -> list[float]:
    """The learning rate that each optimizer step is taken with, and the one after the last."""
    optimizer = build_optimizer(nn.Linear(1, 1), config)
    total = steps_per_epoch * epochs
    schedule = build_schedule(optimizer, config, steps_per_epoch=steps_per_epoch, total_steps=total)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*found, optimizer.param_groups[0]["lr"]]


# Learning rates


def test_torchvisions_first_recipe() -> None:
    """references/classification/train.py with its defaults: StepLR(step_size=30, gamma=0.1), stepped once an epoch."""
    model, _, epochs = recipe("imagenet_resnet50")
    found = rates(model, steps_per_epoch=2, epochs=epochs)
    assert found[:60] == [0.1] * 60
    assert found[60:120] == pytest.approx([0.01] * 60)
    assert found[120:180] == pytest.approx([0.001] * 60)
    source = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = StepLR(source, step_size=30, gamma=0.1)
    for epoch in range(epochs):
        assert found[2 * epoch] == pytest.approx(source.param_groups[0]["lr"])
        source.step()
        schedule.step()


def test_torchvisions_second_recipe() -> None:
    """Its train.py: LinearLR(start_factor=0.01, total_iters=5), then CosineAnnealingLR(T_max=600 - 5), once an epoch."""
    model, _, epochs = recipe("imagenet_resnet50_v2")
    found = rates(model, steps_per_epoch=2, epochs=epochs)
    # 0.5 x 0.01; 0.5 x (0.01 + 0.99 / 5); the peak; half way down from epoch 5 to 600 stands 0.25
    assert [found[0], found[1], found[2], found[10]] == pytest.approx([0.005, 0.005, 0.104, 0.5])
    assert found[2 * 302] == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 297 / 595)))
    source = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    warmup, cosine = LinearLR(source, start_factor=0.01, total_iters=5), CosineAnnealingLR(source, T_max=595)
    schedule = SequentialLR(source, schedulers=[warmup, cosine], milestones=[5])
    for epoch in range(epochs):
        assert found[2 * epoch] == found[2 * epoch + 1] == pytest.approx(source.param_groups[0]["lr"], rel=1e-6, abs=1e-12)
        source.step()
        schedule.step()


@pytest.mark.parametrize("epochs", [16, 32, 88])
def test_ffcvs_recipe(epochs: int) -> None:
    """Its train_imagenet.py: rates of whole epochs from interp([0, 2, epochs], [1e-4 lr, lr, 0]), straight lines within them."""
    model, _, _ = recipe("imagenet_resnet50_fast")
    steps = 8
    ends = np.interp(range(epochs + 1), [0, 2, epochs], [1e-4 * 1.7, 1.7, 0])
    source = [np.interp(step, [0, steps], ends[epoch : epoch + 2]) for epoch in range(epochs) for step in range(steps)]
    found = rates(model, steps_per_epoch=steps, epochs=epochs)
    assert found[:-1] == pytest.approx(source)
    assert (found[0], found[2 * steps], found[-1]) == (pytest.approx(1.7e-4), 1.7, 0.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("total", [7, 10, 434])
def test_a_schedule_ends_at_its_end(schedule: Any, total: int) -> None:
    """Whatever the number of steps: ranks, accumulation and limits change only that."""
    config = ModelConfig(lr=0.3, schedule=schedule, end_lr=0.003, warmup_epochs=1)
    steps = {"config": config, "steps_per_epoch": 3, "total_steps": total}
    assert 0.3 * lr_factor(total, **steps) == pytest.approx(0.003, rel=1e-12)
    assert lr_factor(3, **steps) == 1.0
    falling = [lr_factor(step, **steps) for step in range(3, total + 1)]
    assert falling == sorted(falling, reverse=True)
    zero = {**steps, "config": ModelConfig(lr=0.3, schedule=schedule, warmup_epochs=1)}
    assert lr_factor(total, **zero) == 0.0


def test_an_interval_of_an_epoch_changes_nothing_inside_it() -> None:
    config = ModelConfig(lr=1.0, schedule="linear", interval="epoch", warmup_epochs=1, warmup_start=0.5)
    assert rates(config, steps_per_epoch=2, epochs=3) == [0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.0]


# Weight decay


def test_decay_groups_go_by_the_type_of_the_layer() -> None:
    """ResNet-50 has 53 BatchNorms with 26,560 channels; those in the shortcuts are called downsample.1."""
    network = new_model("resnet50", num_classes=1000)
    config = ModelConfig(weight_decay=2e-5, norm_weight_decay=0.0)
    groups = decay_groups(network, config)
    assert {kinds: (decay, sum(p.numel() for p in held)) for kinds, (decay, held) in groups.items()} == {
        "weights, biases": (2e-5, 25_503_912),
        "norms": (0.0, 2 * 26_560),
    }
    norms = {id(p) for p in groups["norms"][1]}
    assert {id(network.layer1[0].downsample[1].weight), id(network.bn1.bias)} <= norms
    assert len(norms) == 2 * 53
    no_bias = decay_groups(network, ModelConfig(norm_weight_decay=0.0, bias_weight_decay=0.0))
    assert [len(held) for _, held in no_bias.values()] == [54, 2 * 53 + 1]  # timm's split: all that is one-dimensional
    assert all(p.ndim == 1 for p in no_bias["norms, biases"][1])


def test_without_exceptions_there_is_one_group_in_torchs_order() -> None:
    network = new_model("resnet18", num_classes=10)
    optimizer = build_optimizer(network, ModelConfig())
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in network.parameters()]
    with_groups = build_optimizer(network, ModelConfig(optimizer="adamw", norm_weight_decay=0.0, weight_decay=0.05))
    assert [group["weight_decay"] for group in with_groups.param_groups] == [0.05, 0.0]


# The moving average


def test_torchvisions_average() -> None:
    """Its train.py: alpha = (1 - 0.99998) x 8 ranks x 128 images x 32 steps / 600 epochs."""
    model, _, _ = recipe("imagenet_resnet50_v2")
    assert model.ema_decay == pytest.approx(1 - 0.00002 * 8 * 128 * 32 / 600, rel=1e-12)
    assert model.ema_every == 32


def test_the_average_is_the_formula() -> None:
    """decay 0.75, every second step, no warm-up: after step 1 a copy, after 3 and 5 a quarter of the new."""
    network = nn.BatchNorm1d(1)
    average = EMA(network, decay=0.75, every=2, warmup_steps=0)
    seen = []
    for step in range(1, 7):
        with torch.no_grad():
            network.weight.fill_(step)
            network.running_mean.fill_(10 * step)
            network.num_batches_tracked.fill_(step)
        average.update(network, step=step)
        values = average.model
        seen.append((values.weight.item(), values.running_mean.item(), values.num_batches_tracked.item()))
    assert seen[0] == seen[1] == (1.0, 10.0, 1)
    assert seen[2] == seen[3] == (1.5, 15.0, 3)  # 0.75 x 1 + 0.25 x 3
    assert seen[4] == seen[5] == (2.375, 23.75, 5)  # 0.75 x 1.5 + 0.25 x 5
    assert not average.model.training
    assert build_ema(network, ModelConfig(), warmup_steps=0) is None


def test_until_warmup_ends_the_average_is_a_copy() -> None:
    network = nn.Linear(1, 1, bias=False)
    average = EMA(network, decay=0.5, every=1, warmup_steps=3)
    seen = []
    for step in range(1, 6):
        nn.init.constant_(network.weight, step)
        average.update(network, step=step)
        seen.append(average.model.weight.item())
    assert seen == [1.0, 2.0, 3.0, 4.0, 4.5]  # the first after warm-up copies as well, as in torchvision's train.py


# Mixing


def mixed(number: int, *, rank: int = 0, epoch: int = 0, **config: float) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 16, 16)  # image k is all k
    mixing = Mixing(DataConfig(**config), num_classes=8, seed=1)
    return mixing(images, torch.arange(8), epoch=epoch, batch=number, rank=rank)


def test_mixup_and_cutmix_are_chosen_evenly_and_mix_targets_as_images() -> None:
    """torchvision's train.py: RandomChoice of the two, each with probability 1; Beta(0.2, 0.2) and Beta(1, 1)."""
    _, data, _ = recipe("imagenet_resnet50_v2")
    assert (data.mixup_alpha, data.cutmix_alpha) == (0.2, 1.0)
    blended = 0
    for number in range(400):
        images, target = mixed(number, mixup_alpha=0.2, cutmix_alpha=1.0)
        assert target.sum(dim=1) == pytest.approx(1.0)
        # of image 1, which is mixed with image 0: the mean pixel is the share of target 1
        assert images[1].mean().item() == pytest.approx(target[1, 1].item(), abs=1e-5)
        within = len(images[1].unique())
        blended += within == 1 and 0 < target[1, 1] < 1
    assert 160 <= blended <= 240  # 200 expected, standard deviation 10; cutmix of nothing or all is rare
    shares = np.array([mixed(number, mixup_alpha=0.2)[1][1, 1].item() for number in range(400)])
    # Beta(0.2, 0.2): mean 1/2, variance 1 / (4 x 1.4), so standard errors of 0.021 and about 0.007
    assert (shares.mean(), shares.var()) == (pytest.approx(0.5, abs=0.08), pytest.approx(1 / 5.6, abs=0.03))


def test_a_batchs_mix_depends_on_its_number_epoch_and_rank_alone() -> None:
    torch.manual_seed(3)
    one = mixed(5, rank=1, epoch=2, mixup_alpha=1.0)
    before = torch.get_rng_state()
    assert torch.equal(one[1], mixed(5, rank=1, epoch=2, mixup_alpha=1.0)[1])
    assert torch.equal(before, torch.get_rng_state())
    for other in (mixed(6, rank=1, epoch=2, mixup_alpha=1.0), mixed(5, rank=0, epoch=2, mixup_alpha=1.0)):
        assert not torch.equal(one[1], other[1])
    images, target = mixed(0)
    assert target.dtype == torch.int64
    assert len(images[1].unique()) == 1


# Sizes and pixels


def test_images_grow_as_ffcvs_do() -> None:
    """Its get_resolution for 16 epochs, ramp from 11 to 13: round(176 / 32) is 6 in epoch 12."""
    _, data, epochs = recipe("imagenet_resnet50_fast")
    assert [train_size(data, epoch=epoch, epochs=epochs) for epoch in range(16)] == [160] * 12 + [192] * 4
    slow = DataConfig(start_size=64, train_size=128, size_multiple=16)
    assert [train_size(slow, epoch=epoch, epochs=4) for epoch in range(5)] == [64, 80, 96, 112, 128]
    assert train_size(DataConfig(train_size=96), epoch=3, epochs=None) == 96
    # FixRes: evaluated larger than trained
    assert (data.val_resize, data.val_size) == (round(256 * 256 / 224), 256)
    assert [recipe("imagenet_resnet50_v2")[1].train_size, recipe("imagenet_resnet50_v2")[1].val_resize] == [176, 232]


def test_augmentations_are_torchvisions_in_its_order() -> None:
    _, data, _ = recipe("imagenet_resnet50_v2")
    transform = TrainTransform(data, epochs=600)
    transform(torch.full((3, 200, 300), 255, dtype=torch.uint8), 0)
    [steps] = [[type(step).__name__ for step in compose.transforms] for compose in transform.by_size.values()]
    expected = ["RandomResizedCrop", "RandomHorizontalFlip", "TrivialAugmentWide", "RandomErasing"]
    assert steps == expected
    erasing = transform.by_size[176].transforms[-1]
    assert (erasing.p, erasing.value) == (0.1, [124, 116, 104])  # 255 x 0.485, 0.456, 0.406
    white = torch.full((3, 64, 64), 255, dtype=torch.uint8)
    always = TrainTransform(DataConfig(train_size=64, random_erasing=1.0), epochs=1)
    seen = always(white, 0).flatten(1).unique(dim=1).T.tolist()
    assert sorted(seen) == [[124, 116, 104], [255, 255, 255]]


# What a run says, and what it refuses


def test_the_table_before_the_first_step() -> None:
    model, data, epochs = recipe("imagenet_resnet50_v2")
    lines = recipe_lines(model, data, num_classes=1000, epochs=epochs)
    text = " ".join(" ".join(lines).split())
    assert "warm-up over 5 epochs from 1 %, cosine to 0, changed every epoch" in text
    assert "2e-05 on 25,503,912 parameters (weights, biases), 0 on 53,120 parameters (norms)" in text
    assert "176 px, crops of 8 to 100 % of the area, flip 0.5, TrivialAugmentWide, erasing 0.1, mixup 0.2, cutmix 1" in text
    assert "EMA 0.998908 every 32 steps" in text
    assert max(map(len, lines)) < 80
    short = DataConfig(start_size=32, train_size=64, size_multiple=16)  # ended by max_steps within the second epoch
    assert "32 px from epoch 1, 64 px from epoch 2" in recipe_lines(ModelConfig(), short, num_classes=10, epochs=4 / 3)[2]
    model, data, _ = recipe("imagenet_resnet50_fast")
    text = " ".join(recipe_lines(model, data, num_classes=1000, epochs=32))
    assert "160 px from epoch 1, 192 px from epoch 25" in text


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (ModelConfig, "lr", -1.0),
        (ModelConfig, "lr", math.nan),
        (ModelConfig, "lr", math.inf),
        (ModelConfig, "norm_weight_decay", -1e-4),
        (ModelConfig, "end_lr", 0.2),  # above the peak of 0.1
        (ModelConfig, "warmup_start", 1.5),
        (ModelConfig, "ema_decay", 1.0),
        (ModelConfig, "ema_every", 0),
        (DataConfig, "start_size", 16),
        (DataConfig, "start_size", 256),  # above train_size
        (DataConfig, "train_size", 31),
        (DataConfig, "ramp_start", 1.5),
        (DataConfig, "hflip", 1.5),
        (DataConfig, "random_erasing", -0.1),
        (DataConfig, "mixup_alpha", -0.2),
        (DataConfig, "cutmix_alpha", math.nan),
        (DataConfig, "size_multiple", 0),
    ],
)
def test_impossible_values_are_refused_by_name(kind: type, setting: str, value: Any) -> None:
    part = "model" if kind is ModelConfig else "data"
    with pytest.raises(UserError, match=rf"--{part}\.{setting} is"):
        kind(**{setting: value})


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_needs_an_end(schedule: Any) -> None:
    config = ModelConfig(schedule=schedule)
    with pytest.raises(UserError, match=rf"--model\.schedule {schedule} needs an end.*--trainer\.max_epochs"):
        build_schedule(build_optimizer(nn.Linear(1, 1), config), config, steps_per_epoch=1, total_steps=None)


def test_warmup_longer_than_training_and_growth_without_end_are_refused() -> None:
    plan = BatchPlan(global_batch_size=4, world_size=1, accumulate=1, samples=40, drop_last=True)
    longer = ModelConfig(schedule="cosine", warmup_epochs=3)
    with pytest.raises(UserError, match=r"--model\.warmup_epochs 3 is 30 steps, and the training has 29"):
        check_recipe(plan, longer, DataConfig(), total_steps=29)
    check_recipe(plan, longer, DataConfig(), total_steps=30)
    with pytest.raises(UserError, match=r"--data\.start_size needs an end"):
        check_recipe(plan, ModelConfig(schedule="constant"), DataConfig(start_size=64), total_steps=None)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("imagenet_*.yaml")))
def test_an_imagenet_recipe_can_start_on_its_hardware(name: str) -> None:
    """Steps per epoch as the header says, on the 8 devices that it names."""
    model, data, epochs = recipe(name)
    plan = BatchPlan(
        global_batch_size=data.global_batch_size, world_size=8, accumulate=1, samples=IMAGENET, drop_last=data.drop_last
    )
    check_recipe(plan, model, data, total_steps=epochs * plan.steps_per_epoch)
    header = Path(CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").split("\n\n")[0]
    assert f"{epochs} epochs of {plan.steps_per_epoch:,} steps" in header
    assert f"{plan.per_rank_batch} on 8 devices" in header


# Layout, compilation, devices


def test_nothing_is_tuned_on_a_cpu() -> None:
    assert tune("cpu", deterministic=False, benchmark=None) == []


@pytest.mark.gpu
def test_a_gpu_is_tuned_unless_bits_matter() -> None:
    assert tune("cuda", deterministic=False, benchmark=None) == ["TF32", "cuDNN autotune"]
    assert tune("cuda", deterministic=True, benchmark=True) == []
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.slow
def test_a_compiled_network_keeps_its_names() -> None:
    """What is saved compiled loads uncompiled, and back; the outputs are the same to rounding. One layer takes seconds."""
    plain, compiled = (build_model(ModelConfig(arch="resnet18"), num_classes=4, seed=1).eval().layer1 for _ in range(2))
    compiled.compile()
    images = torch.randn(2, 64, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), plain(images), rtol=1e-4, atol=1e-4)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(compiled.state_dict(), strict=True)
    compiled.load_state_dict(plain.state_dict(), strict=True)
