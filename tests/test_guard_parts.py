"""The guard's parts in one process: bounds, data sets, settings of modules, what is left after it, other versions of torch."""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from project.guard import ReplicaError, ReplicaGuard
from project.guard import replica_guard as parts
from tests.hand_made import ring_mean
from tests.run_ranks import free_port

SIZES = {"bias": (5,), "norm": (64,), "conv": (40, 3, 7, 7), "fc": (10, 300)}


def gradients(ranks: int, *, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    scale = {"bias": 1e-30, "norm": 1e3, "conv": 1.0, "fc": 1e-4}
    return [{k: (torch.randn(s, generator=generator) * scale[k]).to(dtype) for k, s in SIZES.items()} for _ in range(ranks)]


def seen(
    own: list[dict[str, Tensor]], reduced: list[dict[str, Tensor]], used: list[dict[str, Tensor]] | None = None, **facts: Any
) -> Any:
    """What the ranks post of a step, and what rank 0 finds in it."""
    names = sorted(own[0])
    kinds = [torch.finfo(own[0][name].dtype) for name in names]
    elements, eps, tiny = [own[0][n].numel() for n in names], [k.eps for k in kinds], [k.tiny for k in kinds]
    reduction = {
        "names": names,
        "used": names,
        "elements": elements,
        "eps": eps,
        "tiny": tiny,
        "hook": None,
        "collectives": 0,
        **facts,
    }
    stacked = [
        {part: torch.stack([parts.sketch(values[rank][name]) for name in names]) for part, values in stages.items()}
        for rank, stages in enumerate([{"own": own, "reduced": reduced, "used": used or reduced}] * len(own))
    ]
    return parts.WrongMean.find([{"step": 2, "reduction": reduction}] * len(own), stacked)


def mean_of(own: list[dict[str, Tensor]], *, first: int = 0, times: float = 1.0) -> list[dict[str, Tensor]]:
    """As gloo leaves it on each rank, or what a fault makes of it."""
    return [{name: ring_mean([rank[name] for rank in own], first) * times for name in own[0]}] * len(own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_mean_is_within_rounding_and_a_scaled_one_is_not(ranks: int, dtype: torch.dtype) -> None:
    own = gradients(ranks, dtype=dtype)
    for first in range(ranks):
        assert seen(own, mean_of(own, first=first)) is None
    for times in (1 / ranks, ranks, 1.5):
        finding = seen(own, mean_of(own, times=times))
        assert finding.factors == pytest.approx([times] * ranks, rel=0.01)
    assert seen(own, own).kept


def test_the_words_for_a_wrong_reduction_say_the_factor() -> None:
    own = gradients(2)
    for times, words in ((0.5, "is 0.5 times the mean of the ranks' own gradients: averaged twice"), (2.0, "2 times the mean")):
        report = seen(own, mean_of(own, times=times)).report({0: ({}, None), 1: ({}, None)}, 2)
        assert report.startswith("the gradient of step 2 is")
        assert words in report
        assert "reduction=False" in report
    assert ": summed" in report


def test_a_hook_may_round_or_compress_and_not_scale() -> None:
    own = gradients(2)
    rounded = [{name: value.bfloat16().float() for name, value in rank.items()} for rank in mean_of(own)]
    sparse = [{name: value * (value.abs() > value.abs().mean()) for name, value in rank.items()} for rank in mean_of(own)]
    assert seen(own, rounded) is not None  # without a hook nothing may
    assert seen(own, rounded, hook="bf16_compress_hook") is None
    assert seen(own, sparse, hook="top_k") is None
    half = [{name: value / 2 for name, value in rank.items()} for rank in rounded]
    assert seen(own, half, hook="mine").factors == pytest.approx([0.5, 0.5], rel=0.01)


def test_gradients_summed_once_more_after_backward_are_found_and_other_factors_are_nobodys_business() -> None:
    own = gradients(2)
    after = [{name: 2 * value for name, value in rank.items()} for rank in mean_of(own)]
    assert seen(own, mean_of(own), after) is None  # scaled by the script, or unscaled after a loss that was
    assert seen(own, mean_of(own), after, collectives=len(SIZES)).after


def test_what_is_not_finite_is_left_to_the_check_for_that() -> None:
    own = gradients(2)
    own[1]["fc"][0, 0] = torch.inf
    assert seen(own, mean_of(own)) is None


class Files(Dataset[str]):
    """As people write it: a list of paths, and labels that the file's name tells."""

    def __init__(self, root: str, names: list[str]) -> None:
        self.paths = [f"{root}/{name}" for name in names]
        self.labels = [len(name) for name in names]
        self.cache: list[Any] = [None] * len(names)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        return Path(self.paths[index]).name


def test_a_data_set_is_known_by_the_order_of_its_files_wherever_they_lie() -> None:
    here = parts.identify(Files("/nfs/a/photos", ["x/1.jpg", "x/2.jpg", "y/3.jpg"]))
    assert parts.identify(Files("/scratch/photos", ["x/1.jpg", "x/2.jpg", "y/3.jpg"])) == here
    other = parts.identify(Files("/nfs/a/photos", ["x/2.jpg", "x/1.jpg", "y/3.jpg"]))
    assert other.keys() == here.keys() == {"paths", "labels"}
    assert other["paths"] != here["paths"]


def test_parts_and_tensors_of_a_data_set_are_told_apart() -> None:
    whole = TensorDataset(torch.arange(12.0).reshape(6, 2))
    own = parts.identify(Subset(whole, [0, 2, 4]))
    assert own.keys() == {"indices", "whole set's tensors 0"}
    assert parts.identify(Subset(whole, [0, 2, 5]))["indices"] != own["indices"]
    changed = TensorDataset(whole.tensors[0].clone())
    changed.tensors[0][5, 1] += 1
    assert parts.identify(Subset(changed, [0, 2, 4])) != own
    assert parts.identify(ConcatDataset([whole, changed])) != parts.identify(ConcatDataset([changed, whole]))
    assert len(parts.identify(ConcatDataset([whole, changed]))) == 2


class Made(Dataset[Tensor]):
    """Samples that nothing but their content tells apart; it counts who has read it."""

    def __init__(self, seed: int, *, noise: float = 0.0, own: bool = False, fail: bool = False) -> None:
        self.seed, self.noise, self.fail = seed, noise, fail
        self.reads, self.generator = 0, torch.Generator() if own else None

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        if self.fail:
            raise OSError("gone")
        own = torch.Generator().manual_seed(100 * self.seed + index)
        return torch.randn(3, generator=own) + self.noise * torch.randn(3, generator=self.generator)


def test_samples_are_compared_by_content_and_reading_them_touches_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    state, data = torch.get_rng_state(), Made(1, noise=1.0)
    found = parts.contents(DataLoader(data))
    assert len(found) == 8
    assert found == parts.contents(DataLoader(Made(1, noise=1.0), num_workers=2))  # random ones are seeded alike
    assert not set(found.values()) & set(parts.contents(DataLoader(Made(2, noise=1.0))).values())
    assert data.reads == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert parts.contents(DataLoader(Made(1, noise=1.0, own=True))) == {}  # they are others at each reading
    assert parts.contents(DataLoader(Made(1, fail=True))) == {}
    assert capfd.readouterr() == ("", "")


def test_module_settings_name_the_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    before = parts.module_settings(model)
    model[1].eval()
    model[2].p = 0.1
    model[0].weight.requires_grad_(False)
    after = parts.module_settings(model)
    assert {name: after[name] for name in after if after[name] != before.get(name)} == {
        "1 (BatchNorm1d) training": "False",
        "2 (Dropout) p": "0.1",
        "0.weight requires_grad": "False",
    }


def test_nothing_of_the_guard_is_left_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ReplicaGuard(model, optimizer, quiet=True)
    for batch in guard(DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2)):
        model(batch[0]).sum().backward()
        optimizer.step()
        guard.step()
    own, called = weakref.ref(guard), []
    assert sys.excepthook is not before
    assert any(thread.name.startswith("replica-guard") for thread in threading.enumerate())
    guard.close()
    assert sys.excepthook is before
    assert not any(thread.name.startswith("replica-guard") for thread in threading.enumerate())
    monkeypatch.setattr(parts.Hook, "__call__", lambda *arguments: called.append(arguments))
    model(torch.randn(1, 4)).sum().backward()
    optimizer.step()
    assert not called
    with pytest.raises(RuntimeError, match="this guard is closed"):
        guard.step()
    kept = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert kept() is None  # although the guard is still there
    del guard
    gc.collect()
    assert own() is None


def test_one_rank_waits_for_nobody_however_long_it_does_something_else() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ReplicaGuard(model, optimizer, timeout_s=0.2, quiet=True)
    for batch in guard(DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2)):
        model(batch[0]).sum().backward()
        optimizer.step()
        guard.step()
    other, images = nn.Linear(512, 512), torch.randn(512, 512)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:  # the guard's thread finds it in torch/autograd
        other(images).sum().backward()
    guard.check()  # would raise a report
    guard.close()


