"""From a command line to an exit code: refuse what cannot work, start the ranks, run Lightning in each."""

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from project.core.launch import drop_stale_variables, launch, report_failure, started_by_others, started_by_us
from project.core.plan import available_cores
from project.lit.checks import check_fit
from project.lit.cli import TrainCLI, expand
from project.lit.progress import percent


class ReportFailure(Callback):
    """Says why this rank fails at once, before any teardown that may wait for other ranks."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception) and started_by_us():
            report_failure(exception)


def start_ranks(module: str, arguments: list[str], trainer: Trainer) -> int | None:
    """Start one process per rank and wait for them; None where this process is a rank itself."""
    if started_by_us() or started_by_others() or (trainer.num_devices == 1 and trainer.num_nodes == 1):
        return None
    threads = max(1, available_cores() // trainer.num_devices)
    return launch(module, arguments, ranks=trainer.num_devices, num_nodes=trainer.num_nodes, threads=threads)


def fit(arguments: list[str]) -> int:
    cli = TrainCLI(expand(arguments, default_config=True))
    if not started_by_us():
        check_fit(cli.trainer, cli.model, cli.datamodule, ckpt_path=cli.config.ckpt_path)
    decided = ["--seed_everything", str(cli.config.seed_everything)]
    decided += ["--ckpt_path", cli.config.ckpt_path] if cli.config.ckpt_path else []
    code = start_ranks("project.fit", [*arguments, *decided], cli.trainer)
    if code is not None:
        return code
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path, weights_only=True)
    return 0
