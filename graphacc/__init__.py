"""GraphAcc compiles the training of PyTorch models for many devices."""

import importlib as _importlib
import os as _os
import typing as _typing

__version__ = "0.1.0"

# In a source tree that is not installed, `passes/` stands beside this folder; an install puts it inside.
_here = _os.path.dirname(_os.path.abspath(__file__))
_root = _os.path.dirname(_here)
if not _os.path.isdir(_os.path.join(_here, "passes")) and _os.path.isfile(_os.path.join(_root, "passes", "__init__.py")):
    __path__.append(_root)

_PUBLIC = {
    "compile": "graphacc.api",
    "train_step": "graphacc.api",
    "save_checkpoint": "graphacc.checkpoints",
    "load_checkpoint": "graphacc.checkpoints",
    "Strategy": "graphacc.strategy",
    "GraphAccError": "graphacc.errors",
    "CaptureError": "graphacc.errors",
    "CheckpointError": "graphacc.errors",
    "GraphError": "graphacc.errors",
    "LoopError": "graphacc.errors",
    "LoweringError": "graphacc.errors",
    "NonFiniteLossError": "graphacc.errors",
    "StrategyError": "graphacc.errors",
}
"""The public list: name -> module. Modules are loaded when a name is first used, so importing graphacc is cheap."""

__all__ = ["__version__", *_PUBLIC]

if _typing.TYPE_CHECKING:
    from graphacc.api import compile, train_step
    from graphacc.checkpoints import load_checkpoint, save_checkpoint
    from graphacc.errors import (
        CaptureError,
        CheckpointError,
        GraphAccError,
        GraphError,
        LoopError,
        LoweringError,
        NonFiniteLossError,
        StrategyError,
    )
    from graphacc.strategy import Strategy


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'graphacc' has no attribute {name!r}")
    return getattr(_importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
