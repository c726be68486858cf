"""Prints what importing torch_xla for lazy capture changes in the process, one name a line; run by test_lazy_capture.py."""

import logging
import sys
import warnings

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed
import torch.nn.utils.parametrize
import torch.optim

from graphacc.capture.lazy.xla import library

_GROWS = ("torch.compiler._cache",)  # its class gets an attribute of every module of torch's that registers artifacts


def state() -> dict[tuple[str, str], object]:
    """Every attribute of torch's modules and of the classes in them, and some settings."""
    found: dict[tuple[str, str], object] = {}
    for module, names in [(name, vars(module)) for name, module in sys.modules.items() if name.partition(".")[0] == "torch" and name not in _GROWS]:
        for name, value in list(names.items()):
            found[module, name] = value
            if isinstance(value, type) and value.__module__ == module:
                found |= {(module, f"{name}.{attribute}"): member for attribute, member in vars(value).items()}
    for config in (torch._dynamo.config, torch._functorch.config):
        found |= {(config.__name__, name): value for name, value in config.get_config_copy().items()}
    return found | {
        ("logging", "handlers"): tuple(logging.root.handlers),
        ("logging", "level"): logging.root.level,
        ("warnings", "filters"): tuple(warnings.filters),
        ("torch", "default dtype"): torch.get_default_dtype(),
        ("torch", "seed"): torch.initial_seed(),
    }


def differ(a: object, b: object) -> bool:
    return a is not b and not (isinstance(a, (bool, int, float, str, tuple, list, dict, set, torch.dtype, type(None))) and a == b)


before = state()
library()
after = state()
for place, value in before.items():
    if place not in after or differ(after[place], value):
        print(*place)
