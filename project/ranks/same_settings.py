"""Settings that each rank decides for itself, from its machine's hardware or command line, and that must be the same on all."""

from dataclasses import asdict
from typing import Any

from project.runtime.errors import UserError
from project.settings.config import DataConfig, ModelConfig

_TRAINER = ("precision", "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "limit_train_batches")
_OF_A_MACHINE = {"root", "weights", "num_workers"}  # the same files may lie elsewhere


def shared_settings(trainer: Any, model: ModelConfig, data: DataConfig, *, seed: int) -> dict[str, Any]:
    """By flag, what ranks that train together have in common.

    Args:
        trainer: With Lightning's names as attributes.
        model: Its recipe.
        data: Its recipe.
        seed: Seed of weights, order and augmentation.
    """
    found = {f"--trainer.{name}": getattr(trainer, name) for name in _TRAINER}
    found |= {f"--model.{name}": value for name, value in asdict(model).items()}
    found |= {f"--data.{name}": value for name, value in asdict(data).items()}
    found["--seed_everything"] = seed
    return {flag: value for flag, value in found.items() if flag.rpartition(".")[2] not in _OF_A_MACHINE}


def check_alike(found: list[dict[str, Any]]) -> None:
    """All ranks train with the same settings.

    Args:
        found: Settings of each rank, in the order of ranks.

    Raises:
        UserError: they do not; it names the flags, the values, and which ranks have them.
    """
    lines = []
    for flag in found[0]:
        by_value: dict[str, list[str]] = {}
        for rank, settings in enumerate(found):
            by_value.setdefault(str(settings[flag]), []).append(str(rank))
        if len(by_value) > 1:
            lines.append(f"{flag}: " + "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items()))
    if lines:
        raise UserError(
            "The ranks were started with different settings.\n"
            + "\n".join(lines)
            + "\nGive all ranks the same flags. Without them precision and channels_last follow each machine's hardware."
        )


def _ranks(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
