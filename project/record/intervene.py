"""Counter-measures from outside: one thing of a training is switched off, so that a run without it shows what it has done.

`record/attached.py` loads this file, by its path, where LOCKSTEP_RECORD_INTERVENE names measures, separated by commas:

    batchnorm-eval   BatchNorm uses its running statistics, and does not change them
    dropout-off      nothing is dropped
    rate:K           each optimizer step is made with K times its learning rate
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def batchnorm_eval() -> None:
    switched: set[int] = set()

    def before(module: nn.Module, _: Any) -> None:
        if isinstance(module, BATCHNORMS) and module.training:
            switched.add(id(module))
            module.training = False

    def after(module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in switched:
            switched.discard(id(module))
            module.training = True

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after)


def dropout_off() -> None:
    def keep(values: Any, *_: Any, **__: Any) -> Any:
        return values

    for name in DROPOUTS:
        setattr(F, name, keep)
    attention = F.scaled_dot_product_attention

    def attend(*given: Any, **options: Any) -> Any:
        given = given[:4] + (0.0,) + given[5:] if len(given) > 4 else given
        return attention(*given, **{**options, **({"dropout_p": 0.0} if len(given) <= 4 else {})})

    F.scaled_dot_product_attention = attend


def rate(times: float) -> None:
    before: dict[int, list[Any]] = {}

    def change(optimizer: Any, *_: Any) -> None:
        before[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = times * group["lr"]

    def restore(optimizer: Any, *_: Any) -> None:
        for group, own in zip(optimizer.param_groups, before.pop(id(optimizer)), strict=True):
            group["lr"] = own

    register_optimizer_step_pre_hook(change)
    register_optimizer_step_post_hook(restore)  # after the recorder's, which sees the rate that was used


MEASURES: dict[str, Callable[[], None]] = {"batchnorm-eval": batchnorm_eval, "dropout-off": dropout_off}


def intervene(names: str) -> None:
    """Raises ValueError for a name that there is not."""
    for name in filter(None, names.split(",")):
        if name.startswith("rate:"):
            rate(float(name.removeprefix("rate:")))
        elif name in MEASURES:
            MEASURES[name]()
        else:
            raise ValueError(f"there is no counter-measure {name}")
