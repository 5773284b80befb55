"""What differs is said so that a person need not guess."""

from project.parity.differences import indices_difference


def test_samples_are_named_by_their_place() -> None:
    assert indices_difference([[5, 8]], [[5, 8]]) is None
    assert indices_difference([[5, 8, 14]], [[5, 14, 8]]) == (
        "are the same in another order: position 1 of the batch is sample 8 in one run and sample 14 in the other"
    )
    assert indices_difference([[1, 2], [3, 4]], [[1, 2], [3, 9]]) == (
        "are others, 1 of 4: position 1 of batch 1 is sample 4 in one run and sample 9 in the other"
    )


def test_batches_of_another_size() -> None:
    sizes = "in batches of [2, 1] in one run and [1, 2] in the other"
    assert indices_difference([[1, 2], [3]], [[1], [2, 3]]) == f"are the same, {sizes}"
    assert indices_difference([[1, 2], [3]], [[1], [3, 2]]) == f"are {sizes}"
    assert indices_difference([[1, 2]], [[1, 2, 3]]) == "are in batches of [2] in one run and [3] in the other"
