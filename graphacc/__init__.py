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
    "verify": "graphacc.api",
    "StepLogger": "graphacc.loop.step_logger",
    "StepMetrics": "graphacc.loop.step_logger",
    "plan": "graphacc.search.model",
    "Plan": "graphacc.search",
    "Hardware": "graphacc.costs.hardware",
    "mark_sharding": "graphacc.api",
    "save_checkpoint": "graphacc.checkpoints",
    "load_checkpoint": "graphacc.checkpoints",
    "load_safetensors": "graphacc.checkpoints",
    "flash_attention": "graphacc.ops.flash_attention",
    "P": "graphacc.strategy.annotations",
    "Strategy": "graphacc.strategy",
    "GraphAccError": "graphacc.errors",
    "BatchIndexError": "graphacc.errors",
    "BatchValueError": "graphacc.errors",
    "CaptureError": "graphacc.errors",
    "CheckpointError": "graphacc.errors",
    "DistributedError": "graphacc.errors",
    "GraphError": "graphacc.errors",
    "LoopError": "graphacc.errors",
    "LoweringError": "graphacc.errors",
    "NonFiniteLossError": "graphacc.errors",
    "StrategyError": "graphacc.errors",
    "VerificationError": "graphacc.errors",
}
"""The public list: name -> module. Modules are loaded when a name is first used, so importing graphacc is cheap."""

_MODULES = ("distributed", "report")
"""Public modules, loaded alike."""

__all__ = ["__version__", *_MODULES, *_PUBLIC]

if _typing.TYPE_CHECKING:
    from graphacc import distributed, report
    from graphacc.api import compile, mark_sharding, train_step, verify
    from graphacc.checkpoints import load_checkpoint, load_safetensors, save_checkpoint
    from graphacc.costs.hardware import Hardware
    from graphacc.errors import (
        BatchIndexError,
        BatchValueError,
        CaptureError,
        CheckpointError,
        DistributedError,
        GraphAccError,
        GraphError,
        LoopError,
        LoweringError,
        NonFiniteLossError,
        StrategyError,
        VerificationError,
    )
    from graphacc.loop.step_logger import StepLogger, StepMetrics
    from graphacc.ops.flash_attention import flash_attention
    from graphacc.search import Plan
    from graphacc.search.model import plan
    from graphacc.strategy import Strategy
    from graphacc.strategy.annotations import P


def __getattr__(name: str):
    if name not in _PUBLIC and name not in _MODULES:
        raise AttributeError(f"module 'graphacc' has no attribute {name!r}")
    from graphacc._compat.random_state import kept_random_state
    from graphacc.collector import paused

    try:
        with kept_random_state(), paused():  # a third of the seconds that importing takes beside torch and transformers
            module = _importlib.import_module(_PUBLIC.get(name, f"graphacc.{name}"))
    except ImportError as error:
        from graphacc._compat.probes import why_not_at_all
        from graphacc.errors import GraphAccError

        if why := why_not_at_all():
            raise GraphAccError(why) from error
        raise
    return getattr(module, name) if name in _PUBLIC else module


def __dir__() -> list[str]:
    return __all__
