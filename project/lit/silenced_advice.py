"""Lightning's standing advice, silenced: what a run must say, this project says once, from one rank."""

import logging
import warnings

_EXPECTED = (
    r".*LightningCLI's args parameter.*",  # the command line is rewritten before it is parsed
    r".*LeafSpec.*",  # Lightning's own use of torch's tree functions
    r".*Using `DistributedSampler` with the dataloaders.*",  # validation is exact on any number of ranks
    r".*does not have many workers.*",  # loader_workers decides
    r".*is smaller than the logging interval.*",  # an interval ends with the epoch
    r".*The dirpath has changed from.*",  # each run has a folder of its own, a resumed one too
    r".*could not find the monitored key.*",  # a training that ends inside an epoch validates nothing; its last lines say so
    r".*`srun` command is available.*",  # on a login node; what srun has started, the launcher's variables say
    r".*You are using `torch.load` with `weights_only=False`.*",
)


def quiet() -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # what a profiler has measured is asked for
    for message in _EXPECTED:
        warnings.filterwarnings("ignore", message=message)
