"""Trains a small model without one private API after the other; run by test_probes.py, in a process of its own.

    python without_apis.py CACHE_DIR API...

Every API is taken away in a fork of a process that has imported torch and JAX, before graphacc is imported: a module that has it is replaced by
one that does not, for whoever imports it from then on, while torch and JAX themselves go on with theirs. What belongs to a class of C++ cannot be
taken away: it is not found by probes. One line of JSON per API: what the run logged, and the largest differences from plain PyTorch.
"""

import copy
import importlib
import json
import logging
import os
import sys
import traceback
import types

import jax  # noqa: F401
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Without(types.ModuleType):
    """A module as it would be without one of its names."""

    def __init__(self, module: types.ModuleType, name: str):
        super().__init__(module.__name__)
        public = getattr(module, "__all__", [other for other in dir(module) if not other.startswith("_")])
        vars(self).update(_module=module, _name=name, __path__=getattr(module, "__path__", []), __all__=[other for other in public if other != name])

    def __getattr__(self, name: str):
        module, absent = vars(self)["_module"], vars(self)["_name"]
        if name == absent:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return getattr(module, name)

    def __setattr__(self, name: str, value: object):
        setattr(vars(self)["_module"], name, value)

    def __delattr__(self, name: str):
        delattr(vars(self)["_module"], name)


def take_away(api: str) -> None:
    path, _, name = api.partition(":")
    if "." in name:
        from graphacc._compat import probes

        is_there = probes._is_there
        probes._is_there = lambda asked: asked != api and is_there(asked)
        return
    replaced = Without(importlib.import_module(path), name)
    parent, _, last = path.rpartition(".")
    sys.modules[path] = replaced
    if parent:
        setattr(sys.modules[parent], last, replaced)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.project, self.head = nn.Embedding(16, 8), nn.Linear(8, 24, bias=False), nn.Linear(8, 16)

    def block(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 1, 8)).movedim(-3, 0).transpose(2, 3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(x + checkpoint(self.block, x, use_reentrant=False))


def losses(model: nn.Module) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.05), []
    tokens = torch.arange(32).view(4, 8) % 13
    for _ in range(3):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_without(api: str, cache_dir: str) -> dict:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("graphacc").addHandler(handler)
    torch.manual_seed(0)
    plain = Model()
    compiled = copy.deepcopy(plain)
    expected = losses(plain)
    if api:
        take_away(api)
    import graphacc
    from graphacc._compat import probes

    got = losses(graphacc.compile(compiled, strategy="fsdp=2", cache_dir=cache_dir, fast_compile=True))
    for feature in probes.FEATURES.values():
        if api in feature.apis:
            assert not probes.has(feature), api  # says so, where the loop has not asked for it
    trained, wanted = compiled.state_dict(), plain.state_dict()
    errors = {
        "losses": max(abs(a - b) for a, b in zip(got, expected, strict=True)),
        "parameters": max(((trained[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted),
    }
    return errors | {"by_pytorch": [str(what) for what in compiled._graphacc_engine.by_pytorch.counts], "lines": lines}


def main() -> None:
    cache_dir, *apis = sys.argv[1:]
    for api in apis:
        sys.stdout.flush()
        if os.fork() == 0:
            try:
                found = train_without(api, cache_dir)
            except BaseException:
                found = {"failed": traceback.format_exc()[-1500:]}
            print(json.dumps({"api": api} | found), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
