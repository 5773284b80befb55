"""Replaces LightningCLI and Trainer.__init__: the same YAML and flags, each keyword honoured or refused by name."""

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, Union

import yaml
from jsonargparse import ArgumentParser, Namespace
from torch.nn.parallel import DistributedDataParallel

from project.preflight.refusals import check_devices, check_hardware, check_numbers
from project.raw.distributed import DDP_KEYWORDS
from project.runtime.device import find_device, find_ranks
from project.runtime.errors import UserError
from project.runtime.files import replacing
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
)
from project.settings.config import CheckpointConfig, DataConfig, GuardConfig, ModelConfig

PRECISIONS = {None: "32-true", 32: "32-true", "32": "32-true", "32-true": "32-true", "16-mixed": "16-mixed"}
PRECISIONS |= {16: "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed"}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Keywords of Lightning's Trainer that are honoured here, with its meaning.

    Args:
        accelerator: auto, cpu, gpu or cuda, mps.
        strategy: auto, or ddp: one process per device; or Lightning's DDPStrategy with DDP's own keywords as init_args.
        devices: Processes, and so devices, on each node; auto takes all GPUs, or one process without any; 1,3 names GPUs.
        num_nodes: Machines; on each of several this command runs with NODE_RANK, MASTER_ADDR and MASTER_PORT.
        precision: 32-true, bf16-mixed, or 16-mixed on GPUs.
        logger: false writes no metrics.csv and no TensorBoard events.
        max_epochs: -1 for no last epoch.
        max_steps: Optimizer steps at most; -1 for no limit.
        limit_train_batches: Batches per rank and epoch at most, or with a fraction the share of them.
        limit_val_batches: The same for validation; 0 leaves it out.
        check_val_every_n_epoch: Epochs from one validation to the next.
        num_sanity_val_steps: Validation batches before the first step; -1 for all.
        log_every_n_steps: Steps in one interval of metrics.csv.
        enable_checkpointing: false writes no checkpoints.
        enable_progress_bar: false prints nothing while training.
        accumulate_grad_batches: Batches whose gradients make one step.
        gradient_clip_val: Largest norm of all gradients together, or largest value of each.
        gradient_clip_algorithm: norm or value.
        deterministic: true uses deterministic algorithms only; warn allows others with a warning.
        benchmark: Let cuDNN try its algorithms.
        sync_batchnorm: BatchNorm over all ranks; GPUs only.
        default_root_dir: Folder in which runs/ is made.
    """

    accelerator: str = "auto"
    strategy: str | dict[str, Any] = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    precision: int | str | None = None
    logger: bool | None = None
    max_epochs: int | None = 90
    max_steps: int = -1
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    check_val_every_n_epoch: int = 1
    num_sanity_val_steps: int | None = 0
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    sync_batchnorm: bool = False
    default_root_dir: str | None = None


# The other keywords, with the values that ask for nothing; the first is the default.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "callbacks": (None, []),
    "fast_dev_run": (False,),
    "min_epochs": (None,),
    "min_steps": (None,),
    "max_time": (None,),
    "limit_test_batches": (None, 1.0),
    "limit_predict_batches": (None, 1.0),
    "overfit_batches": (0.0, 0),
    "val_check_interval": (None, 1.0),
    "enable_model_summary": (None, False),
    "use_distributed_sampler": (True,),
    "profiler": (None,),
    "detect_anomaly": (False,),
    "barebones": (False,),
    "plugins": (None, []),
    "reload_dataloaders_every_n_epochs": (0,),
    "enable_autolog_hparams": (True, False),
    "model_registry": (None,),
    "inference_mode": (True, False),  # of trainer.validate; a training validates under no_grad
}

T = TypeVar("T")

# Not typing.Any: with it jsonargparse imports whatever a class_path names, Lightning included.
_ANY = Union[bool, int, float, str, dict, list, None]  # noqa: UP007


@dataclass(frozen=True)
class Settings:
    """A parsed command line.

    Attributes:
        parser: Which made `config`, and saves it.
        config: All of it, as it was read.
        gpus: Of each rank on this machine the number of its GPU.
    """

    parser: ArgumentParser
    config: Namespace
    trainer: TrainerConfig
    model: ModelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    guard: GuardConfig
    seed: int
    ckpt_path: str | None
    record: str | None
    gpus: list[int]


class Parser(OneMessage, ArgumentParser):
    """In the place of Lightning's."""

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """`--print_config` calls it inside of `parse_args`, before anything can be filled in there."""
        return super().dump(as_it_will_run(namespace), *args, **kwargs)


