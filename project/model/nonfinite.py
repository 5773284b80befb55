"""Ruined states: weights, statistics, averages or optimizer states with NaN or infinity are never saved, validated or used."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

# What the guard's report of a gradient advises the user of a trainer, who has flags and no script.
IF_NOT_FINITE = (
    "No state from this step on was saved. Look at the samples of a rank whose output is not finite; else lower the rate\n"
    "(--model.lr) or lengthen its warm-up (--model.warmup_epochs), clip the gradients (--trainer.gradient_clip_val 1), and\n"
    "train in 32 bits (--trainer.precision 32-true)."
)


class Ruined(RuntimeError):
    """A ruined state. Commands print the message, once, and exit with code 1."""

    is_report = True
    same_on_all_ranks = True


def bad_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those that hold NaN or an infinity. Waits for the device."""
    floating = {name: value.detach() for name, value in tensors.items() if value.is_floating_point() and value.numel()}
    if not floating:
        return []
    # A NaN or an infinity stays in a sum, which is much faster on a CPU than looking at each element.
    sums = torch.stack([value.sum(dtype=torch.float32) for value in floating.values()])
    suspects = [name for name, total in zip(floating, sums.tolist(), strict=True) if not math.isfinite(total)]
    return [name for name in suspects if not floating[name].isfinite().all()]  # a sum of finite elements may overflow


def training_tensors(model: nn.Module, optimizer: optim.Optimizer, average: nn.Module | None) -> dict[str, Tensor]:
    """All that a training goes on from, each under a name for people."""
    found = _network(model, "")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{key} of {names[parameter]}"] = value
    return found | (_network(average, " of the moving average") if average is not None else {})


def _network(network: nn.Module, suffix: str) -> dict[str, Tensor]:
    """Weights first: a ruin of the statistics alone has another cause."""
    return {f"{name}{suffix}": value for name, value in [*network.named_parameters(), *network.named_buffers()]}


def others_too(count: int, names: Collection[str]) -> str:
    """How many tensors besides the first one, out of all, are not finite either; empty for none."""
    verb = "is" if count == 2 else "are"
    return f", and so {verb} {count - 1:,} of {len(names) - 1:,} other tensors" if count > 1 else ""


def check_loaded(tensors: Mapping[str, Tensor], *, path: str, flag: str) -> None:
    """Of a file that is about to be used.

    Raises:
        Ruined: it holds NaN or an infinity.
    """
    bad = bad_tensors(tensors)
    if bad:
        raise Ruined(
            f"{flag} {path} is ruined: {bad[0]} is NaN or infinite{others_too(len(bad), tensors)}. "
            "Use a checkpoint from before the loss became NaN."
        )


def scores(metrics: Mapping[str, Any], *, prefix: str = "val/") -> bool:
    """Whether a validation can be the best: its loss is a finite number."""
    return math.isfinite(metrics.get(f"{prefix}loss", 0.0))


def unusable_line(metrics: Mapping[str, Any]) -> str | None:
    """What is said of a validation whose loss is no finite number, though all weights are finite; None for all others."""
    bad = [name for name, value in metrics.items() if name in ("val/loss", "val/ema_loss") and not math.isfinite(value)]
    if not bad:
        return None
    consequence = "" if scores(metrics) else " This validation cannot be the best."
    return (
        f"note  {' and '.join(bad)} is NaN or infinite, and all weights are finite.{consequence}\n"
        "      Look at the rate (--model.lr), the precision (--trainer.precision) and the validation images."
    )
