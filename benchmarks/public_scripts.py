"""Claim: public training scripts train to PyTorch's numbers with one line added.

Runs each script of `public_recipes.py` twice in processes of its own, as it is and with `model = graphacc.compile(model)` behind the line that makes the model, on
random data of the shapes that it reads (there is no network), and compares every number that the script reads of a tensor and, at the end, every parameter of every
optimizer. Both runs have the same seeds; dropout is off, as its draws are other ones.
"""

import argparse
import builtins
import contextlib
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import time

import torch
from public_recipes import RECIPES, Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clones", help="folder with a clone OWNER+NAME of every repository that the recipes name")
    parser.add_argument("names", nargs="*", help="of recipes, or the beginnings of names; all without")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600, help="at most, for one run")
    parser.add_argument("--double", action="store_true", help="in float64, which tells rounding from a difference")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--logs", help="folder for what the scripts print")
    parser.add_argument("--run", choices=("eager", "graphacc"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_here(args, RECIPES[args.names[0]])
        return
    rows = {}
    for name, recipe in RECIPES.items():
        if args.names and not any(name == wanted or (wanted.endswith("*") and name.startswith(wanted[:-1])) for wanted in args.names):
            continue
        rows[name] = row = compare(args, name, recipe)
        print(f"{name:28} {row['text']}", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(rows, file, indent=1)


def compare(args, name: str, recipe: Recipe) -> dict:
    found = {}
    for kind in ("eager", "graphacc"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, args.clones, name, "--run", kind, "--devices", str(args.devices)] + ["--double"] * args.double
            environment = {**os.environ, "OUT": folder, "OMP_WAIT_POLICY": "PASSIVE", "MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu", "WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"}
            start = time.perf_counter()
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.seconds, check=False)
            except subprocess.TimeoutExpired:
                return {"text": f"{kind}: stopped after {args.seconds:.0f} s"}
            seconds = time.perf_counter() - start
            if args.logs:
                with open(os.path.join(args.logs, f"{name}{'.double' * args.double}.{kind}.log"), "w") as file:
                    file.write(done.stdout + done.stderr)
            if not os.path.exists(os.path.join(folder, "numbers.json")):
                return {"text": f"{kind}: {(done.stderr.strip() or 'nothing').splitlines()[-1][:300]}"}
            with open(os.path.join(folder, "numbers.json")) as file:
                numbers = json.load(file)
            tensors = torch.load(os.path.join(folder, "parameters.pt"), weights_only=True)
            found[kind] = numbers | {"tensors": tensors, "seconds": seconds}
    eager, ours = found["eager"], found["graphacc"]
    losses = [relative(a, b) for a, b in zip(eager["numbers"], ours["numbers"], strict=False)]
    tensors = [difference(a, b) for a, b in zip(eager["tensors"], ours["tensors"], strict=False)]
    row = {
        "numbers": len(losses), "number_difference": max(losses, default=0.0), "tensors": len(tensors), "parameter_difference": max(tensors, default=0.0),
        "steps": ours["steps"], "programs": ours["programs"], "eager_seconds": round(eager["seconds"], 1), "seconds": round(ours["seconds"], 1),
        "error": ours["error"] or eager["error"], "same": len(eager["numbers"]) == len(ours["numbers"]) and eager["steps"] == ours["steps"] and len(eager["tensors"]) == len(ours["tensors"]),
    }  # fmt: skip
    ended = f", ended by {row['error'][:300]}" if row["error"] else ""
    unequal = "" if row["same"] else f" UNEQUAL COUNTS {len(eager['numbers'])} {len(ours['numbers'])} steps {eager['steps']} {ours['steps']}"
    row["text"] = (
        f"{row['number_difference']:.1e} of {row['numbers']} numbers, {row['parameter_difference']:.1e} of {row['tensors']} tensors, {row['steps']} steps,"
        f" {row['programs']}, {row['eager_seconds']} -> {row['seconds']} s{unequal}{ended}"
    )
    return row


def relative(a: float, b: float) -> float:
    if a != a or b != b:
        return 0.0 if (a != a) == (b != b) else float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-3)


def difference(a, b) -> float:
    a, b = a.double(), b.double()
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    return (a - b).abs().nan_to_num(float("inf") if a.isnan().ne(b.isnan()).any() else 0.0).max().item()


def run_here(args, recipe: Recipe) -> None:
    """One run, in this process: the script's numbers and parameters are written to $OUT."""
    out = os.environ["OUT"]
    source = os.path.join(args.clones, recipe.repo)
    folder = os.path.join(out, "clone")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git", "*.jpg", "*.gif"), symlinks=True)
    path = os.path.join(folder, recipe.file)
    if recipe.text:
        with open(path, "w") as file:
            file.write(recipe.text)
    else:
        edit(path, recipe)
    os.chdir(os.path.dirname(path))
    sys.path.insert(0, os.path.dirname(path))
    for extra in recipe.path:
        sys.path.insert(0, os.path.join(args.clones, extra))

    import numpy

    torch.set_num_threads(2)
    if args.double:
        torch.set_default_dtype(torch.float64)
        torch.FloatTensor = torch.DoubleTensor
        torch.Tensor.float = torch.Tensor.double
    watch = Watch()
    synthetic_data(recipe, args.double)
    compiled = []

    def add_the_line(model):
        without_dropout(model)
        if args.double:
            model.double()
        if args.run == "graphacc":
            import graphacc

            model = graphacc.compile(model, devices=args.devices)
            compiled.append(model)
        return model

    builtins.add_the_line = add_the_line
    exec(recipe.before, {"__name__": "before"})
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    sys.argv = [path, *recipe.args]
    error = None
    try:
        runpy.run_path(path, run_name="__main__")
    except (SystemExit, KeyboardInterrupt) as stopped:
        error = None if getattr(stopped, "code", 0) in (None, 0, "enough") else f"SystemExit {stopped.code}"
    except BaseException as raised:
        import traceback

        traceback.print_exc()
        error = f"{type(raised).__name__}: {str(raised)[:300]}"
    programs = {}
    for model in compiled:
        with contextlib.suppress(Exception):
            for line in model.programs:
                programs[line.kind] = programs.get(line.kind, 0) + 1
    tensors, seen = [], set()
    for optimizer in watch.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen and not parameter.is_sparse:
                    seen.add(id(parameter))
                    tensors.append(parameter.detach().clone().cpu())
    with torch.no_grad():
        torch.save(tensors, os.path.join(out, "parameters.pt"))
    numbers = [float(n) for n in watch.numbers]
    with open(os.path.join(out, "numbers.json"), "w") as file:
        json.dump({"numbers": numbers, "steps": watch.steps, "programs": " ".join(f"{k}:{v}" for k, v in sorted(programs.items())), "error": error}, file)


def edit(path: str, recipe: Recipe) -> None:
    with open(path) as file:
        text = file.read()
    for old, new in recipe.edits:
        if old not in text:
            raise SystemExit(f"{path} has no {old!r}")
        text = text.replace(old, new)
    lines = []
    wanted = dict(recipe.adds)
    inside = None
    for line in text.splitlines():
        lines.append(line)
        stripped = line.strip()
        for prefix in list(wanted):
            if stripped.startswith(prefix):
                inside = (line[: len(line) - len(line.lstrip())], wanted.pop(prefix), 0)
        if inside is not None:
            indent, names, depth = inside
            depth += sum(map(line.count, "([{")) - sum(map(line.count, ")]}"))
            inside = (indent, names, depth)
            if depth <= 0:
                lines += [f"{indent}{name} = add_the_line({name})" for name in names.split()]
                inside = None
    if wanted:
        raise SystemExit(f"{path} has no line that starts with {list(wanted)}")
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")


class Watch:
    """What the script reads, and its optimizers."""

    def __init__(self):
        self.numbers, self.optimizers, self.steps = [], [], 0
        item, initialise = torch.Tensor.item, torch.optim.Optimizer.__init__
        numbers, optimizers = self.numbers, self.optimizers

        class Reader:
            def __get__(self, instance, owner=None):
                if instance is None:
                    return item
                return lambda: read(instance)

        def read(tensor):
            value = item(tensor)
            caller = sys._getframe(2)
            while caller.f_code.co_name == "__format__" or caller.f_code.co_filename.endswith(("/loop/promise.py", "/torch/overrides.py")):
                caller = caller.f_back
            if isinstance(value, (int, float)) and not isinstance(value, bool) and caller.f_globals.get("__name__", "").split(".")[0] not in ("torch", "graphacc"):
                numbers.append(value)
            return value

        torch.Tensor.item = Reader()

        def remember(self_, *args, **kwargs):
            initialise(self_, *args, **kwargs)
            optimizers.append(self_)

        torch.optim.Optimizer.__init__ = remember

        def count(optimizer, args, kwargs):
            self.steps += 1

        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(count)


def without_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


def synthetic_data(recipe: Recipe, double: bool) -> None:
    """Random images in the place of what torchvision would download; loaders end after a few batches."""
    limit = recipe.batches
    iterate = torch.utils.data.DataLoader.__iter__

    def some(self):
        self.num_workers = 0
        for number, batch in enumerate(iterate(self)):
            if number == limit:
                return
            if double:
                batch = torch.utils._pytree.tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x, batch)
            yield batch

    torch.utils.data.DataLoader.__iter__ = some
    try:
        import torchvision
    except ImportError:
        return
    import numpy
    from PIL import Image

    def images(shape, size, classes=10):
        class Images(torch.utils.data.Dataset):
            def __init__(self, root=None, train=True, transform=None, target_transform=None, download=False, split="train", **kwargs):
                draw = numpy.random.RandomState(7 if train else 8)
                count = size
                self.data = torch.from_numpy(draw.randint(0, 256, (count, *shape)).astype("uint8"))
                self.targets = torch.from_numpy(numpy.arange(count) % classes)
                self.train_data, self.train_labels, self.test_data, self.test_labels = self.data, self.targets, self.data, self.targets
                self.transform, self.target_transform = transform, target_transform
                self.classes = [str(k) for k in range(classes)]

            def __len__(self):
                return len(self.data)

            def __getitem__(self, index):
                image, label = Image.fromarray(self.data[index].numpy()), int(self.targets[index])
                return self.transform(image) if self.transform else image, self.target_transform(label) if self.target_transform else label

        return Images

    for name in ("MNIST", "FashionMNIST", "EMNIST", "KMNIST"):
        setattr(torchvision.datasets, name, images((28, 28), 400))
    for name in ("CIFAR10", "STL10"):
        setattr(torchvision.datasets, name, images((32, 32, 3), 400))
    torchvision.datasets.CIFAR100 = images((32, 32, 3), 400, 100)
    folder = images((300, 280, 3), 64)
    torchvision.datasets.ImageFolder = lambda root, transform=None, *rest, **options: folder(root, transform=transform)
    import torchvision.datasets.mnist

    torchvision.datasets.mnist.MNIST = torchvision.datasets.MNIST


if __name__ == "__main__":
    main()
