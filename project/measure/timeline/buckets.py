"""What DDP's gradient buckets hold, by its own log."""

from typing import Any

import torch

from project.runtime.errors import UserError


def bucket_contents(log: dict[str, Any], parameters: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Each bucket's parameters and bytes, from what DDP's reducer logs (`private_torch.reducer_log`).

    Args:
        log: DDP makes its buckets anew after the first backward, in the order in which gradients were ready, and then logs
            their sizes and indices. Where it does not (find_unused_parameters), they are cut from the parameters in
            reverse order, and only sizes are logged.
        parameters: Name and bytes of each, in DDP's order.

    Raises:
        UserError: the sizes do not add up, so nothing can be said of what is in which bucket.
    """
    if log.get("rebuilt_per_bucket_param_indices"):
        sizes = _numbers(log["rebuilt_bucket_sizes"])
        indices = [_numbers(part, " ") for part in log["rebuilt_per_bucket_param_indices"].split(",")]
    else:
        sizes, indices = _numbers(log["bucket_sizes"]), []
        left = list(range(len(parameters)))
        for size in sizes:
            indices.append([])
            while left and sum(parameters[i][1] for i in indices[-1]) < size:
                indices[-1].append(left.pop())
    found = [{"bytes": sum(parameters[i][1] for i in part), "names": [parameters[i][0] for i in part]} for part in indices]
    if [bucket["bytes"] for bucket in found] != sizes or sum(sizes) != sum(size for _, size in parameters):
        raise UserError(
            f"DDP's buckets hold {sizes} bytes by its own log, and {[bucket['bytes'] for bucket in found]} by their parameters "
            f"({torch.__version__}): this torch logs them otherwise."
        )
    return found


def _numbers(text: str, separator: str = ",") -> list[int]:
    return [int(part) for part in text.split(separator) if part.strip()]
