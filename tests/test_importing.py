"""Importing our modules changes nothing for the program that does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

# What a program has for itself, seen before and after. Others' modules are imported first: what these do is theirs.
LOOK = """
import atexit, faulthandler, gc, importlib, locale, logging, multiprocessing, os, random, signal, sys, threading, warnings
from importlib import import_module
others, ours = {others}, {ours}
for name in others:
    import_module(name)
import matplotlib, numpy, torch
from PIL import Image, ImageFile


def seen():
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in theirs)]
    backends = torch.backends
    return {{
        "atexit": atexit._ncallbacks(),
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "environment": dict(os.environ),
        "loggers": [(logger.name, logger.level, logger.disabled, list(logger.handlers)) for logger in loggers],
        "threads": threading.active_count(),
        "children": multiprocessing.active_children(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "hooks": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace(), sys.getprofile()],
        "python": [sys.getswitchinterval(), sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(),
                   faulthandler.is_enabled(), sys.path[:], os.getcwd(), locale.setlocale(locale.LC_ALL), gc.callbacks[:]],
        "random": [random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(), torch.get_default_device(),
                  torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
                  backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32,
                  backends.cuda.matmul.allow_tf32, torch.multiprocessing.get_sharing_strategy(),
                  str(torch._tensor_str.PRINT_OPTS),
                  torch.distributed.is_initialized(), torch.is_anomaly_enabled()],
        "numpy": [numpy.geterr(), numpy.get_printoptions()],
        "matplotlib": [dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)],
        "Pillow": [Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES],
    }}


theirs = [name for name in logging.root.manager.loggerDict if not name.startswith("project")]
before = seen()
for name in ours:
    import_module(name)
after = seen()
for what, value in before.items():
    assert after[what] == value, (what, value, after[what])
"""


def imported(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself, but for ours."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] not in ("project", "__future__")}


@pytest.mark.slow
def test_importing_every_module_changes_nothing_in_the_process() -> None:
    files = sorted((REPOSITORY / "project").rglob("*.py"))
    ours = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in files]
    others = sorted(set().union(*map(imported, files)))
    assert len(ours) > 100
    script = LOOK.format(others=others, ours=ours)
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
