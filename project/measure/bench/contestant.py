"""`python -m project.measure.bench.contestant FLAGS`: a trainer as users start it, or a hand-written loop, paced by a benchmark.

The trainers are the real ones. From outside they get a loader that repeats its first batch, a training set that does not end,
and marks around forward and optimizer.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from project.data.loading import ResumableLoader
from project.data.splits import Splits, load_splits
from project.measure.bench.hand_written import Tiny, run_bare
from project.measure.bench.paced_training import ADDRESS, Pace, remember_wrapped, watch_steps
from project.ranks.launch import launch
from project.runtime.process import run_command

REPEATS = 100  # of the training set, so that no epoch ends


def endless_splits(*args: Any, **kwargs: Any) -> Splits:
    splits = load_splits(*args, **kwargs)
    many = np.tile(np.arange(len(splits.train)), REPEATS)
    return Splits(splits.train.select(many), splits.val, splits.source)


def repeat_first_batch(pace_of: Any) -> None:
    """Each rank's loader makes its first batch from files, and gives it again in each step."""
    original = ResumableLoader.__iter__

    def paced(self: ResumableLoader[Any]) -> Iterator[Any]:
        pace = pace_of()
        batch = next(original(self))
        while True:
            pace.step()
            pace.mark("batch")
            yield batch

    ResumableLoader.__iter__ = paced  # type: ignore[method-assign]


def train(what: dict[str, Any], arguments: list[str]) -> int:
    """A trainer's own command, with what a benchmark changes."""
    trainer = "lit" if what["impl"] == "lightning" else "raw"
    run, module, data = (cast(Any, import_module(f"project.{trainer}.{name}")) for name in ("run", "module", "data"))
    replaced: dict[str, Any] = {"launch": partial(_launch_this, run.launch), "load_splits": endless_splits}
    replaced |= {"build_model": lambda config, *, num_classes, seed: Tiny(num_classes)} if what["tiny"] else {}
    for place, (name, value) in itertools.product((run, module, data), replaced.items()):
        if hasattr(place, name):
            setattr(place, name, value)
    remember_wrapped()
    repeat_first_batch(partial(_watched, module.Classifier))
    code: int = run.fit(arguments)
    return code


_paces: list[Pace] = []


def _watched(network: type[nn.Module]) -> Pace:
    """This process's pace, from its first batch on."""
    if not _paces:
        on_cuda = torch.cuda.is_available()  # the trainer has chosen one of them
        _paces.append(Pace(torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")))
        watch_steps(_paces[0], network)
    return _paces[0]


def _launch_this(launch_module: Any, _: str, arguments: list[str], **options: Any) -> int:
    return launch_module("project.measure.bench.contestant", arguments, **options)


def main() -> int:
    what = json.loads(os.environ[ADDRESS])
    if what["impl"] in ("lightning", "raw"):
        return train(what, sys.argv[1:])
    return run_bare(what, partial(launch, "project.measure.bench.contestant", []))


if __name__ == "__main__":
    run_command(main)
