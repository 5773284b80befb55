"""Lightning's own callbacks and trainer flags that cannot work here, refused by name before anything starts.

What is not listed is passed on to Lightning as it is. notebooks/lightning_extensions.md has the whole table, with what works.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import lightning
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision.precision import Precision

from project.runtime.errors import UserError

_AVERAGE = "it would save the average in the place of the weights; give --model.ema_decay, which keeps both"
_FREEZES = "it freezes a part of the model that a ResNet has no name for; give --model.weights, and all of it is trained"
_NO_PREDICTION = "nothing is predicted in a training; use python -m project.predict"

# Name of a class of Lightning's, which stands for those that are derived from it -> why it is refused, and the remedy.
CALLBACKS = {
    "StochasticWeightAveraging": "it changes accumulation and rate in mid-training; give --model.ema_decay for an average",
    "WeightAveraging": _AVERAGE,
    "EMAWeightAveraging": _AVERAGE,
    "GradientAccumulationScheduler": (
        "steps per epoch, schedule and resuming go by one number for the whole training; give --trainer.accumulate_grad_batches"
    ),
    "BatchSizeFinder": "the batch is given for all ranks together, by --data.global_batch_size",
    "LearningRateFinder": "it would train, and go back; try rates with --model.lr and --trainer.max_steps",
    "BackboneFinetuning": _FREEZES,
    "BaseFinetuning": _FREEZES,
    "ModelPruning": "its checkpoints hold masks and other names of weights, which no command reads; leave it out",
    "Timer": "give --trainer.max_time DD:HH:MM:SS, which is the same",
    "OnExceptionCheckpoint": "what it saves lies between two steps, on one rank; give --checkpoint.every_steps",
    "BasePredictionWriter": _NO_PREDICTION,
}

# Flag -> the values that are accepted, and why others are refused.
FLAGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "barebones": ((False,), "it allows no checkpoint, no metric and no progress bar; leave it out"),
    "use_distributed_sampler": ((True,), "every rank would train on all images; leave it out"),
    "model_registry": ((None,), "nothing is uploaded; leave it out"),
    "limit_test_batches": ((None, 1.0), "there is no test set; leave it out"),
    "limit_predict_batches": ((None, 1.0), _NO_PREDICTION),
    "overfit_batches": (
        (0.0, 0),
        "each epoch would have other batches; give --trainer.limit_train_batches N and --data.shuffle false",
    ),
}

# The keywords of Lightning's Trainer with which this training has been tried; of a newer one's no effect here is known.
# fmt: off
TRIED = frozenset({
    "accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks", "fast_dev_run", "max_epochs",
    "min_epochs", "max_steps", "min_steps", "max_time", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps",
    "log_every_n_steps", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "accumulate_grad_batches",
    "gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark", "inference_mode",
    "use_distributed_sampler", "profiler", "detect_anomaly", "barebones", "plugins", "sync_batchnorm",
    "reload_dataloaders_every_n_epochs", "default_root_dir", "enable_autolog_hparams", "model_registry",
})
# fmt: on

NEED_A_LOGGER = ("LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor")
OURS = ("val/top1", "val/top5", "val/loss", "val/images")  # and the same of the average, as val/ema_...


def refuse_flags(trainer: Any) -> None:
    """Settings of the trainer, as they were given.

    Raises:
        UserError: one cannot work.
    """
    for name, (accepted, reason) in FLAGS.items():
        if name not in trainer:  # which the installed Lightning does not have
            continue
        value = trainer[name]
        if not any(type(value) is type(each) and value == each for each in accepted):  # 1 batch is not 1.0, all of them
            raise UserError(f"--trainer.{name} {_shown(value)}: {reason}.")


def refuse_untried(trainer: Mapping[str, Any], signature: inspect.Signature) -> None:
    """Keywords that a newer Lightning has: at their defaults they are passed on, with any other value they are refused.

    Args:
        trainer: Settings of the trainer, as they were given.
        signature: Of the installed Lightning's `Trainer.__init__`.

    Raises:
        UserError: a keyword is not in `TRIED` and was given a value.
    """
    for name, parameter in signature.parameters.items():
        if name in TRIED or name not in trainer:
            continue
        value = trainer[name]
        if type(value) is not type(parameter.default) or value != parameter.default:
            raise UserError(
                f"--trainer.{name} {_shown(value)}: Lightning {lightning.__version__} takes it, and this training has never been "
                "tried with it; leave it out."
            )


def refuse_callbacks(callbacks: Iterable[Callback], *, logger: Any, validates: bool, ema: bool) -> None:
    """The user's own callbacks.

    Args:
        callbacks: As they were made from the settings.
        logger: False where there is none.
        validates: Whether there is a validation, which has metrics.
        ema: Whether there is a moving average, which has some of its own.

    Raises:
        UserError: one cannot work.
    """
    for callback in callbacks:
        kinds = [kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("lightning.")]
        name = type(callback).__name__
        flag = f"--trainer.callbacks {name}"
        reason = next((CALLBACKS[kind] for kind in kinds if kind in CALLBACKS), None)
        if reason is not None:
            raise UserError(f"{flag}: {reason}.")
        if logger is False and any(kind in NEED_A_LOGGER for kind in kinds):
            raise UserError(f"{flag} writes to loggers, and --trainer.logger is false: leave one of the two out.")
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
            raise UserError(f"{flag} with save_on_exception: {CALLBACKS['OnExceptionCheckpoint']}.")
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            _refuse_monitor(flag, callback.monitor, validates=validates, ema=ema)


def refuse_plugins(plugins: Iterable[Any]) -> None:
    """The user's own plugins.

    Raises:
        UserError: one would replace what the training relies on.
    """
    for plugin in plugins:
        flag = f"--trainer.plugins {type(plugin).__name__}"
        if isinstance(plugin, Precision):
            raise UserError(f"{flag}: give --precision instead.")
        if isinstance(plugin, CheckpointIO):
            raise UserError(f"{flag}: checkpoints are written atomically by a plugin of this project; leave it out.")


def _refuse_monitor(flag: str, monitor: str, *, validates: bool, ema: bool) -> None:
    names = [*OURS, *(name.replace("val/", "val/ema_") for name in OURS if ema)] if validates else []
    if monitor not in [*names, "epoch", "step"]:
        known = f"there are {', '.join(names)}" if names else "without a validation there is no metric"
        raise UserError(f"{flag} monitors {monitor}, which no validation has: {known}.")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
