"""The command line: LightningCLI with short flags for the trainer, and one source of truth for each setting."""

import random
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from project.core.config import CONFIGS, DIGITS
from project.core.errors import UserError
from project.core.launch import drop_stale_variables, started_by_others, world_of_launcher
from project.lit.checkpoint import AtomicCheckpointIO, Best, EqualBuffers, Last, PendingValidation, Record
from project.lit.checks import check_devices
from project.lit.curves import Curves
from project.lit.data import ImageFolders
from project.lit.metrics import TrainMetrics
from project.lit.module import Classifier
from project.lit.progress import TrainingProgress
from project.lit.report import ClosingLine, ReportFailure
from project.lit.run_folder import RunFolder, newest_checkpoint

SHORT = {"devices", "strategy", "accelerator", "precision", "max_epochs", "num_nodes"}


def flag_value(arguments: list[str], flag: str) -> str | None:
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
        recipe = "digits" if flag_value(flags, "--data.root") in (None, DIGITS) else "imagenet_resnet50"
        files = ["--config", str(CONFIGS / f"{recipe}.yaml")]
        if recipe == "digits" and flag_value(flags, "--data.root") is None:
            flags = ["--data.root", DIGITS, *flags]
    return [*files, *flags, *printing]


def check_yaml(arguments: list[str]) -> None:
    """Name the file that is no YAML, which the parser's message does not."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("-c", "--config"):
            path = Path(value if equals else "".join(arguments[position + 1 : position + 2])).expanduser()
            if path.is_file():
                try:
                    yaml.safe_load(path.read_text())
                except (yaml.YAMLError, UnicodeDecodeError) as error:
                    reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
                    raise UserError(f"--config {path} is no valid YAML: {reason}") from error


class Parser(LightningArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> Any:
        """One short message instead of one after forty lines of usage; of a union's many complaints, the value."""
        first, *rest = message.strip().splitlines()
        if len(rest) > 2:
            rest = [line for line in rest if line.strip().startswith("Given value:")]
        raise UserError("\n".join([first, *rest])) from ex


class TrainCLI(LightningCLI):
    """`python -m project.fit`: parses, and builds model, data and trainer; runs nothing."""

    command = "fit"

    def __init__(self, arguments: list[str], defaults: dict[str, Any] | None = None) -> None:
        self.defaults = defaults or {}
        super().__init__(
            Classifier,
            ImageFolders,
            save_config_callback=RunFolder,
            trainer_defaults={"max_epochs": 90, "num_sanity_val_steps": 0},
            seed_everything_default=1,
            parser_class=Parser,
            parser_kwargs={
                "allow_abbrev": False,
                "prog": f"python -m project.{self.command}",
                "description": self.__doc__,
            },
            args=arguments,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="Go on from this checkpoint; `last` is the newest one below trainer.default_root_dir.",
        )
        parser.set_defaults(self.defaults)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        check_yaml(args)
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
        if started_by_others():
            self._follow_launcher()
        check_devices(self.config.trainer)
        if self.config.get("ckpt_path") == "last":
            root = Path(self.config.trainer.default_root_dir or ".")
            newest = newest_checkpoint(root)
            if newest is None:
                raise UserError(
                    f"--ckpt_path last: there is no checkpoint below {root / 'runs'}. Leave the flag out to start afresh,\n"
                    "or name the folder of the earlier runs with --trainer.default_root_dir."
                )
            self.config.ckpt_path = str(newest)

    def _follow_launcher(self) -> None:
        """Under torchrun or srun the number of processes is given: take it, or refuse another one."""
        world_size, local = world_of_launcher()
        trainer = self.config.trainer
        if trainer.devices == "auto":
            trainer.devices = local
        if trainer.num_nodes == 1:
            trainer.num_nodes = world_size // local
        if trainer.strategy == "auto" and world_size > 1:
            trainer.strategy = "ddp"
        if str(trainer.devices).isdigit() and int(trainer.devices) * trainer.num_nodes != world_size:
            raise UserError(
                f"--devices {trainer.devices} x --num_nodes {trainer.num_nodes} is not the {world_size} processes that "
                "the launcher has started: give both the same number, or leave --devices out."
            )

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
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:  # what Lightning refuses: devices, strategies, limits
            raise UserError(str(error)) from error


def default_callbacks(config: Any, given: list[Callback]) -> list[Callback]:
    """What every run has, unless the user switched it off or brought his own."""
    metrics = TrainMetrics()
    callbacks: list[Callback] = [ReportFailure(), metrics, EqualBuffers(), PendingValidation(), Record()]
    if config.enable_progress_bar is not False and not any(isinstance(callback, ProgressBar) for callback in given):
        callbacks.append(TrainingProgress(metrics))
    if config.fast_dev_run:
        return callbacks
    callbacks += [Curves(metrics), ClosingLine(metrics)]
    if config.enable_checkpointing is not False:
        # Best first, so that last.ckpt knows of it
        callbacks += [Best(), Last()] if config.limit_val_batches != 0 else [Last()]
    return callbacks


class ValidateCLI(TrainCLI):
    """`python -m project.validate`: the same settings; a checkpoint brings its own network and image sizes."""

    command = "validate"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Evaluate this checkpoint of a run.")
        parser.add_argument("--weights", type=str | None, default=None, help="Or this state dict of torchvision or timm.")
        parser.set_defaults(self.defaults)
