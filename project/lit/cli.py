"""The command line: LightningCLI with short flags for the trainer, and one source of truth for each setting."""

import inspect
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from project.data.loading import numbers_of
from project.lit.accelerator import OwnGPU
from project.lit.checkpoint import AtomicCheckpointIO, Best, EqualBuffers, Last, PendingValidation, Record
from project.lit.curves import Curves
from project.lit.data import ImageFolders
from project.lit.ema import MovingAverage
from project.lit.ending import ClosingLine, ReportFailure
from project.lit.extensions import refuse_callbacks, refuse_flags, refuse_plugins, refuse_untried
from project.lit.guard import ReplicaGuardCallback
from project.lit.interruption import Interruption
from project.lit.metrics import TrainMetrics
from project.lit.module import Classifier
from project.lit.no_profiler import NoProfiler
from project.lit.nonfinite import RefuseRuin
from project.lit.preflight import CheckAlike
from project.lit.progress import TrainingProgress
from project.lit.recording import Recording
from project.lit.run_folder import RunFolder
from project.model.nonfinite import IF_NOT_FINITE
from project.preflight.refusals import check_devices, check_numbers
from project.runtime.device import find_device, one_gpu_per_task
from project.runtime.errors import UserError
from project.runtime.launched import drop_stale_variables, started_by_others
from project.settings.arguments import (
    FILES,
    OneMessage,
    as_it_will_run,
    decide_seed,
    find_checkpoint,
    follow_hardware,
    follow_launcher,
    keep_whole_numbers,
    read_yaml,
    shorten,
)
from project.settings.config import CheckpointConfig, GuardConfig


class Parser(OneMessage, LightningArgumentParser):
    """Lightning's, which LightningCLI needs."""


class TrainParser(Parser):
    def dump(self, namespace: Any, *args: Any, **kwargs: Any) -> str:
        """`--print_config` calls it inside of `parse_args`, before anything can be filled in there."""
        return super().dump(as_it_will_run(namespace), *args, **kwargs)


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
            parser_class=TrainParser if self.command == "fit" else Parser,
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
            help="Go on from this checkpoint; `last` or `best`: the newest one below trainer.default_root_dir.",
        )
        parser.add_argument("--record", type=str | None, default=None, help="Write what the training does to this folder.")
        parser.add_class_arguments(CheckpointConfig, "checkpoint")
        parser.add_class_arguments(GuardConfig, "guard")
        parser.set_defaults(self.defaults)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        read_yaml(args, flags=FILES)
        super().parse_arguments(parser, args)
        if self.command == "fit":
            follow_hardware(self.config)
        keep_whole_numbers(args, self.config.trainer)
        self.config.seed_everything = decide_seed(self.config.seed_everything)
        self.record: str | None = self.config.get("record")
        if self.record is not None:
            self.config.record = None  # of this run only: config.yaml is there to be run again

    def before_instantiate_classes(self) -> None:
        drop_stale_variables(num_nodes=self.config.trainer.num_nodes)
        if started_by_others():
            follow_launcher(self.config.trainer)
        check_numbers(self.config.trainer)
        if self.config.trainer.profiler == "xla":  # whose destructor has an error of its own where torch_xla is not there
            raise UserError("--trainer.profiler xla needs a TPU: give simple, advanced or pytorch.")
        check_devices(self.config.trainer)
        refuse_flags(self.config.trainer)
        refuse_untried(vars(self.config.trainer), inspect.signature(Trainer.__init__))
        root = self.config.trainer.default_root_dir
        self.config.ckpt_path = find_checkpoint(self.config.get("ckpt_path"), root=root)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except UserError:
            raise
        except ValueError as error:  # jsonargparse's, where a class of the settings cannot be made
            raise UserError(shorten(str(error))) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init.trainer
        given: list[Callback] = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
        given = [callback for callback in given if callback is not None]
        ema = self.config.model.ema_decay is not None
        refuse_callbacks(given, logger=config.logger, validates=config.limit_val_batches != 0, ema=ema)
        plugins = config.plugins if isinstance(config.plugins, list) else [config.plugins]
        plugins = [plugin for plugin in plugins if plugin is not None]
        refuse_plugins(plugins)
        config.plugins = [*plugins, AtomicCheckpointIO()]
        if isinstance(config.strategy, str) and config.strategy.rpartition(".")[2] == "DDPStrategy":
            config.strategy = DDPStrategy()  # the class alone is no name that Lightning knows
        if config.default_root_dir is None:
            config.default_root_dir = "."
        if config.logger in (None, True):
            config.logger = False  # RunFolder makes the loggers, once the folder is known
        recording = [] if self.record is None else [Recording(self.record)]
        ruin = [RefuseRuin(self.config.ckpt_path)] if self.command == "fit" else []
        config.callbacks = [*default_callbacks(config, given, ema=ema), *ruin, *recording, *self._guard(), *given]
        if self.command == "fit":
            last = next((callback for callback in config.callbacks if isinstance(callback, Last)), None)
            config.callbacks.append(Interruption(self.config_init.checkpoint, last))
        if config.profiler is None:
            config.profiler = NoProfiler()
        if find_device(str(config.accelerator)) == "cuda" and one_gpu_per_task():
            config.accelerator = OwnGPU()
        if config.enable_progress_bar is None:
            config.enable_progress_bar = True
        config.enable_model_summary = config.enable_model_summary or False
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError, ImportError) as error:  # what Lightning refuses, or lacks
            raise UserError(f"Lightning's Trainer refuses these settings: {error}") from error
        # Loggers are made with the run's folder, and callbacks ask for them in their setup.
        trainer.callbacks.sort(key=lambda each: not isinstance(each, RunFolder))  # type: ignore[attr-defined]  # declared nowhere
        return trainer

    def _guard(self) -> list[Callback]:
        config: GuardConfig = self.config_init.guard
        if not config.every or self.command != "fit":
            return []
        options: dict[str, Any] = {"indices": numbers_of, "if_not_finite": IF_NOT_FINITE, "quiet": True}
        return [ReplicaGuardCallback(every=config.every, timeout_s=config.timeout, **options)]


def default_callbacks(config: Any, given: list[Callback], *, ema: bool) -> list[Callback]:
    """What every run has, unless the user switched it off or brought his own."""
    metrics = TrainMetrics()
    pending = PendingValidation()
    callbacks: list[Callback] = [
        ReportFailure(),
        CheckAlike(),
        metrics,
        *([MovingAverage()] if ema else []),
        EqualBuffers(),
        pending,
    ]
    callbacks.append(Record(pending))
    if config.enable_progress_bar is not False and not any(isinstance(callback, ProgressBar) for callback in given):
        callbacks.append(TrainingProgress(metrics.means))
    if config.fast_dev_run:
        return callbacks
    callbacks += [Curves(metrics.means), ClosingLine(metrics.means)]
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
        parser.add_class_arguments(CheckpointConfig, "checkpoint")  # so that a run's config.yaml is accepted
        parser.add_class_arguments(GuardConfig, "guard")
        parser.set_defaults(self.defaults)
