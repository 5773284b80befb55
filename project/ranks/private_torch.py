"""What the project uses of torch that has no public name: each with its reason and with what happens where it is missing.

`guard/replica_guard.py`, which is copied alone, has a class of its own for this. A test finds every other private name.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented, in a module that is not; benchmarks


def default_store() -> dist.Store:
    """A connection of its own to the key-value store of `init_process_group`, which gives nobody its store.

    Without a process group a store of this process alone. A torch without this function ends the start of a training with
    AttributeError: nothing else lets the ranks agree while a collective waits.
    """
    return dist.distributed_c10d._get_default_store().clone() if dist.is_initialized() else dist.HashStore()


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward that runs now has ended.

    A public name was asked for in https://github.com/pytorch/pytorch/issues/66199. Recorder and tracer alone use it, and end
    with AttributeError without it.
    """
    Variable._execution_engine.queue_callback(call)


def is_compiled(model: nn.Module) -> bool:
    """Whether `model.compile()` was called. A torch that keeps it elsewhere says no, and hooks then break the compiled graph."""
    return getattr(model, "_compiled_call_impl", None) is not None


def reducer_log(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What DDP's reducer tells of its buckets, which it logs for torch's own use (https://github.com/pytorch/pytorch/pull/50622).

    Without it: nothing, and the timeline shows buckets without their contents.
    """
    ask = getattr(ddp, "_get_ddp_logging_data", None)
    return ask() if ask is not None else {}


def reducer_parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Parameters in the order in which DDP gave them to its reducer; without the name, in the model's."""
    build = getattr(ddp, "_build_params_for_reducer", None)
    return build()[0] if build is not None else [p for p in ddp.module.parameters() if p.requires_grad]
