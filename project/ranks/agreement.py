"""After which step all ranks stop or save, at the wish of one: decided without a collective, and at no cost per step.

A signal reaches one process or some, and always between other lines than on its neighbours. So nothing is done where it
arrives. Whoever wants something puts a request into the key-value store that `init_process_group` has made; a thread on each
rank looks for one, holds its rank at its next boundary and tells the others where that rank is; and each works out the same
answer from these places: the first boundary that none of them has passed. All go on to it, and do there what was asked.
"""

import contextlib
import json
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from torch.distributed import Store

from project.runtime.process import SIGNALS, TWICE_S

_POLL_S = 0.1
_PATIENCE_S = 60.0  # for the places of the other ranks; without them the training goes on, and fails if they are gone
_DONE = 2**62  # the place of a rank that has finished
SAVE, STOP = "save", "stop"


class Interrupted(BaseException):
    """The training has stopped after a checkpoint, because of a signal. No Exception: nothing has failed.

    Attributes:
        number: Signal number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Agreement:
    """Lets all ranks save or stop at the same boundary of their training.

    Boundaries are the same on every rank, in the same order: the end of an optimizer step, of a validation's first batch (DDP
    still sends buffers in its forward), and of its last one. Between these two a rank may stop at any batch: nothing is sent.

    Args:
        store: Through which all ranks can talk; its own connection.
        rank: This one.
        world_size: All of them.
        every_steps: Save after so many optimizer steps; 0 for never.
        every_s: Save when so many seconds have gone by since the last time; 0 for never.
        poll_s: Seconds between two looks at the store.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, every_steps: int, every_s: float, poll_s: float = _POLL_S
    ) -> None:
        self.rank, self.world_size, self.every_steps, self.every_s = rank, world_size, every_steps, every_s
        self._poll_s = poll_s
        self._store = store
        self._lock = threading.Lock()
        self._place, self._in_validation = 0, False
        self._round, self._asked, self._kind, self._at = 0, False, "", 0
        self._decided, self._closed = threading.Event(), threading.Event()
        self._signal, self._signalled_at = 0, 0.0
        self._saved_at = time.monotonic()
        self._before: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._watch, name="agreement", daemon=True)

    def begin(self) -> None:
        """Listen to signals, and to the other ranks. From the main thread."""
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self.note)
        self.listen()

    def listen(self) -> None:
        """Listen to the other ranks only, where somebody else hears the signals and calls `note`."""
        self._thread.start()

    def close(self) -> None:
        """The training has ended: no rank is to wait for this one any more."""
        with self._lock:
            self._place = _DONE
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    # Boundaries, in the training thread

    def after_step(self, step: int) -> str:
        """What to do after optimizer step number `step`: SAVE, STOP (and save), or nothing."""
        due = SAVE if self.every_steps and step % self.every_steps == 0 else ""
        return self._reach(in_validation=False) or due

    def after_validation_batch(self, number: int) -> str:
        """After batch number `number` of a validation, from 0."""
        return self.answer() if number else self._reach(in_validation=True)

    def after_validation_batches(self) -> str:
        """Before the ranks put their sums together."""
        return self._reach(in_validation=False)

    def saved(self) -> None:
        self._saved_at = time.monotonic()

    @property
    def signal(self) -> int:
        """The signal for which all stop."""
        return int(self._kind.partition(" ")[2] or signal.SIGTERM)

    def _reach(self, *, in_validation: bool) -> str:
        with self._lock:
            self._place += 1
            self._in_validation = in_validation
        return self.answer()

    def answer(self) -> str:
        """What the ranks have agreed on for this place: SAVE, STOP, or nothing."""
        if not self._asked:
            return ""
        if not self._decided.wait(_PATIENCE_S) or self._place < self._at:
            return ""
        asked = self._kind.partition(" ")[0]
        with self._lock:
            self._round, self._asked = self._round + 1, False
            self._decided.clear()
        return asked

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """A signal has come: all ranks are to stop."""
        now = time.monotonic()
        if self._signal and number == signal.SIGINT and now - self._signalled_at > TWICE_S:
            os._exit(128 + number)  # a second Ctrl-C; a terminal may send one signal to a process twice
        self._signal, self._signalled_at = self._signal or number, self._signalled_at or now

    # The thread

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone when rank 0 is: then there is nobody left to agree with
            while not self._closed.wait(self._poll_s):
                if not self._asked:
                    self._look()
            self._store.set(self._key(self.rank), json.dumps([_DONE, False]))  # whoever asks now is not to wait for this rank
        self._at = _DONE + 1
        self._decided.set()

    def _key(self, name: object) -> str:
        return f"agreement/{self._round}/{name}"

    def _look(self) -> None:
        if self._signal:
            self._store.compare_set(self._key("request"), "", f"{STOP} {self._signal}")
        elif self.rank == 0 and self.every_s and time.monotonic() - self._saved_at > self.every_s:
            self._store.compare_set(self._key("request"), "", SAVE)
        if not self._store.check([self._key("request")]):
            return
        kind = self._store.get(self._key("request")).decode()
        with self._lock:
            self._asked = True
            mine = [self._place, self._in_validation]
        self._store.set(self._key(self.rank), json.dumps(mine))
        keys = [self._key(rank) for rank in range(self.world_size)]
        while not self._store.check(keys):
            if self._closed.wait(self._poll_s / 10):
                return
        places = [json.loads(self._store.get(key)) for key in keys]
        last, in_validation = max(places)
        self._kind = kind
        self._at = last if in_validation and kind.startswith(STOP) else last + 1
        self._decided.set()
