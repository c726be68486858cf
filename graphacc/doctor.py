"""The command `graphacc doctor`: what a report of a defect should say of the machine, without names of hosts and users.

Nothing is changed, and a part that fails says so in its place: it is for machines on which something does not work.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re

import torch

import graphacc
from graphacc._compat.probes import FEATURES, NEEDED, why_off
from graphacc.cache import cache_root
from graphacc.costs.hardware import Hardware, cores, main_memory_bytes
from graphacc.errors import GraphAccError
from graphacc.kernels import library, products

PACKAGES = ("torch", "jax", "jaxlib", "torch_xla", "transformers", "ortools", "numpy", "scipy", "networkx", "safetensors")
PLUGINS = re.compile(r"(jax[-_](cuda|rocm)\w*[-_](plugin|pjrt)|libtpu|nvidia-cudnn-cu\d+)$")
"""Distributions that bring JAX's other backends."""

ON = "on"
_NAMES = re.compile(r"(XLA_|JAX_|GRAPHACC_|PJRT_|LIBTPU_)\w+|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|OMP_WAIT_POLICY|USE_TORCH_XLA")
_HOSTS = re.compile(r"COORDINATOR|ADDR|HOST|STORE|SERVER|ENDPOINT|TOKEN|KEY|SECRET")
_PATH = re.compile(r"(?<![\w.])~?/[^\s,;:=]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was found, as texts."""

    versions: dict[str, str]
    library: str  # of the kernels in C++
    devices: dict[str, str]
    caches: dict[str, str]
    environment: dict[str, str]
    probes: dict[str, str]  # feature that rests on private APIs of torch and JAX -> "on", or what is missing
    off: dict[str, str]  # feature -> why

    def __str__(self) -> str:
        sections = dataclasses.asdict(self)
        sections["library"] = {"libgraphacc_cpu": self.library}
        lines = []
        for title, entries in sections.items():
            width = max(map(len, entries), default=0)
            lines += [title, *(f"  {name:<{width}}  {value}" for name, value in (entries or {"-": "none"}).items())]
        return "\n".join(lines)


def add_command(commands) -> None:
    """Add `doctor` to the parser of `graphacc`."""
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, for reports of defects",
        description="Prints versions, devices, caches with their sizes, environment variables that matter, and which features are off and why. "
        "Paths (but the cache's) and addresses in variables are left out. Starts JAX's backend.",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = examine()
    print(json.dumps(dataclasses.asdict(found), indent=1) if options.json else found)
    return 0


def examine() -> Report:
    """Look at this machine and process."""
    kernels, why_not = _kernels()
    probes = _probes()
    off = _off(why_not) | {title: text for title, text in probes.items() if text != ON}
    return Report(
        versions=_versions(), library=kernels, devices=_devices(), caches=_caches(), environment=_environment(os.environ), probes=probes, off=off
    )


def _probes() -> dict[str, str]:
    return {feature.title: f"{why}: {feature.without or NEEDED}" if (why := why_off(feature)) else ON for feature in FEATURES.values()}


def _versions() -> dict[str, str]:
    plugins = {name for item in importlib.metadata.distributions() if (name := item.metadata["Name"]) and PLUGINS.match(name.lower())}
    found = {"graphacc": graphacc.__version__, "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}"}
    found |= {name: _version(name) for name in (*PACKAGES, *sorted(plugins))}
    return found | {"torch": str(torch.__version__)}  # says for which CUDA it was built


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> tuple[str, str]:
    """The library in a line, and why there is none."""
    try:
        text = f"ABI {library.load().gacc_abi_version()}, kernels for {library.default_isa()} (here are {', '.join(library.available_isas())})"
    except (GraphAccError, OSError, AttributeError) as error:
        why = _without_paths(str(error))
        return f"cannot be used: {why}", why
    return text, ""


def _devices() -> dict[str, str]:
    found = {"cpu": f"{cores()} cores for this process, {main_memory_bytes() / 2**30:.1f} GiB"}
    try:
        import jax

        devices = jax.devices()
    except Exception as error:
        return found | {"jax": f"no backend: {_without_paths(_first_line(error))}"}
    kinds = []
    for kind in dict.fromkeys(device.device_kind for device in devices):
        same = [device for device in devices if device.device_kind == kind]
        limit = (same[0].memory_stats() or {}).get("bytes_limit") if same[0].platform != "cpu" else None
        memory = f", {limit / 2**30:.1f} GiB each" if limit else ""
        kinds.append(f"{len(same)} x {kind} ({same[0].platform}){memory}")
    return found | {"jax": "; ".join(kinds)}


def _caches() -> dict[str, str]:
    root = cache_root()
    found = {"directory": _shortened(root)}
    for name, content in (("xla", "compiled programs"), ("hardware", "calibrations")):
        sizes = [size for path in (root / name).glob("*") if (size := _size(path)) is not None]
        found[name] = f"{len(sizes)} {content}, {sum(sizes) / 1e6:.1f} MB"
    return found


def _size(path: pathlib.Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:  # another process has just removed it
        return None


def _shortened(path: pathlib.Path) -> str:
    """With "~" for the home directory, whose name is a user's."""
    home = os.path.expanduser("~")
    return f"~{str(path)[len(home) :]}" if home != "/" and path.is_relative_to(home) else str(path)


def _environment(environ) -> dict[str, str]:
    """The variables that change what runs; addresses and paths in them are left out."""
    return {name: "<set>" if _HOSTS.search(name) else _without_paths(value) for name, value in sorted(environ.items()) if _NAMES.fullmatch(name)}


def _off(no_kernels: str) -> dict[str, str]:
    """Optional features that this machine or installation does not have."""
    from graphacc.capture.lazy import installed

    found = {}
    if no_kernels:
        found["kernels of our own (attention, Adam, planning)"] = no_kernels
    elif not products.available():
        found["products on XLA's threads by torch's kernels"] = "the installed torch has no stable C shim for them: XLA's products are used"
    if not installed():
        found['capture="lazy", capture="torch_xla"'] = 'torch_xla is not installed: pip install "graphacc[lazy]", with torch 2.9'
    try:
        import jax

        backend = jax.default_backend()
    except Exception as error:
        return found | {"training": f"JAX has no backend: {_without_paths(_first_line(error))}"}
    if backend == "cpu" and torch.cuda.is_available():
        asked = os.environ.get("JAX_PLATFORMS")
        why = f"JAX_PLATFORMS={asked} is set" if asked else 'JAX has no plugin for it: pip install "graphacc[cuda]"'
        found["CUDA"] = f"torch sees {torch.cuda.device_count()} GPU(s), JAX runs on the CPU: {why}"
    if backend == "gpu" and os.environ.get("GRAPHACC_PLAN_CUDA") != "1":
        found["plans of memory for CUDA"] = "of one device; GRAPHACC_PLAN_CUDA=1 asks for those of several"
    elif backend not in ("cpu", "gpu"):
        found["plans of memory"] = f"executables for {backend} are not understood: XLA's own are kept"
    try:
        if not Hardware.present().is_measured:
            found["measured seconds in searches, MFU on a CPU"] = "the devices have not been measured: graphacc calibrate"
    except GraphAccError as error:
        found['strategy="auto", MFU'] = _without_paths(str(error))
    return found


def _without_paths(text: str) -> str:
    """
    Examples:
        >>> _without_paths("--xla_dump_to=/tmp/me --xla_cpu_x=1 a/b ~/c")
        '--xla_dump_to=<path> --xla_cpu_x=1 a/b <path>'
    """
    return _PATH.sub("<path>", text)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
