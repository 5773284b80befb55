"""One YAML, the same steps on any number of devices: the arithmetic, worked by hand."""

import pytest

from project.runtime.errors import UserError
from project.settings.plan import BatchPlan, available_cores, loader_workers


def plan(**changes: object) -> BatchPlan:
    given = {"global_batch_size": 8, "world_size": 2, "accumulate": 1, "samples": 50, "drop_last": True, **changes}
    return BatchPlan(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("world_size", "per_rank"), [(1, 256), (2, 128), (4, 64), (8, 32)])
def test_imagenet_takes_the_same_steps_on_any_number_of_devices(world_size: int, per_rank: int) -> None:
    imagenet = plan(global_batch_size=256, world_size=world_size, samples=1_281_167)
    assert imagenet.per_rank_batch == per_rank
    assert imagenet.steps_per_epoch == 5004  # 1281167 / 256 = 5004.6
    assert plan(global_batch_size=256, world_size=world_size, samples=1_281_167, drop_last=False).steps_per_epoch == 5005


def test_fifty_samples_over_two_ranks() -> None:
    # 25 samples a rank in batches of 4: 6 whole ones and one of 1
    assert (plan().batches, plan().last_batch) == (6, 4)
    assert (plan(drop_last=False).batches, plan(drop_last=False).last_batch) == (7, 1)
    assert plan(samples=51).samples_per_rank == 26  # one sample stands on both ranks
    # accumulating 2, a rank's batch is 2: 12 batches, 6 steps
    assert (plan(accumulate=2).per_rank_batch, plan(accumulate=2).steps_per_epoch, plan(accumulate=2).tail) == (2, 6, 0)
    # accumulating 4, a rank's batch is 1: 25 batches, 7 steps, the last of 1 batch
    assert (plan(accumulate=4).batches, plan(accumulate=4).steps_per_epoch, plan(accumulate=4).tail) == (25, 7, 1)


def test_limits_follow_lightning() -> None:
    assert plan(limit=3).batches == 3
    assert plan(limit=100).batches == 6
    assert plan(limit=0.5).batches == 3
    assert plan(limit=1.0).batches == 6
    assert plan(limit=6, drop_last=False).last_batch == 4  # the batch of 1 is not reached


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 9}, ["--data.global_batch_size 9", "2 ranks", "8 or 10"]),
        ({"global_batch_size": 1}, ["2 ranks", "nearest that does is 2"]),
        ({"samples": 1}, ["1 training image for", "2 ranks", "--devices"]),
        ({"samples": 6}, ["6 images", "3 each", "per-rank batch of 4", "--data.drop_last"]),
    ],
)
def test_what_cannot_be_split_is_refused(changes: dict[str, int], words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        plan(**changes)
    for word in words:
        assert word in str(refusal.value)


def test_workers_share_the_cores() -> None:
    cores = available_cores()
    assert loader_workers(3, local_ranks=1) == 3
    assert loader_workers(None, local_ranks=1) == min(16, cores - 1)
    assert loader_workers(None, local_ranks=cores) == 0
