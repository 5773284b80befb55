"""The command line: LightningCLI with torchrun-like short flags, and one source of truth for each setting."""

import random
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from project.core.config import CONFIGS, DIGITS
from project.core.errors import UserError
from project.core.launch import drop_stale_variables, started_by_others
from project.lit.checkpoint import AtomicCheckpointIO, Best, EqualBuffers, Last, PendingValidation, Record
from project.lit.curves import Curves
from project.lit.data import ImageFolders
from project.lit.metrics import TrainMetrics
from project.lit.module import Classifier
from project.lit.progress import TrainingProgress
from project.lit.run_folder import RunFolder, newest_checkpoint

SHORT = {"devices", "strategy", "accelerator", "precision", "max_epochs", "num_nodes"}


def _value(arguments: list[str], flag: str) -> str | None:
    """The last value given for a flag, as `--flag value` or `--flag=value`."""
    found = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else next(iter(arguments[position + 1 : position + 2]), None)
    return found


def expand(arguments: list[str], *, default_config: bool) -> list[str]:
    """The command line as LightningCLI takes it.

    Short flags become `--trainer.*`; files come first, so that a flag wins wherever it stands; without a file the
    digits' or ImageNet's recipe is used; a seed that is to be drawn is drawn here, once for all ranks.
    """
    files, flags, printing = [], [], []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("-c", "--config"):
            files += [argument] if equals else [argument, *(value for value in [next(rest, None)] if value is not None)]
        elif name == "--print_config":
            printing.append(argument)
        elif name.removeprefix("--") in SHORT and name.startswith("--"):
            flags.append(f"--trainer.{name[2:]}{equals}{value}")
        else:
            flags.append(argument)
    if default_config and not files:
        recipe = "digits" if _value(flags, "--data.root") in (None, DIGITS) else "imagenet_resnet50"
        files = ["--config", str(CONFIGS / f"{recipe}.yaml")]
        if recipe == "digits" and _value(flags, "--data.root") is None:
            flags = ["--data.root", DIGITS, *flags]
    return [*files, *flags, *printing]


class Parser(LightningArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> Any:
        """One message instead of one after forty lines of usage."""
        raise UserError(message.strip()) from ex


class TrainCLI(LightningCLI):
    """`python -m project.fit`: parses, and builds model, data and trainer; runs nothing."""

    def __init__(self, arguments: list[str], **kwargs: Any) -> None:
        super().__init__(
            Classifier,
            ImageFolders,
            save_config_callback=RunFolder,
            trainer_defaults={"max_epochs": 90, "num_sanity_val_steps": 0},
            seed_everything_default=1,
            parser_class=Parser,
            parser_kwargs={"allow_abbrev": False, "prog": "python -m project.fit", "description": __doc__},
            args=arguments,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="Go on from this checkpoint; `last` is the newest one below trainer.default_root_dir.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        seed = self.config.seed_everything
        if isinstance(seed, bool):
            if started_by_others():
                raise UserError(f"--seed_everything {str(seed).lower()}: all ranks need one seed; give a number.")
            self.config.seed_everything = random.SystemRandom().randrange(2**32)
        elif not 0 <= seed < 2**32:
            raise UserError(f"--seed_everything {seed}: give a number from 0 to {2**32 - 1}.")

    def before_instantiate_classes(self) -> None:
        drop_stale_variables(num_nodes=self.config.trainer.num_nodes)
        if self.config.get("ckpt_path") == "last":
            root = Path(self.config.trainer.default_root_dir or ".")
            newest = newest_checkpoint(root)
            if newest is None:
                raise UserError(
                    f"--ckpt_path last: there is no checkpoint below {root / 'runs'}. Leave the flag out to start afresh,\n"
                    "or name the folder of the earlier runs with --trainer.default_root_dir."
                )
            self.config.ckpt_path = str(newest)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init.trainer
        given: list[Callback] = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
        given = [callback for callback in given if callback is not None]
        config.plugins = [*(config.plugins or []), AtomicCheckpointIO()]
        if config.default_root_dir is None:
            config.default_root_dir = "."
        if config.logger in (None, True):
            config.logger = False  # RunFolder makes the loggers, once the folder is known
        config.callbacks = [*default_callbacks(config, given), *given]
        if config.enable_progress_bar is None:
            config.enable_progress_bar = True
        config.enable_model_summary = config.enable_model_summary or False
        return super().instantiate_trainer(**kwargs)


def default_callbacks(config: Any, given: list[Callback]) -> list[Callback]:
    """What every run has, unless the user switched it off or brought his own."""
    metrics = TrainMetrics()
    callbacks: list[Callback] = [metrics, EqualBuffers(), PendingValidation(), Record()]
    if config.enable_progress_bar is not False and not any(isinstance(callback, ProgressBar) for callback in given):
        callbacks.append(TrainingProgress(metrics))
    if config.fast_dev_run:
        return callbacks
    callbacks.append(Curves(metrics))
    if config.enable_checkpointing is not False:
        callbacks.append(Last())
        if config.limit_val_batches != 0:
            callbacks.append(Best())
    return callbacks
