"""Ranks as threads of one process, each at its own pace: all stop or save at one boundary, and none waits for ever."""

import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from project.ranks.agreement import SAVE, STOP, Agreement

STEPS, EPOCHS, VAL_BATCHES = 6, 3, 4


def agreement(store: dist.Store, *, rank: int, world_size: int, every_steps: int = 0, every_s: float = 0.0) -> Agreement:
    return Agreement(store, rank=rank, world_size=world_size, every_steps=every_steps, every_s=every_s, poll_s=0.002)


class Rank:
    """The boundaries of a small training; steps end together, validation batches do not."""

    def __init__(self, ours: Agreement, barrier: threading.Barrier, seed: int) -> None:
        self.ours, self.barrier, self.random = ours, barrier, random.Random(seed)
        self.saved: list[tuple[int, str]] = []
        self.stopped: tuple[int, str] | None = None
        self.boundary = 0

    def run(self) -> None:
        self.ours.listen()
        try:
            for epoch in range(EPOCHS):
                for step in range(STEPS):
                    self.work(together=True)
                    if self.heed(self.ours.after_step(epoch * STEPS + step + 1), "step"):
                        return
                for number in range(VAL_BATCHES):
                    self.work(together=number == 0)
                    if self.heed(self.ours.after_validation_batch(number), "validation", counts=number == 0):
                        return
                if self.heed(self.ours.after_validation_batches(), "batches"):
                    return
                self.work(together=True)
        finally:
            self.ours.close()

    def work(self, *, together: bool) -> None:
        time.sleep(self.random.uniform(0, 0.006))
        if together:
            self.barrier.wait(10)

    def heed(self, asked: str, kind: str, *, counts: bool = True) -> bool:
        self.boundary += counts
        if asked == SAVE:
            self.saved.append((self.boundary, kind))
            self.ours.saved()
        if asked == STOP:
            self.stopped = (self.boundary, kind)
        return asked == STOP


def train(
    world_size: int, *, signalled: dict[int, float], seed: int = 0, every_steps: int = 0, every_s: float = 0.0
) -> list[Rank]:
    """The ranks of a training in which some get SIGTERM, so many seconds after its start."""
    store, barrier = dist.HashStore(), threading.Barrier(world_size)
    given = {"world_size": world_size, "every_steps": every_steps, "every_s": every_s}
    ranks = [Rank(agreement(store, rank=rank, **given), barrier, 100 * seed + rank) for rank in range(world_size)]
    threads = [threading.Thread(target=rank.run) for rank in ranks]
    for rank, seconds in signalled.items():
        threading.Timer(seconds, ranks[rank].ours.note, (signal.SIGTERM,)).start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return ranks


@pytest.mark.parametrize("seed", range(12))
def test_all_stop_at_one_boundary_whoever_was_signalled_and_when(seed: int) -> None:
    chosen = random.Random(seed)
    world_size = chosen.choice([1, 2, 3, 4])
    signalled = {chosen.randrange(world_size): chosen.uniform(0, 0.15) for _ in range(chosen.choice([1, 1, 2]))}
    ranks = train(world_size, signalled=signalled, seed=seed)
    assert len({rank.stopped for rank in ranks}) == 1
    assert all(rank.ours.signal == signal.SIGTERM for rank in ranks)


def test_places_where_all_stop_are_of_every_kind() -> None:
    """Also inside the validation, where ranks are at different batches."""
    kinds = set()
    for seed in range(40):
        [first, *_] = train(2, signalled={1: 0.004 * seed}, seed=seed)
        kinds.add(first.stopped and first.stopped[1])
        if {"step", "validation"} <= kinds:
            break
    assert {"step", "validation"} <= kinds


def test_saving_by_steps_by_time_and_then_stopping() -> None:
    ranks = train(3, signalled={}, every_steps=4)
    assert [place for place, _ in ranks[0].saved] == [4, 10, 14, 20]  # two boundaries of a validation lie between
    assert all(rank.saved == ranks[0].saved for rank in ranks)
    ranks = train(3, signalled={2: 0.12}, every_s=0.03)
    assert len(ranks[0].saved) > 1
    assert all(rank.saved == ranks[0].saved and rank.stopped == ranks[0].stopped for rank in ranks)
    assert ranks[0].stopped is not None


def test_a_signal_after_the_last_step_lets_all_end() -> None:
    for rank in train(2, signalled={1: 5.0}):
        assert rank.stopped is None
    store = dist.HashStore()
    ours, other = (agreement(store, rank=rank, world_size=2) for rank in (0, 1))
    other.listen()
    other.close()
    ours.listen()
    ours.note(signal.SIGTERM)
    store.wait(["agreement/0/0"], timedelta(seconds=10))  # the place of rank 0 in round 0: its request has been heard
    began = time.monotonic()
    assert ours.after_step(1) == ""
    assert time.monotonic() - began < 10  # and not after a minute's patience with a rank that says nothing
    ours.close()


def test_a_store_that_is_gone_stops_nobody() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    ours = agreement(client, rank=1, world_size=2)
    ours.listen()
    [thread] = [each for each in threading.enumerate() if each.name == "agreement"]
    del server
    ours.note(signal.SIGTERM)
    thread.join(10)
    assert not thread.is_alive()
    assert ours.after_step(1) == ""
    ours.close()


def test_signals_are_noted_and_handlers_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ours = agreement(dist.HashStore(), rank=0, world_size=1)
    ours.begin()
    signal.raise_signal(signal.SIGTERM)
    deadline = time.monotonic() + 10
    step, asked = 0, ""
    while not asked and time.monotonic() < deadline:
        step += 1
        asked = ours.after_step(step)
        time.sleep(0.005)
    assert asked == STOP
    assert ours.signal == signal.SIGTERM
    ours.close()
    assert signal.getsignal(signal.SIGTERM) is before
