"""What the project uses of Lightning that has no public name: each with its reason and with what happens where it is missing.

A test finds every other private name.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

# The training loop's own count of steps, under which Lightning saves it in a checkpoint. Under another name a checkpoint of the
# raw trainer ends Lightning's resume with KeyError, and `tests/test_resume.py` fails.
BATCHES_THAT_STEPPED = "_batches_that_stepped"


def validation_is_due(trainer: Trainer) -> bool:
    """Whether Lightning validates after the newest batch, by its own rule, which it applies after `on_train_batch_end`.

    A checkpoint that is written there has to know it: Lightning resumes without that validation, or in the middle of it
    (https://github.com/Lightning-AI/pytorch-lightning/issues/19549, /20277 and /20288). Without these names AttributeError ends
    the save.
    """
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def val_check_seconds(trainer: Trainer) -> float | None:
    """`val_check_interval` where it is a time, which Lightning turns into seconds and shows nobody; None for any other, or
    without this name."""
    return getattr(trainer, "_val_check_time_interval", None)


def react_to_sigterm(trainer: Trainer, react: Callable[[int, Any], None]) -> None:
    """Replace Lightning's reaction to SIGTERM, which broadcasts inside the signal handler.

    It calls a handler that was there before it, and its own as well (https://github.com/Lightning-AI/pytorch-lightning/pull/16534).
    Without these names AttributeError ends the start of a training.
    """
    trainer._signal_connector._sigterm_notifier_fn = react  # type: ignore[method-assign,assignment]
