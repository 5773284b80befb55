"""Loads the recorder into every Python process of a recorded command, once torch is there; passes on to any other sitecustomize.

The folder of this file is put on PYTHONPATH by `python -m project.record`. Nothing of the project is imported by name, since a
script may lie beside a package of its own that is called `project`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = "LOCKSTEP_RECORD_FOLDER"


def pass_on() -> None:
    """Run the sitecustomize that this one stands before."""
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def load_recorder() -> None:
    """By its file; what goes wrong is left where the command looks for it, and the script goes on."""
    try:
        spec = importlib.util.spec_from_file_location("lockstep_recorder", os.path.join(os.path.dirname(HERE), "attached.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["lockstep_recorder"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.attach()
    except Exception:
        os.makedirs(os.environ[FOLDER], exist_ok=True)
        with open(os.path.join(os.environ[FOLDER], f"error-{os.getpid()}.txt"), "w", encoding="utf-8") as file:
            traceback.print_exc(file=file)


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as it would have been found, and loads the recorder when torch has been loaded."""

    def __init__(self) -> None:
        self.inner: Any = None  # torch's own loader

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self.inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.inner
        self.inner.exec_module(module)
        load_recorder()


if FOLDER in os.environ:
    sys.meta_path.insert(0, AfterTorch())
pass_on()
