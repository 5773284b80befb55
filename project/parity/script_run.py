"""A training of anyone's, as `record/attached.py` has written it: by rank and optimizer step, names without their wrappers."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from project.parity.recorded_run import CannotTell
from project.record.attached import bare
from project.runtime.plurals import count

Step = dict[str, Any]

NAMED = ("initial", "local", "reduced", "clipped", "weights", "buffers", "state")  # parts of a step with the names of tensors


@dataclass(frozen=True)
class ScriptRun:
    """A recorded command.

    Attributes:
        name: How to call it.
        ranks: The steps of each rank, in order.
        environments: Of each rank.
    """

    name: str
    ranks: dict[int, list[Step]]
    environments: dict[int, dict[str, Any]]

    def from_step(self, number: int) -> "ScriptRun":
        """The same run without its first steps.

        Raises:
            CannotTell: it has no more.
        """
        if number >= self.steps:
            raise CannotTell(f"--from-step {number}: {self.name} has {count(self.steps, 'step')}. Give a smaller number.")
        return replace(self, ranks={rank: _resumed(steps, number) for rank, steps in self.ranks.items()})

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def steps(self) -> int:
        return len(self.ranks[min(self.ranks)])


def _resumed(steps: list[Step], number: int) -> list[Step]:
    """From step `number` on, whose weights before it are those that the step before has left."""
    if number == 0:
        return steps
    first = {**steps[number], "initial": {**steps[number]["initial"], **steps[number - 1]["weights"]}}
    return [first, *steps[number + 1 :]]


def holds_scripts(folder: Path) -> bool:
    """Whether a folder has records of this kind, and not of our own trainers'."""
    return any(folder.glob("process-*.jsonl"))


def _renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    """By bare names; as they were where two would be one."""
    found = {bare(name): value for name, value in tensors.items()}
    return found if len(found) == len(tensors) else tensors


def load_script_run(folder: Path, *, name: str) -> ScriptRun:
    """A record, whole.

    Raises:
        CannotTell: there is none, it is broken, or its processes are not the ranks of one training.
    """
    ranks: dict[int, list[Step]] = {}
    environments: dict[int, dict[str, Any]] = {}
    world_sizes = set()
    for path in sorted(folder.glob("process-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            try:
                start, *events = [json.loads(line) for line in file]
                rank = start["rank"]
            except (ValueError, KeyError) as error:
                raise CannotTell(f"{path} is no record, or it breaks off within a line: {error!r}.") from error
        if rank in ranks:
            raise CannotTell(f"{folder}: two processes were rank {rank}. Record one training at a time.")
        if not events or events[-1]["event"] != "end":
            raise CannotTell(f"{path} breaks off: the process of rank {rank} did not come to its end.")
        for event in events:
            if event["event"] == "refused":
                raise CannotTell(f"{folder}: {event['reason']} cannot be compared: no rank has the whole of a tensor.")
        world_sizes.add(start["world_size"])
        ranks[rank] = [event for event in events if event["event"] == "step"]
        for step in ranks[rank]:
            step.update({part: _renamed(step[part]) for part in NAMED})
        environments[rank] = start["environment"]
    if not ranks:
        raise CannotTell(f"{folder} holds no record: there is no process-*.jsonl.")
    if world_sizes != {len(ranks)} or sorted(ranks) != list(range(len(ranks))):
        raise CannotTell(f"{folder}: there are records of ranks {sorted(ranks)}, of {sorted(world_sizes)} that were started.")
    return ScriptRun(name, dict(sorted(ranks.items())), environments)
