"""The Lightning trainer with a tracer attached from outside: a callback, `project.measure.timeline.traced_lit.Tracing`."""

from lightning.pytorch import Callback, LightningModule, Trainer

from project.lit.module import Classifier
from project.measure.timeline.rank_tracer import Plan, Tracer


class Tracing(Callback):
    """Traces so many steps of a training to a folder."""

    def __init__(self, folder: str, steps: int) -> None:
        self.tracer = Tracer(folder, Plan(steps), trainer="lightning")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        assert pl_module.model is not None
        assert trainer.model is not None
        self.tracer.attach(
            pl_module.model,
            wrapper=trainer.model,
            normalize=pl_module.normalize,
            criterion=pl_module.criterion,
            optimizer=trainer.optimizers[0],
            arch=pl_module.config.arch,
            batch=pl_module.data.plan.per_rank_batch,
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tracer.close()
