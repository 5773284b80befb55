"""The raw trainer with a tracer attached from outside.

python -m project.measure.timeline.traced_raw FOLDER STEPS [flags of project.fit_raw]
"""

import sys
from pathlib import Path
from typing import Any

from project.measure.timeline.rank_tracer import Plan, Tracer
from project.raw import run
from project.raw.trainer import Trainer
from project.runtime.process import run_command


class TracedTrainer(Trainer):
    """Trains as Trainer does, and traces so many steps."""

    tracer: Tracer

    def setup(self) -> None:
        super().setup()
        self.tracer.attach(
            self.module.model,
            wrapper=self.model,
            normalize=self.module.normalize,
            criterion=self.module.criterion,
            optimizer=self.optimizer,
            arch=self.module.config.arch,
            batch=self.plan.per_rank_batch,
        )

    def fit(self, ckpt_path: str | None) -> None:
        super().fit(ckpt_path)
        self.tracer.close()


def main() -> int:
    """A raw training that is traced; the ranks that it launches are, too."""
    folder, steps, *arguments = sys.argv[1:]
    TracedTrainer.tracer = Tracer(Path(folder), Plan(int(steps)), trainer="raw")
    launch = run.launch

    def launch_traced(_: str, arguments: list[str], **kwargs: Any) -> int:
        return launch("project.measure.timeline.traced_raw", [folder, steps, *arguments], **kwargs)

    vars(run).update(Trainer=TracedTrainer, launch=launch_traced)
    return run.fit(arguments)


if __name__ == "__main__":
    run_command(main)
