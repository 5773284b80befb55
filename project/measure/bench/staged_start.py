"""`python -m project.measure.bench.staged_start COMMAND FLAGS`: a trainer up to its first step, with the time of each stage."""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast

from project.runtime.launched import started_by_us
from project.runtime.process import run_command

STAMPS = "LOCKSTEP_STAMPS"  # a file: one line of JSON for each stage that a process has reached


def stamp(what: str) -> None:
    rank = int(os.environ["RANK"]) if started_by_us() else None
    with open(os.environ[STAMPS], "a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "rank": rank, "time": time.time()}) + "\n")


def main() -> int:
    command, *arguments = sys.argv[1:]
    run = cast(Any, import_module("project.lit.run" if command == "project.fit" else "project.raw.run"))
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from project.data.loading import ResumableLoader

    stamp("rank imported" if started_by_us() else "imported")
    launch, original = run.launch, ResumableLoader.__iter__

    def launched(_: str, arguments: list[str], **options: Any) -> int:
        stamp("launched")
        code: int = launch("project.measure.bench.staged_start", [command, *arguments], **options)
        return code

    def stamped(self: ResumableLoader[Any]) -> Iterator[Any]:
        batches = original(self)
        first = next(batches)
        stamp("first batch")
        yield from itertools.chain([first], batches)

    def end(*_: Any) -> None:
        stamp("first step")
        os._exit(0)  # nothing that comes later is measured

    run.launch = launched
    ResumableLoader.__iter__ = stamped  # type: ignore[method-assign]
    register_optimizer_step_post_hook(end)
    code: int = run.fit(arguments)
    return code


if __name__ == "__main__":
    run_command(main)
