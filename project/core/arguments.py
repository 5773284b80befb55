"""What both command lines do with their arguments before and after they are parsed."""

import os
import random
from pathlib import Path
from typing import Any

import yaml

from project.core.config import CONFIGS, DIGITS
from project.core.device import fast_layout, fast_precision, find_device
from project.core.errors import UserError
from project.core.process import started_by_others, world_of_launcher
from project.core.run_folder import RUNS, newest_checkpoint

SHORT = {"devices", "strategy", "accelerator", "precision", "max_epochs", "num_nodes"}


def flag_value(arguments: list[str], flag: str) -> str | None:
    """The last value given for a flag, as `--flag value` or `--flag=value`."""
    found = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else next(iter(arguments[position + 1 : position + 2]), None)
    return found


def expand(arguments: list[str], *, train: bool) -> list[str]:
    """The command line as the parsers take it.

    Short flags become `--trainer.*`; files come first, so that a flag wins wherever it stands. To train, the digits' or
    ImageNet's recipe is used where no file is given, and precision and layout follow the hardware where nothing decides them.
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
    if train and not files:
        recipe = "digits" if flag_value(flags, "--data.root") in (None, DIGITS) else "imagenet_resnet50"
        files = ["--config", str(CONFIGS / f"{recipe}.yaml")]
        if recipe == "digits" and flag_value(flags, "--data.root") is None:
            flags = ["--data.root", DIGITS, *flags]
    return [*files, *(_follow_hardware(read_yaml(files), flags) if train else flags), *printing]


def _follow_hardware(given: list[dict[str, Any]], flags: list[str]) -> list[str]:
    """The flags, with those of precision and layout that neither they nor the files name, for this machine's device."""

    def find(group: str, name: str) -> Any:
        found = flag_value(flags, f"--{group}.{name}")
        for content in reversed(given if found is None else []):
            values = content.get(group)
            if isinstance(values, dict) and values.get(name) is not None:
                return values[name]
        return found

    device = find_device(str(find("trainer", "accelerator") or "auto"))
    decided = {"trainer.precision": fast_precision(device), "model.channels_last": str(fast_layout(device)).lower()}
    for name, value in decided.items():
        if find(*name.split(".")) is None:
            flags = [*flags, f"--{name}", value]
    return flags


def read_yaml(arguments: list[str]) -> list[dict[str, Any]]:
    """What the --config files hold; names the one that is no YAML, which the parser's message does not."""
    contents = []
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("-c", "--config"):
            path = Path(value if equals else "".join(arguments[position + 1 : position + 2])).expanduser()
            if path.is_file():
                try:
                    contents.append(yaml.safe_load(path.read_text()))
                except (yaml.YAMLError, UnicodeDecodeError) as error:
                    reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
                    raise UserError(f"--config {path} is no valid YAML: {reason}") from error
    return [content for content in contents if isinstance(content, dict)]


def shorten(message: str) -> str:
    """One short message instead of forty lines of usage; of a union's many complaints, that of a class, or else the value."""
    first, *rest = message.strip().splitlines()
    made = next((k for k, line in enumerate(rest) if "Problem with given class_path" in line), None)
    if made is not None and len(rest) > made + 1:
        return f"{rest[made].strip(' -')} {rest[made + 1].strip()}"
    if len(rest) > 2:
        rest = [line for line in rest if line.strip().startswith("Given value:")]
    return "\n".join([first, *rest])


def decide_seed(seed: int | bool) -> int:
    """The seed of all ranks: the given one, or one that is drawn here, before any rank is started."""
    if isinstance(seed, bool):
        if started_by_others():
            raise UserError(f"--seed_everything {str(seed).lower()}: all ranks need one seed; give a number.")
        return random.SystemRandom().randrange(2**32)
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed_everything {seed}: give a number from 0 to {2**32 - 1}.")
    return seed


def find_checkpoint(ckpt_path: str | None, *, root: str | None) -> str | None:
    """`--ckpt_path`, with `last` and `best` replaced by the newest file of that name below a root."""
    if ckpt_path not in ("last", "best"):
        return ckpt_path
    folder = Path(root or ".")
    newest = newest_checkpoint(folder, ckpt_path)
    if newest is None:
        raise UserError(
            f"--ckpt_path {ckpt_path}: there is no checkpoint below {folder / RUNS}. Leave the flag out to start afresh,\n"
            "or name the folder of the earlier runs with --trainer.default_root_dir."
        )
    return str(newest)


def follow_launcher(trainer: Any) -> None:
    """Under torchrun or srun the number of processes is given: take it, or refuse another one.

    Args:
        trainer: The `trainer` part of the parsed configuration; its devices, num_nodes and strategy are filled in.
    """
    world_size, local = world_of_launcher()
    name = "WORLD_SIZE of torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_NTASKS, in a step of srun"
    if trainer.devices == "auto":
        trainer.devices = local
    if trainer.num_nodes == 1:
        trainer.num_nodes = world_size // local
    if trainer.strategy == "auto" and world_size > 1:
        trainer.strategy = "ddp"
    if str(trainer.devices).isdigit() and int(trainer.devices) * trainer.num_nodes != world_size:
        raise UserError(
            f"--devices {trainer.devices} x --num_nodes {trainer.num_nodes} is not the {world_size} processes that "
            f"the launcher has started ({name}): give both the same number, or leave --devices out."
        )
