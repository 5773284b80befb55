"""A ruined state ends a training before it is validated or saved: all ranks look, and all of them end, so that none waits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from project.model.nonfinite import Ruined, bad_tensors, others_too

_NEVER = 2**62  # the step of a loss that was always finite


class LossWatch:
    """The first optimizer step, from 1, in which this rank's loss was not finite; on the device, so that no step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.step = torch.full((), _NEVER, dtype=torch.int64, device=device)

    def see(self, loss: Tensor, *, step: int) -> None:
        """A scalar loss of optimizer step `step`, from 1; the device is not waited for."""
        self.step = torch.where(loss.isfinite(), self.step, self.step.clamp(max=step))

    def forget(self) -> None:
        """What has ruined nothing, such as an overflow whose step a GradScaler has left out."""
        self.step = torch.full_like(self.step, _NEVER)


@dataclass(frozen=True)
class Advice:
    """What the message needs of a run: its flags and its newest good checkpoint.

    Attributes:
        lr: Peak learning rate.
        clips: Gradients are clipped.
        precision: Lightning's name of it.
        checkpoints: In order of preference; one that is no file is not named.
    """

    lr: float
    clips: bool
    precision: str
    checkpoints: tuple[Path, ...]

    def lines(self, *, rank: int | None) -> list[str]:
        """Remedies, with the rank whose data are suspect where it is known, and what is left to go on from."""
        half = self.precision.startswith(("16", "bf16"))
        remedies = [f"lower the rate (--model.lr {self.lr:g}) or lengthen its warm-up (--model.warmup_epochs)"]
        remedies += [] if self.clips else ["clip the gradients (--trainer.gradient_clip_val 1)"]
        remedies += [f"give --trainer.precision 32-true (it is {self.precision})"] if half else []
        remedies += ["look at the images" + ("" if rank is None else f" of rank {rank}")]
        good = next((path for path in self.checkpoints if path.is_file()), None)
        left = f"The newest good checkpoint is {good}." if good else "There is no earlier checkpoint."
        return ["Remedies:", *[f"- {remedy}" for remedy in remedies], f"The ruined state was not saved. {left}"]


class StateCheck:
    """Looks at a training's state before it is validated or saved, and at its end.

    Attributes:
        watch: Watches this rank's losses.
        good: The optimizer step after which all was finite last; None before the first look.
    """

    def __init__(self, device: torch.device) -> None:
        self.watch = LossWatch(device)
        self.good: int | None = None

    def __call__(self, tensors: Mapping[str, Tensor], *, step: int, advice: Advice) -> None:
        """On all ranks, after optimizer step number `step`; each step is looked at once.

        Raises:
            Ruined: on all ranks, where a tensor of any rank is not finite.
        """
        if step == self.good:
            return
        bad = bad_tensors(tensors)
        first = list(tensors).index(bad[0]) if bad else -1
        own = torch.cat([self.watch.step[None], self.watch.step.new_tensor([first, len(bad)])])
        rows = _gather(own)
        if any(count for _, _, count in rows):
            raise Ruined(self._message(list(tensors), rows, step=step, advice=advice))
        self.good = step
        self.watch.forget()

    def _message(self, names: list[str], rows: list[list[int]], *, step: int, advice: Advice) -> str:
        ruined = [rank for rank, row in enumerate(rows) if row[2]]
        _, first, count = rows[ruined[0]]
        where = "" if len(ruined) == len(rows) else f" on rank {ruined[0]}"
        if self.good is None:
            return f"{names[first]} is NaN or infinite{where} before the first step{others_too(count, names)}."
        step_of_loss = min(row[0] for row in rows)
        ranks = [rank for rank, row in enumerate(rows) if row[0] == step_of_loss < _NEVER]
        alone = ranks[0] if len(ranks) == 1 < len(rows) else None
        found = f"{names[first]} is NaN or infinite{where} after step {step}{others_too(count, names)}."
        since = f"After step {self.good} all were finite." if self.good else "At the start all were finite."
        lines = [found, f"{since} {_loss_line(step_of_loss, ranks, rows)}", *advice.lines(rank=alone)]
        return "\n".join(lines)


def _loss_line(step: int, ranks: list[int], rows: list[list[int]]) -> str:
    """Which loss was the first that was not finite."""
    if not ranks:
        return "So were all losses: the last update was too large, or a gradient was not finite."
    if len(rows) == 1:
        return f"The loss was not finite from step {step} on."
    if len(ranks) == len(rows):
        return f"The losses of all ranks were not finite from step {step} on: the update before was too large."
    whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"The loss of {whose} was not finite in step {step}, before that of any other rank."


def _gather(row: Tensor) -> list[list[int]]:
    """The row of each rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [row.tolist()]
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [each.tolist() for each in rows]