def test_an_excepthook_that_was_put_around_the_guards_stays() -> None:
    before = sys.excepthook
    model = nn.Linear(1, 1)
    guard = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = sys.excepthook
    sys.excepthook = around = lambda *error: inner(*error)
    guard.close()
    assert sys.excepthook is around
    assert inner.guard is None
    sys.excepthook = before


def test_an_epoch_that_ends_with_a_compared_step_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(parts, "checksums", lambda tensors: made.append(1) or torch.zeros(len(tensors), dtype=torch.int64))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ReplicaGuard(model, optimizer, every=2, quiet=True)
    loader = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=1)
    for batch in guard(loader):
        model(batch[0]).sum().backward()
        optimizer.step()
        guard.step()
    model.eval()
    list(guard(loader))
    guard.close()
    assert len(made) == 4  # before step 1, after steps 1, 2 and 4


def test_an_error_of_the_guard_itself_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    monkeypatch.setattr(parts.Watchdog, "idle_s", lambda self: {}["missing"] if threading.current_thread().daemon else 0.0)
    guard = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="the guard itself has failed.* KeyError: 'missing'") as raised:
        guard.begin([])
    assert isinstance(raised.value.__cause__, KeyError)
    assert not isinstance(raised.value, ReplicaError)
    guard.close()


