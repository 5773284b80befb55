"""The benchmark's side: contestants live at once and train in turns, so that each change of the machine's load meets all."""

import contextlib
import json
import secrets
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from project.measure.bench.paced_training import ADDRESS
from project.runtime.errors import UserError
from project.runtime.launched import ends_with_this, python_module
from project.runtime.process_tree import kill_tree
from project.subprocesses.clean_process import clean_environment

START_S = 600.0  # for a contestant, to its first step; torch.compile takes most of it
TURN_S = 900.0


@dataclass(frozen=True)
class Contestant:
    """Something that trains.

    Attributes:
        name: In tables.
        what: For `contestant.py`: `impl` (lightning, raw or bare), `tiny`, and for `bare` what `run_bare` takes.
        ranks: Its processes.
        arguments: A trainer's flags.
    """

    name: str
    what: dict[str, Any]
    ranks: int = 1
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


class Turns:
    """Starts contestants, lets one at a time train, and ends them.

    Raises:
        UserError: one did not start, or ended; the message ends with its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(16)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.streams: dict[str, list[TextIO]] = {}
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(0.5)

    def __enter__(self) -> "Turns":
        return self

    def __exit__(self, *_: object) -> None:
        for streams in self.streams.values():
            for stream in streams:
                stream.close()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            kill_tree(process)
        self.server.close()

    def start(self, contestant: Contestant) -> None:
        """Start it, and wait until all its ranks stand before their first step."""
        name, port = contestant.name, self.server.getsockname()[1]
        what = {**contestant.what, "ranks": contestant.ranks, "name": name, "port": port, "token": self.token}
        with self._output(name).open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [*python_module("project.measure.bench.contestant"), *contestant.arguments],
                **ends_with_this(clean_environment(**contestant.environment, **{ADDRESS: json.dumps(what)})),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        streams: dict[int, TextIO] = {}
        deadline = time.monotonic() + START_S
        while len(streams) < contestant.ranks:
            self._check(name)
            if time.monotonic() > deadline:
                raise UserError(f"{name} made no first step within {START_S:.0f} s. Its output so far:\n{self._tail(name)}")
            try:
                connection, _ = self.server.accept()
            except TimeoutError:
                continue
            connection.settimeout(TURN_S)
            stream = connection.makefile("rw")
            hello = json.loads(stream.readline())
            if hello["token"] == self.token:
                streams[hello["rank"]] = stream
        self.streams[name] = [streams[rank] for rank in sorted(streams)]

    def take(self, name: str, *, steps: int, mode: str = "time") -> list[dict[str, Any]]:
        """What each rank of a contestant says of so many steps."""
        for stream in self.streams[name]:
            stream.write(json.dumps({"steps": steps, "mode": mode}) + "\n")
            stream.flush()
        answers = [stream.readline() for stream in self.streams[name]]
        if not all(answers):
            self.processes[name].wait(30)
            self._check(name)
        return [json.loads(answer) for answer in answers]

    def _check(self, name: str) -> None:
        code = self.processes[name].poll()
        if code is not None:
            raise UserError(f"{name} ended with exit code {code}. Its own message:\n{self._tail(name)}")

    def _output(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-').replace(',', '')}.txt"

    def _tail(self, name: str) -> str:
        return "\n".join(self._output(name).read_text(errors="replace", encoding="utf-8").rstrip().splitlines()[-15:])
