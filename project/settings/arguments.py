"""What both command lines do with their arguments before and after they are parsed."""

import os
import random
import re
import textwrap
from pathlib import Path
from typing import Any, NoReturn

import yaml

from project.runtime.device import ALL_GPUS, fast_layout, fast_precision, find_device, find_ranks, listed_gpus
from project.runtime.errors import UserError
from project.runtime.launched import started_by_others, world_of_launcher
from project.runtime.run_folder import RUNS, newest_checkpoint
from project.settings.config import CONFIGS, DIGITS

GROUPS = ("--trainer", "--model", "--data", "--checkpoint", "--guard")
FILES = ("-c", "--config", *GROUPS)
PRECISIONS = "32-true, bf16-mixed, or on GPUs 16-mixed"
PRINT = "--print_config"
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

    Short flags become `--trainer.*`; files come first, those for a group of settings (`--trainer FILE`) behind those for all, so
    that a flag wins wherever it stands. To train, the digits' or ImageNet's recipe is used where no file is given.
    """
    files, groups, flags, printing = [], [], [], []
    rest = iter(arguments)

    def whole(argument: str) -> list[str]:
        return [argument] if "=" in argument else [argument, *(value for value in [next(rest, None)] if value is not None)]

    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("-c", "--config"):
            files += whole(argument)
        elif name in GROUPS:
            groups += whole(argument)
        elif name == PRINT:
            printing.append(argument)
        elif name.removeprefix("--") in SHORT and name.startswith("--"):
            flags.append(f"--trainer.{name[2:]}{equals}{value}")
        else:
            flags.append(argument)
    given = [*files, *groups, *flags]
    if train and not files:
        root = given_value(given, "data", "root")
        recipe = "digits" if root in (None, DIGITS) else "imagenet_resnet50"
        given = ["--config", str(CONFIGS / f"{recipe}.yaml"), *(["--data.root", DIGITS] if root is None else []), *given]
    return [*given, *printing]


def given_value(arguments: list[str], group: str, name: str) -> Any:
    """What a command line says of a setting: by a flag, else by a file for its group or for all. None where nothing does."""
    found = flag_value(arguments, f"--{group}.{name}")
    if found is not None:
        return found
    files = [content.get(group) for content in read_yaml(arguments)] + read_yaml(arguments, flags=(f"--{group}",))
    named = [content[name] for content in files if isinstance(content, dict) and content.get(name) is not None]
    return named[-1] if named else None


# Of these 1 is one batch, and 1.0 all of them.
WHOLE_OR_SHARE: tuple[str, ...] = (
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
    "val_check_interval",
)


def keep_whole_numbers(arguments: list[str], trainer: Any) -> None:
    """Whole numbers stay whole, as they were given.

    A parser tries the types of a union in their order. Python's typing keeps one object for Union[int, float] and
    Union[float, int] in an Optional: that of the library which was imported first.

    Args:
        arguments: As `expand` leaves them.
        trainer: The `trainer` part of what was parsed.
    """
    for name in WHOLE_OR_SHARE:
        if type(trainer.get(name)) is not float:  # then no file need be read again
            continue
        given = given_value(arguments, "trainer", name)
        number = yaml.safe_load(given) if isinstance(given, str) else given
        if type(number) is int:
            trainer[name] = number


def follow_hardware(config: Any) -> None:
    """Fill in precision and layout, as this machine's device is fast in, where neither a flag nor a file decides them.

    Args:
        config: What was parsed; `trainer.precision` and `model.channels_last` are filled in where they are None.

    Raises:
        UserError: this machine does not have the devices that were asked for.
    """
    device = find_device(str(config.trainer.accelerator))
    gpus = find_ranks(config.trainer.devices, device_type=device) if device == "cuda" else None
    if config.trainer.precision is None:
        config.trainer.precision = fast_precision(device, gpus)
    if config.model.channels_last is None:
        config.model.channels_last = fast_layout(device, gpus)


def as_it_will_run(config: Any) -> Any:
    """A copy of a parsed command line with what follows from the hardware, for `--print_config`.

    The parser has others of its kind for the classes among the settings: what those show is left alone.
    """
    if not {"trainer", "model"} <= set(vars(config)):
        return config
    shown = config.clone()
    follow_hardware(shown)
    return shown


def read_yaml(arguments: list[str], *, flags: tuple[str, ...] = FILES[:2]) -> list[dict[str, Any]]:
    """What the files of these flags hold; names the one that is no YAML, which the parser's message does not."""
    contents = []
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in flags:
            given = value if equals else "".join(arguments[position + 1 : position + 2])
            try:
                if given.startswith("{"):  # the settings themselves, in place of a file
                    contents.append(yaml.safe_load(given))
                elif (path := Path(given).expanduser()).is_file():
                    contents.append(yaml.safe_load(path.read_text(encoding="utf-8")))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
                raise UserError(f"{name} {given} is no valid YAML: {reason}") from error
    return [content for content in contents if isinstance(content, dict)]