def leave(guard: ReplicaGuard, error: BaseException | None) -> Any:
    """A loop of three batches that is left in the second one, as a script does it, which then closes the guard."""
    found = []
    try:
        for number, _ in enumerate(guard(DataLoader(TensorDataset(torch.randn(3, 4))))):
            found.append(next(iter(guard.ledger.open.values())))
            if number == 1 and error is not None:
                raise error
            if number == 1:
                break
    finally:
        guard.close()
    return found[0]


@pytest.mark.parametrize("error", [ValueError("no cat\nin it"), KeyboardInterrupt(), SystemExit(1)])
def test_a_loop_that_an_exception_ends_was_not_left(error: BaseException) -> None:
    model = nn.Linear(1, 1)
    guard = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    with pytest.raises(type(error)):
        leave(guard, error)
    assert guard.ended_with == {"ValueError": "ValueError: no cat", "SystemExit": "SystemExit: 1"}.get(
        type(error).__name__, type(error).__name__
    )
    other = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    assert leave(other, None).ended
    assert other.ended_with is None


def test_a_store_that_fails_is_called_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    guard = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def gone(*_: Any) -> None:
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(guard.channel, "store", type("Gone", (), dict.fromkeys(("check", "set", "get"), staticmethod(gone))))
    with pytest.raises(ReplicaError, match="can no longer reach the other ranks: DistNetworkError: Broken pipe"):
        guard.begin([])
    guard.close()


def test_values_that_never_come_from_a_device_are_done_without() -> None:
    waits = threading.Event()
    began = time.monotonic()
    assert parts.within(0.1, waits.wait) is None
    assert time.monotonic() - began < 5
    waits.set()
    assert parts.within(5, lambda: 7) == 7


