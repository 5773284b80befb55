"""Each check passes on two right records and fails on one that is wrong in that way, at the right step and phase."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from project.parity.checks import compare_runs, first_difference
from project.parity.recorded_run import CannotTell, Event, Finding, Run, load_run
from project.parity.reduction import matches_a_ring, sketch_bound, within_rounding
from project.parity.sizes import element_difference, measure_step
from project.record.attached import digest
from project.record.format import read_sketch, tensor_file
from tests.hand_made import make_ranks, ring_mean, steps, write_ranks

Ranks = dict[int, list[Event]]


def judge(ranks: Ranks, *, world_size: int = 2) -> list[Finding]:
    return compare_runs(Run("A", make_ranks(world_size=world_size)), Run("B", ranks))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_right_records_are_equal(world_size: int) -> None:
    findings = judge(make_ranks(world_size=world_size), world_size=world_size)
    assert [finding for finding in findings if not finding.passed] == []
    assert all(finding.compared for finding in findings)
    assert first_difference(findings) is None


other = digest(torch.full((5,), 7.0))
nan = digest(torch.tensor([1.0, float("nan"), 1, 1, 1]))


def event(ranks: Ranks, *, rank: int = 1, step: int = 4) -> Event:
    return steps(ranks[rank])[step]


def everywhere(ranks: Ranks, key: str, change: Callable[[Any], Any], *, step: int = 4) -> None:
    for rank in ranks:
        event(ranks, rank=rank, step=step)[key] = change(event(ranks, rank=rank, step=step)[key])


def swap_ranks(ranks: Ranks) -> None:
    for key in ("index",):
        one, two = (event(ranks, rank=rank)["batches"][0] for rank in (0, 1))
        one[key], two[key] = two[key], one[key]


def same_order(ranks: Ranks) -> None:
    for rank in ranks:
        for number in range(3):
            event(ranks, rank=rank, step=number + 3)["batches"] = event(ranks, rank=rank, step=number)["batches"]


# What is wrong in B, what must find it, and in which phase and step the first difference must be
FAULTS: dict[str, tuple[Callable[[Ranks], Any], str, str, int | None]] = {
    "versions": (lambda r: r[0][0]["environment"]["versions"].update(torch="3"), "environment", "environment", None),
    "seed": (lambda r: r[0][0]["settings"].update(seed=2), "settings", "environment", None),
    "epoch": (lambda r: event(r).update(epoch=0), "batches per step", "data", 4),
    "other sample": (lambda r: event(r)["batches"][0].update(index=[0, 0]), "sample indices", "data", 4),
    "ranks swapped": (swap_ranks, "sample indices", "data", 4),
    "beyond the set": (lambda r: event(r)["batches"][0].update(index=[0, 9]), "samples covered", "data", 4),
    "no set_epoch": (same_order, "order changes", "data", 3),
    "batch size": (lambda r: event(r)["batches"][0]["index"].pop(), "batches per step", "data", 4),
    "images": (lambda r: event(r)["batches"][0].update(images=other), "images", "data", 4),
    "validation images": (
        lambda r: steps(r[1], "validation")[0]["batches"][0].update(images=other),
        "validation images",
        "metric",
        2,
    ),
    "targets": (lambda r: event(r)["batches"][0].update(target=other), "targets", "data", 4),
    "logits": (lambda r: event(r)["batches"][0].update(logits=other), "logits", "forward", 4),
    "loss": (lambda r: event(r)["batches"][0].update(loss=1.6100000000000003), "loss", "forward", 4),
    "loss NaN": (lambda r: event(r)["batches"][0].update(loss=float("nan")), "finite", "forward", 4),
    "a batch more": (lambda r: event(r)["batches"].append(event(r)["batches"][0]), "sample indices", "data", 4),
    "local": (lambda r: event(r)["local"].update(fc=other), "local gradients", "local gradient", 4),
    "a key less": (lambda r: event(r)["local"].pop("fc"), "local gradients", "local gradient", 4),
    "a key more": (lambda r: event(r)["buffers"].update(more=other), "buffers", "buffers", 4),
    "empty": (lambda r: event(r)["local"].clear(), "local gradients", "local gradient", 4),
    "reduced": (lambda r: event(r)["reduced"].update(fc=other), "ranks agree: gradients", "reduced gradient", 4),
    "not the mean": (
        lambda r: everywhere(r, "reduced", lambda _: event(r, rank=0)["local"]),
        "mean of the ranks, by sketches",
        "reduced gradient",
        4,
    ),
    "lr": (lambda r: event(r).update(lr=[0.101]), "ranks agree: learning rate", "schedule", 4),
    "lr of all": (lambda r: everywhere(r, "lr", lambda _: [0.101]), "learning rate", "schedule", 4),
    "weights": (lambda r: everywhere(r, "weights", lambda w: {**w, "fc": other}), "weights", "update", 4),
    "weights of one": (lambda r: event(r).update(weights={"conv": other, "fc": other}), "ranks agree: weights", "update", 4),
    "weights NaN": (lambda r: everywhere(r, "weights", lambda w: {**w, "fc": nan}), "finite", "update", 4),
    "other type": (
        lambda r: everywhere(r, "weights", lambda w: {**w, "fc": digest(torch.zeros(5, dtype=torch.float64))}),
        "weights",
        "update",
        4,
    ),
    "moments": (lambda r: event(r)["optimizer"].update({"fc/momentum_buffer": other}), "ranks agree: optimizer", "update", 4),
    "buffers": (lambda r: event(r)["buffers"].update(mean=other), "buffers", "buffers", 4),
    "metrics": (lambda r: steps(r[0], "validation")[1]["metrics"].update({"val/top1": 0.8}), "validation metrics", "metric", 5),
    "padding counted": (
        lambda r: [steps(r[k], "validation")[0]["metrics"].update({"val/images": 6.0}) for k in r],
        "images validated",
        "metric",
        2,
    ),
    "metric NaN": (lambda r: steps(r[0], "validation")[1]["metrics"].update({"val/loss": float("nan")}), "finite", "metric", 5),
    "forgotten eval": (
        lambda r: steps(r[1], "validation")[0]["batches"][0].update(training=True),
        "evaluation mode",
        "metric",
        2,
    ),
    "validation logits": (
        lambda r: steps(r[1], "validation")[0]["batches"][0].update(logits=other),
        "validation logits",
        "metric",
        2,
    ),
    "no last validation": (lambda r: [r[k].remove(steps(r[k], "validation")[1]) for k in r], "validation metrics", "metric", 5),
    "checkpoint": (
        lambda r: steps(r[0], "checkpoint")[1]["state_dict"].update(fc=other),
        "checkpoint tensors",
        "checkpoint",
        5,
    ),
    "its record": (lambda r: steps(r[0], "checkpoint")[0]["record"].update(step=2), "checkpoint record", "checkpoint", 2),
    "its name": (lambda r: steps(r[0], "checkpoint")[0].update(name="best.ckpt"), "checkpoint names", "checkpoint", 2),
    "its keys": (lambda r: steps(r[0], "checkpoint")[0]["keys"].append("ema"), "checkpoint keys", "checkpoint", 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_check_fails_where_it_must(fault: str) -> None:
    change, check, phase, step = FAULTS[fault]
    change(ranks := make_ranks())
    findings = judge(ranks)
    assert check in {finding.check for finding in findings if finding.failed}
    first = first_difference(findings)
    assert first is not None
    assert (first.phase, first.step) == (phase, step), first


def test_every_check_can_fail() -> None:
    failed: set[str] = set()
    for change, *_ in FAULTS.values():
        change(ranks := make_ranks())
        failed |= {finding.check for finding in judge(ranks) if finding.failed}
    assert failed == {finding.check for finding in judge(make_ranks())}


def test_equal_nan_in_both_is_a_failure() -> None:
    both = [make_ranks(), make_ranks()]
    for ranks in both:
        everywhere(ranks, "reduced", lambda found: {**found, "fc": nan})
    findings = compare_runs(*(Run(name, ranks) for name, ranks in zip("AB", both, strict=True)))
    assert {finding.check for finding in findings if finding.failed} == {"finite", "mean of the ranks, by sketches"}


def test_lightnings_own_keys_may_be_in_one_file_only() -> None:
    ranks = make_ranks()
    for checkpoint in steps(ranks[0], "checkpoint"):
        checkpoint["keys"] += ["loops", "callbacks"]
    assert first_difference(judge(ranks)) is None


def test_recorded_runs_may_have_other_versions() -> None:
    ranks = make_ranks()
    ranks[0][0]["environment"]["versions"]["torch"] = "3"
    findings = compare_runs(Run("A", make_ranks()), Run("B", ranks), alike=False)
    assert first_difference(findings) is None
    assert [finding.check for finding in findings if finding.noted] == ["environment"]


BROKEN: dict[str, tuple[Callable[[Ranks], Any], str]] = {
    "a missing rank": (lambda r: r.pop(1), "records of ranks"),
    "no rank": (lambda r: r.clear(), "no record"),
    "no events": (lambda r: r[1].clear(), "no beginning"),
    "no end": (lambda r: r[1].pop(), "breaks off"),
    "no steps": (lambda r: [r.update({k: [r[k][0], {"event": "end", "steps": 0}]}) for k in list(r)], "no step"),
    "a step lost": (lambda r: r[1].remove(steps(r[1])[2]), "5 of 6 steps"),
    "a missing key": (lambda r: steps(r[1])[2].pop("weights"), "lacks weights in a step"),
    "a missing loss": (lambda r: steps(r[1])[2]["batches"][0].pop("loss"), "lacks loss in a step"),
    "a missing setting": (lambda r: r[0][0]["settings"].pop("samples"), "lacks samples in a start"),
    "a step of nothing": (lambda r: steps(r[1])[2]["batches"].clear(), "a step without a batch"),
    "an unknown event": (lambda r: r[1].insert(2, {"event": "coffee"}), "'coffee'"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_of_a_broken_record_nothing_can_be_said(fault: str) -> None:
    change, message = BROKEN[fault]
    change(ranks := make_ranks())
    with pytest.raises(CannotTell, match=message):
        judge(ranks)


def test_other_numbers_of_ranks_cannot_be_laid_side_by_side() -> None:
    with pytest.raises(CannotTell, match="A has 3 ranks, B has 2"):
        compare_runs(Run("A", make_ranks(world_size=3)), Run("B", make_ranks()))


# The mean of the ranks


def gradients(world_size: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(world_size)
    return [torch.randn(*shape, generator=generator) for _ in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_ring_order_is_right_and_one_ulp_is_wrong(world_size: int) -> None:
    local = gradients(world_size, 100)
    for first in range(world_size):
        reduced = ring_mean(local, first)
        assert matches_a_ring(local, reduced).all()
    # 25 elements from each order, as chunks of one tensor are
    mixed = torch.cat([ring_mean(local, k % world_size)[25 * k : 25 * k + 25] for k in range(4)])
    assert matches_a_ring(local, mixed).all()
    far = torch.full_like(mixed, 9.0)
    high, wrong = mixed.clone(), mixed.clone()
    for _ in range(3):  # further than any two orders are apart here
        high = high.nextafter(far)
    wrong[7] = mixed[7].nextafter(far[7]) if world_size < 3 else high[7]
    assert (~matches_a_ring(local, wrong)).nonzero().tolist() == [[7]]
    assert within_rounding(local, wrong).all()  # which a bound cannot see


def test_orders_that_no_ring_has_are_seen() -> None:
    # (a + b) + (c + d) is no ring's order of four; nor is dividing the sum
    local = gradients(4, 1000)
    a, b, c, d = (gradient / 4 for gradient in local)
    tree = (a + c) + (b + d)
    assert not matches_a_ring(local, tree).all()
    assert within_rounding(local, tree).all()
    three = gradients(3, 1000)
    divided = (three[0] + three[1] + three[2]) / 3
    assert not matches_a_ring(three, divided).all()
    assert within_rounding(three, divided).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_equal_bits_that_are_no_numbers_are_wrong(value: float) -> None:
    local = [torch.tensor([1.0, value]), torch.tensor([1.0, 1.0])]
    assert matches_a_ring(local, ring_mean(local)).tolist() == [True, False]


def test_the_bound_holds_for_every_order_and_not_for_faults() -> None:
    for world_size in (2, 3, 4):
        for size in (1, 100, 50_000):
            local = gradients(world_size, size)
            digests = [digest(gradient) for gradient in local]
            mean = sum(read_sketch(found) for found in digests) / world_size

            def off(reduced: Tensor, mean: Any = mean, digests: Any = digests) -> float:
                found = digest(reduced)
                return float(abs(mean - read_sketch(found)).max()) / sketch_bound(digests, found)

            assert all(off(ring_mean(local, first)) < 1 for first in range(world_size))
            assert off(ring_mean(local) * world_size) > 100  # summed
            assert off(local[0]) > 100  # not reduced
            assert off(ring_mean(local) * 1.01) > 1  # one percent, in the largest too


def test_stored_tensors_are_judged_in_every_element(tmp_path: Path) -> None:
    make_ranks(folder=tmp_path / "a")
    ranks = make_ranks(folder=tmp_path / "b")
    a, b = load_run(tmp_path / "a", name="A"), load_run(tmp_path / "b", name="B")
    assert a.stored_steps() == [0]
    [exact, _] = [found for found in compare_runs(a, b) if found.check == "mean of the ranks, exactly"]
    assert (exact.passed, exact.compared, exact.detail.split()[0]) == (True, 2, "17")
    path = tensor_file(tmp_path / "b", step=0, rank=0)
    kept = torch.load(path, weights_only=True)
    kept["reduced"]["fc"][3] = kept["reduced"]["fc"][3].nextafter(torch.tensor(9.0))
    torch.save(kept, path)
    [wrong] = [found for found in compare_runs(a, load_run(tmp_path / "b", name="B")) if found.failed]
    assert "is not the recorded one" in wrong.detail
    for rank in ranks:  # the record says the same: one ulp off, in both runs' words equal on all ranks
        steps(ranks[rank])[0]["reduced"]["fc"] = digest(kept["reduced"]["fc"])
    write_ranks(ranks, tmp_path / "b")
    findings = compare_runs(a, load_run(tmp_path / "b", name="B"))
    assert {found.check for found in findings if found.failed} == {"reduced gradients", "mean of the ranks, exactly"}
    assert "1 of 5 elements, first [3]" in next(found.detail for found in findings if found.side == "b" and found.failed)


# Sizes


def test_the_size_of_a_difference() -> None:
    a = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]])
    b = a.clone()
    b[0, 1], b[1, 2] = 2.5, -0.0
    found = element_difference(a, b)
    assert found == {"elements": (2, 6), "largest": 0.5, "relative": 0.125, "first": (0, 1), "values": (2.0, 2.5)}


def test_sizes_come_from_what_repeated_runs_stored(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.5)):
        (tmp_path / name).mkdir()
        for rank in (0, 1):
            kept = {"images": [torch.zeros(2)], "logits": [torch.zeros(2)], "local": {"fc": torch.ones(3), "conv": torch.ones(1)}}
            if rank == 1:
                kept["local"]["fc"][2] = value
            torch.save(kept, tensor_file(tmp_path / name, step=4, rank=rank))
    [size] = measure_step(tmp_path / "a", tmp_path / "b", step=4, world_size=2)
    assert (size.part, size.name, size.rank, size.tensors, size.first) == ("local", "fc", 1, (1, 2), (2,))
    assert (size.largest, size.values) == (0.5, (1.0, 1.5))
