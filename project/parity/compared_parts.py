"""What two runs must have in common: each part of a record, the phase that it belongs to, and how two of them are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from project.parity.differences import (
    indices_difference,
    keys_difference,
    list_difference,
    nested_difference,
    tensors_difference,
    value_difference,
)
from project.parity.recorded_run import Event

Part = Callable[[Event], Any]

# Keys of a checkpoint file that one trainer may write and the other may not, and why. What the record in it leaves out is in
# record.format.OF_THE_RUN.
_DERIVED = "Lightning's own copy of what the shared record holds, which is compared"
OWN_KEYS = {
    "epoch": _DERIVED,
    "global_step": _DERIVED,
    "optimizer_states": _DERIVED,
    "lr_schedulers": _DERIVED,
    "MixedPrecision": _DERIVED,
    "ImageFolders": "the place in the epoch, which the shared record holds",
    "callbacks": "Lightning's callbacks: history and best checkpoint are in the shared record",
    "loops": "counters of Lightning's loops, made anew from the shared record when one of raw's files is loaded",
    "pytorch-lightning_version": "a version",
    "hparams_name": "Lightning's name for the settings",
    "hyper_parameters": "Lightning's copy of the settings",
    "datamodule_hparams_name": "Lightning's name for the settings",
    "datamodule_hyper_parameters": "Lightning's copy of the settings",
}


@dataclass(frozen=True)
class Pair:
    """A check of two runs.

    Attributes:
        may_be_empty: Plain SGD has no state, and a network may have no buffers.
    """

    name: str
    phase: str
    kind: str
    part: Part
    differ: Callable[[Any, Any], str | None]
    may_be_empty: bool = False


def _of(key: str) -> Part:
    return lambda event: event[key]


def _batches(key: str) -> Part:
    return lambda event: [batch[key] for batch in event["batches"]]


def _rates(event: Event) -> list[float]:
    """Each rate once: more groups of parameters are another recipe, not another schedule, and show in the update."""
    return list(dict.fromkeys(event["lr"]))


def _file_keys(a: list[str], b: list[str]) -> str | None:
    """All but those that are one trainer's own, by name."""
    return keys_difference(*({key: 0 for key in keys if key not in OWN_KEYS} for keys in (a, b)))


PAIRS = (
    Pair("steps and epochs", "data", "step", lambda event: {key: event[key] for key in ("step", "epoch")}, nested_difference),
    Pair("sample indices", "data", "step", _batches("index"), indices_difference),
    Pair("images", "data", "step", _batches("images"), list_difference),
    Pair("targets", "data", "step", _batches("target"), list_difference),
    Pair("logits", "forward", "step", _batches("logits"), list_difference),
    Pair("loss", "forward", "step", _batches("loss"), list_difference),
    Pair("local gradients", "local gradient", "step", _of("local"), tensors_difference),
    Pair("reduced gradients", "reduced gradient", "step", _of("reduced"), tensors_difference),
    Pair("learning rate", "schedule", "step", _rates, value_difference),
    Pair("weights", "update", "step", _of("weights"), tensors_difference),
    Pair("optimizer state", "update", "step", _of("optimizer"), tensors_difference, may_be_empty=True),
    Pair("buffers", "buffers", "step", _of("buffers"), tensors_difference, may_be_empty=True),
    Pair("validation images", "metric", "validation", _batches("images"), list_difference),
    Pair("validation logits", "metric", "validation", _batches("logits"), list_difference),
    Pair("validation metrics", "metric", "validation", _of("metrics"), nested_difference),
    Pair("checkpoint names", "checkpoint", "checkpoint", _of("name"), value_difference),
    Pair("checkpoint keys", "checkpoint", "checkpoint", _of("keys"), _file_keys),
    Pair("checkpoint tensors", "checkpoint", "checkpoint", _of("state_dict"), tensors_difference),
    Pair("checkpoint record", "checkpoint", "checkpoint", _of("record"), nested_difference),
)
