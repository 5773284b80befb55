"""From a command line to an exit code: refuse what cannot work, start the ranks, run Lightning in each."""

import signal
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from project.data.image_list import share_to_evaluate
from project.data.splits import load_splits
from project.lit.cli import TrainCLI, ValidateCLI
from project.lit.data import total_steps
from project.lit.ending import as_refusal
from project.lit.preflight import check_fit
from project.lit.silenced_advice import quiet
from project.model.checkpoint_file import read_record
from project.model.resnet import check_num_classes
from project.model.training_record import TrainingRecord
from project.model.weights import find_arch, read_weights
from project.preflight.recipe import recipe_lines
from project.preflight.refusals import check_classes, check_weights
from project.ranks.agreement import Interrupted
from project.ranks.launch import launch
from project.record.recorder import check_record_folder
from project.report.lines import accuracy, data_lines, run_lines
from project.runtime.device import tune
from project.runtime.errors import UserError
from project.runtime.launched import is_first_rank, started_by_others, started_by_us
from project.runtime.plurals import count
from project.settings.arguments import expand, flag_value, given_value
from project.settings.plan import available_cores, count_epochs


def _start_ranks(cli: TrainCLI, arguments: list[str]) -> int | None:
    """Start one process per rank and wait for them; None where this process is a rank itself."""
    trainer = cli.trainer
    if started_by_us() or started_by_others() or trainer.num_devices * trainer.num_nodes == 1:
        return None
    threads = max(1, available_cores() // trainer.num_devices)
    module = f"project.{cli.command}"
    return launch(module, arguments, ranks=trainer.num_devices, num_nodes=trainer.num_nodes, threads=threads)


def _tune(cli: TrainCLI) -> list[str]:
    given = cli.config.trainer
    return tune(cli.trainer.strategy.root_device.type, deterministic=bool(given.deterministic), benchmark=given.benchmark)


def _say(lines: list[str]) -> None:
    if is_first_rank():
        print("\n".join(lines), flush=True)


def fit(arguments: list[str]) -> int:
    """Train with Lightning. Returns the exit code of this process or, of the launching one, of all ranks.

    Args:
        arguments: Flags as typed, without the name of the command.

    Raises:
        UserError: settings, data or a checkpoint with which no training can start.
    """
    quiet()
    cli = TrainCLI(expand(arguments, train=True))
    if not started_by_us():
        check_record_folder(cli.record)
        splits = load_splits(cli.datamodule.config)
        config = cli.config
        plan, resumed = check_fit(
            cli.trainer, cli.model, cli.datamodule, splits, ckpt_path=config.ckpt_path, seed=config.seed_everything
        )
        trainer = cli.trainer
        lines = run_lines(
            plan,
            cli.model.config,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            precision=trainer.precision,
            device=trainer.strategy.root_device.type,
            tuned=_tune(cli),
        )
        epochs = count_epochs(total_steps(trainer, plan), steps_per_epoch=plan.steps_per_epoch)
        recipe = recipe_lines(cli.model.config, cli.datamodule.config, num_classes=len(splits.classes), epochs=epochs)
        _say(data_lines(cli.datamodule.config, splits) + lines + resumed + recipe)
    decided = ["--seed_everything", str(cli.config.seed_everything)]
    decided += ["--ckpt_path", cli.config.ckpt_path] if cli.config.ckpt_path else []
    code = _start_ranks(cli, [*arguments, *decided])
    if code is not None:
        return code
    _tune(cli)
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path, weights_only=True)
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except MisconfigurationException as error:
        raise as_refusal(error) from error
    except SystemExit:
        if cli.trainer.interrupted:  # by Ctrl-C before the first step, for which Lightning's code is 1
            return 128 + signal.SIGINT
        raise
    return 0


def validate(arguments: list[str]) -> int:
    """Evaluate a checkpoint or weights, each image once. Returns the exit code.

    Raises:
        UserError: as `fit`.
    """
    quiet()
    expanded = expand(arguments, train=False)
    if {"-h", "--help"} & set(expanded):
        ValidateCLI(expanded)  # prints and exits
    record, defaults = _describe(flag_value(expanded, "--ckpt_path"), flag_value(expanded, "--weights"))
    root = given_value(expanded, "data", "root")
    if root is not None:
        defaults["data.val_fraction"] = share_to_evaluate(record.data, record.images, root=str(root)) if record else 1.0
    cli = ValidateCLI(expanded, defaults)
    flag = "--ckpt_path" if cli.config.ckpt_path else "--weights"
    if not started_by_us():
        splits = load_splits(cli.datamodule.config, evaluate=True)
        if record:
            check_classes(record, splits, flag=f"{flag} {cli.model.config.weights}")
        num_classes = check_num_classes(cli.model.config, classes=splits.classes)
        check_weights(cli.model.config, num_classes=num_classes, new_head=False, flag=flag)
        _say(data_lines(cli.datamodule.config, splits))
    code = _start_ranks(cli, arguments)
    if code is not None:
        return code
    [metrics] = cli.trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)
    if cli.trainer.is_global_zero:
        print(f"{accuracy(metrics)}, loss {metrics['val/loss']:.6f} on {count(int(metrics['val/images']), 'image')}", flush=True)
    return 0


def _describe(ckpt_path: str | None, weights: str | None) -> tuple[TrainingRecord | None, dict[str, Any]]:
    """What a file says of its run (None for plain weights), and the settings that follow from it."""
    if (ckpt_path is None) == (weights is None):
        raise UserError("Name what to evaluate: either --ckpt_path CHECKPOINT of a run, or --weights FILE.")
    if ckpt_path is not None:
        record: TrainingRecord | None = read_record(ckpt_path)
    else:
        assert weights is not None
        tensors, record = read_weights(weights, flag="--weights")
        if record is None:
            arch = find_arch(tensors)
            if arch is None:
                raise UserError(f"--weights {weights} holds no ResNet of torchvision.")
            return None, {"model.weights": weights, "model.arch": arch}
    assert record is not None
    kept = {f"data.{name}": record.data[name] for name in ("root", "val_resize", "val_size", "val_fraction")}
    return record, {"model.weights": ckpt_path or weights, "model.arch": record.model["arch"], **kept}