@pytest.mark.parametrize("name", ["_dump_nccl_trace", "_dump_fr_trace"])
def test_the_last_collective_is_quoted_from_the_recorder_that_has_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    entry = {"collective_seq_id": 7, "profiling_name": "nccl:all_reduce", "input_sizes": [[3]], "state": "started"}
    for other in ("_dump_nccl_trace", "_dump_fr_trace"):
        dumped = pickle.dumps({"entries": [entry] if other == name else []})
        monkeypatch.setattr(torch._C._distributed_c10d, other, lambda dumped=dumped: dumped, raising=False)
    assert parts.last_collective() == "#7 nccl:all_reduce [[3]] started"


class Group:
    def __init__(self, seconds: float | None) -> None:
        options = type("Options", (), {"_timeout": timedelta(seconds=seconds)}) if seconds else None
        self._backend = type("Backend", (), {"options": options} if seconds else {})

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend


def test_the_group_timeout_is_read_and_else_is_the_backends_own() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert parts.Private.group_timeout_s(Group(77), cuda) == 77
    assert parts.Private.group_timeout_s(Group(None), cpu) == dist.distributed_c10d.default_pg_timeout.total_seconds()
    if dist.distributed_c10d.default_pg_nccl_timeout is not None:  # of a build with NCCL
        assert parts.Private.group_timeout_s(Group(None), cuda) == 600


def test_a_store_without_clone_gets_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.7."""
    server = dist.TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False)
    store = dist.PrefixStore("default_pg", server)
    monkeypatch.setattr(parts, "hasattr", lambda thing, name: name != "clone" and hasattr(thing, name), raising=False)
    own, other = parts.clone(store), parts.clone(store)
    own.set("key", "value")
    assert other.get("key") == store.get("key") == b"value"
    memory = dist.HashStore()
    assert parts.clone(memory) is memory


def test_sample_numbers_of_ten_digits_take_no_more_room_than_others() -> None:
    """As identifiers are; a count for each number up to the largest would take 80 GB."""
    facts = [{"batches": 1, "samples": None, "spare": 0, "epoch": 1, "first": None}] * 2
    numbers = [torch.tensor([9_999_999_999, 5]), torch.tensor([9_999_999_998, 7])]
    breach, line = parts.compare_ends(facts, numbers, good_step=1)
    assert breach is None
    assert line.startswith("4 samples on 2 ranks, each once")


def test_nothing_is_collected_while_python_is_asked_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection there has ended in a deadlock of the guard's thread and one that was just being started."""
    assert parts.of_threads(lambda: {0: gc.isenabled()}) == {0: False}
    assert gc.isenabled()
    asked = []
    for name in ("frames", "exceptions"):
        monkeypatch.setattr(parts.Private, name, lambda: asked.append(gc.isenabled()) or {})
    model = nn.Linear(1, 1)
    guard = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard.watchdog.stack()
    guard.watchdog.handled()
    guard.watchdog.waits()
    guard.watchdog.look()
    guard.close()
    assert len(asked) >= 4
    assert not any(asked)


class Stream(IterableDataset[Tensor]):
    """Batches without a number: neither this nor what samples from it has a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(12, 3))


def train(guard: ReplicaGuard, model: nn.Module, loader: Any) -> None:
    for batch in guard(loader):
        model(batch).sum().backward()
        guard.optimizers[0].step()
        guard.step()


def test_a_loader_without_a_length_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 1)
    guard = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(guard, model, DataLoader(Stream(), batch_size=4))
    guard.close()
    assert capsys.readouterr().out == "guard  epoch 1: 3 batches on 1 rank; step 3\n"


def test_a_training_in_eval_mode_is_said_with_its_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 1).eval()
    guard = ReplicaGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(guard, model, DataLoader(Stream(), batch_size=4))
    for _ in guard(DataLoader(Stream(), batch_size=4)):  # without a step: an evaluation
        pass
    guard.close()
    assert capsys.readouterr().out == "guard  epoch 1: 3 batches on 1 rank; step 3; the model was in eval() when it began\n"