class OneMessage:
    """A parser of jsonargparse's that refuses as everything else here does: one short message, without the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(shorten(message)) from ex


def shorten(message: str) -> str:
    """One short message instead of forty lines of usage and types: the flag, its value, and what may be given."""
    refused = re.search(r"(Problem with given class_path [^\n]*)\n([^\n]+)", message)  # in the words of the class, behind it
    wrong = re.match(r'Parser key "([\w.]+)":(.*)', message.strip(), re.DOTALL)
    if wrong is None or " value:" not in wrong.group(2):
        first, *rest = message.strip().splitlines()
        if refused is not None:
            return f"{refused.group(1)} {refused.group(2).strip(' -')}"
        return "\n".join([first, *(rest if len(rest) <= 2 else ())])
    key, text = wrong.groups()
    expected, found, value = text.rpartition("Given value:")  # of a union, behind what is wrong by each of its types
    if not found:
        expected, _, value = text.partition("Got value:")
    value = value.strip()
    built = re.search(r"class_path='([\w.]+)'", value)
    value = built.group(1) if built else textwrap.shorten(value, 100, placeholder=" ...")
    lacks = re.search(r"the following arguments are required: (.+)", expected)
    if lacks is not None:
        return f"--{key} {value} needs {', '.join(f'--{key}.{name}' for name in lacks.group(1).split(', '))}."
    if refused is not None:
        return f"--{key} {value}: {refused.group(2).strip(' -')}"
    return f"--{key} {value}: give {_allowed(key, expected)}."


_KINDS = {"int": ["a whole number"], "float": ["a number"], "bool": ["true", "false"], "str": ["a text"]}
_CHOICES = re.compile(r"Expected a typing\.Literal\[([^]]*)\]")


def _allowed(key: str, expected: str) -> str:
    """In words, what the parser would take for a setting."""
    if key == "trainer.precision":
        return PRECISIONS
    kinds = dict.fromkeys(re.findall(r"<class '([\w.]+)'>", expected.partition("Given value type")[0]))
    if "int" in kinds and "float" in kinds:  # a whole number is one
        del kinds["int"]
    words = [word for kind in kinds for word in _KINDS.get(kind, [])]
    words += [word.strip("' ") for choices in _CHOICES.findall(expected) for word in choices.split(",")]
    classes = [kind.rpartition(".")[2] for kind in kinds if "." in kind and not kind.startswith("collections")]
    words += [f"the class path of a {name}" for name in classes]
    words += ["null"] * ("NoneType" in kinds)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "another value"


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
    if str(trainer.devices) in ALL_GPUS:
        trainer.devices = local
    if trainer.num_nodes == 1:
        trainer.num_nodes = world_size // local
    if trainer.strategy == "auto" and world_size > 1:
        trainer.strategy = "ddp"
    listed = listed_gpus(trainer.devices)
    count = str(trainer.devices) if listed is None else str(len(listed))
    if count.isdigit() and int(count) * trainer.num_nodes != world_size:
        raise UserError(
            f"--devices {trainer.devices} x --num_nodes {trainer.num_nodes} is not the {world_size} processes that "
            f"the launcher has started ({name}): give both the same number, or leave --devices out."
        )
