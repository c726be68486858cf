"""GraphAcc compiles the training of PyTorch models for many devices."""

import os as _os

__version__ = "0.1.0"

# In a source tree that is not installed, `passes/` stands beside this folder; an install puts it inside.
_here = _os.path.dirname(_os.path.abspath(__file__))
_root = _os.path.dirname(_here)
if not _os.path.isdir(_os.path.join(_here, "passes")) and _os.path.isfile(_os.path.join(_root, "passes", "__init__.py")):
    __path__.append(_root)