def _parser(unknown: set[str]) -> ArgumentParser:
    """Of this command; it reads `unknown` keywords of the trainer, too."""
    parser = Parser(
        prog="python -m project.fit_raw",
        description="Train with plain torch, from the same YAML and flags.",
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", action="config", help="Read settings from this YAML file.")
    parser.add_argument("--seed_everything", type=bool | int, default=1, help="Seed of weights, order and augmentation.")
    parser.add_argument("--trainer.strategy", type=_ANY, default="auto", help="auto, or ddp: one process per device.")
    parser.add_argument("--trainer.logger", type=_ANY, default=None, help="false writes no metrics.csv and no events.")
    parser.add_class_arguments(TrainerConfig, "trainer", skip={"strategy", "logger"})
    for name, values in NEUTRAL.items():
        parser.add_argument(f"--trainer.{name}", type=_ANY, default=values[0], help="Lightning's; not implemented here.")
    for name in unknown:
        parser.add_argument(f"--trainer.{name}", type=_ANY, default=None, help="A newer Lightning's; not implemented here.")
    parser.add_class_arguments(ModelConfig, "model")
    parser.add_class_arguments(DataConfig, "data")
    parser.add_class_arguments(CheckpointConfig, "checkpoint")
    parser.add_class_arguments(GuardConfig, "guard")
    parser.add_argument(
        "--ckpt_path",
        type=str | None,
        default=None,
        help="Go on from this checkpoint; `last` or `best`: the newest one below trainer.default_root_dir.",
    )
    parser.add_argument("--record", type=str | None, default=None, help="Write what the training does to this folder.")
    return parser


def _left_alone(arguments: list[str]) -> set[str]:
    """Keywords of a newer Lightning that a file of settings names with null, as `project.fit` saves what nobody has set.

    With null they ask for nothing. Any other value is refused by name, since their defaults are not known here.
    """
    groups = [content.get("trainer") for content in read_yaml(arguments)] + read_yaml(arguments, flags=("--trainer",))
    given = {name: value for group in groups if isinstance(group, dict) for name, value in group.items()}
    return {name for name, value in given.items() if value is None} - {*TrainerConfig.__dataclass_fields__, *NEUTRAL}


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other  # 1 batch is not 1.0, all of them


def _refuse_others(trainer: Namespace, unknown: set[str]) -> None:
    """What Lightning would do and this trainer does not: named, never ignored."""
    neutral = {**NEUTRAL, "logger": (None, True, False), **dict.fromkeys(unknown, (None,))}
    values = vars(trainer)
    refused = [name for name, known in neutral.items() if not any(_same(values[name], value) for value in known)]
    if isinstance(trainer.strategy, dict) and not _honours(trainer.strategy):
        refused.append("strategy")
    if not any(_same(trainer.deterministic, value) for value in (None, True, False, "warn")):
        refused.append("deterministic")
    if trainer.gradient_clip_algorithm not in (None, "norm", "value"):
        refused.append("gradient_clip_algorithm")
    if refused:
        given = ", ".join(f"--trainer.{name} {values[name]!r}" for name in refused)
        raise UserError(f"The raw trainer does not implement {given}. Leave it out, or train with project.fit.")


# What Lightning's DDPStrategy takes besides, with the values that ask for nothing: its own, and those of the installed DDP.
_STRATEGY_NEUTRAL = {"timeout": "0:30:00", "start_method": "popen"}
_STRATEGY_NEUTRAL |= {name: each.default for name, each in inspect.signature(DistributedDataParallel).parameters.items()}


def _read_strategy(strategy: Any) -> Any:
    """With the values of `--trainer.strategy.static_graph true` and the like as YAML reads them."""
    if not isinstance(strategy, dict):
        return strategy
    whole: dict[str, Any] = strategy if "class_path" in strategy else {"class_path": "DDPStrategy", "init_args": strategy}
    given: dict[str, Any] = whole.get("init_args") or {}
    read = {k: yaml.safe_load(v) if k in DDP_KEYWORDS and isinstance(v, str) else v for k, v in given.items()}
    return {**whole, "init_args": read}


def _honours(strategy: dict[str, Any]) -> bool:
    given = {name: value for name, value in (strategy.get("init_args") or {}).items() if value is not None}
    asked = {name for name, value in given.items() if not (name in _STRATEGY_NEUTRAL and value == _STRATEGY_NEUTRAL[name])}
    named = str(strategy.get("class_path")).endswith("DDPStrategy")
    return named and not strategy.get("dict_kwargs") and asked <= {*DDP_KEYWORDS, "ddp_comm_hook"}


def parse(arguments: list[str]) -> Settings:
    """The settings of a run, complete: the seed drawn, devices counted, `last` found.

    Raises:
        UserError: whatever cannot work, or is not implemented.
    """
    read_yaml(arguments, flags=FILES)
    unknown = _left_alone(arguments)
    parser = _parser(unknown)
    config = parser.parse_args(arguments)
    follow_hardware(config)
    config.pop("config", None)
    keep_whole_numbers(arguments, config.trainer)
    record = config.record
    config.record = None  # of this run only: config.yaml is there to be run again
    config.seed_everything = decide_seed(config.seed_everything)
    drop_stale_variables(num_nodes=config.trainer.num_nodes)
    config.trainer.strategy = _read_strategy(config.trainer.strategy)
    check_hardware(config.trainer)
    _refuse_others(config.trainer, unknown)
    check_numbers(config.trainer)
    trainer = config.trainer.clone()
    if started_by_others():
        follow_launcher(trainer)
    check_devices(trainer)
    config.ckpt_path = find_checkpoint(config.ckpt_path, root=trainer.default_root_dir)
    trainer.accelerator = find_device(trainer.accelerator)
    gpus = find_ranks(trainer.devices, device_type=trainer.accelerator)
    trainer.devices = len(gpus)
    trainer.precision = PRECISIONS[trainer.precision]
    if trainer.max_epochs is None:  # Lightning's
        trainer.max_epochs = 1000 if trainer.max_steps == -1 else -1
    return Settings(
        parser,
        config,
        _build(TrainerConfig, trainer),
        _build(ModelConfig, config.model),
        _build(DataConfig, config.data),
        _build(CheckpointConfig, config.checkpoint),
        _build(GuardConfig, config.guard),
        config.seed_everything,
        config.ckpt_path,
        record,
        gpus,
    )


def _build(kind: type[T], values: Namespace) -> T:
    """Of the values that are fields: those of a group that was read from a file also name that file."""
    return kind(**{field.name: vars(values)[field.name] for field in fields(kind)})  # type: ignore[arg-type]  # a dataclass


def save_config(settings: Settings, folder: Path) -> None:
    """config.yaml, which both trainers read."""
    with replacing(folder / "config.yaml") as partial:
        settings.parser.save(settings.config, partial, skip_none=False, overwrite=True, multifile=False)
