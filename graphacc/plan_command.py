"""The command `graphacc plan`."""

import argparse
import importlib.util
import pathlib
import sys

from graphacc.errors import StrategyError
from graphacc.report.plan_page import save_page
from graphacc.search.model import search_and_plan


def add_command(commands) -> None:
    """Add `plan` to the parser of `graphacc`."""
    parser = commands.add_parser(
        "plan",
        help="search the strategy for a model, with or without the hardware",
        description="Searches the fastest strategy that fits into the memory, without running the model. SCRIPT:FUNCTION names a function "
        "without arguments that returns (model, batch) or (model, batch, optimizer): the model and the batch may be on the meta device, the batch "
        "is a dict of keyword arguments or a tuple, the optimizer an optimizer or a function that makes one from the parameters. "
        "The status is 0, or 2 if no strategy fits.",
    )
    parser.add_argument("setup", metavar="SCRIPT:FUNCTION")
    parser.add_argument("--hardware", metavar="NAME", help='"16x8xH100" (hosts x chips), "8xH100", "cpu:8", or a file that `graphacc calibrate` wrote; default: what is here')
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a device that a step may use; default: what the hardware has")
    parser.add_argument("--pin", action="append", default=[], metavar="FIELD=VALUE", help="a field of the strategy that must have this value; may be given again")
    parser.add_argument("--strategy", metavar="TEXT", help="evaluate this strategy, and search nothing")
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--output", metavar="FILE", help="write the plan, which graphacc.compile(strategy=FILE) replays; the name ends in .json")
    parser.add_argument("--check", choices=("xla",), help="compile the plan for this hardware, without it if need be, and print memory and collectives beside the predicted ones")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.output is not None and not options.output.endswith(".json"):
        raise StrategyError(f"--output {options.output}: graphacc.compile knows a plan by its name, which ends in .json")
    setup = _function(options.setup)
    made = setup()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise StrategyError(f"{options.setup} returned {type(made).__name__}: return (model, batch) or (model, batch, optimizer)")
    strategy = options.strategy if options.strategy is not None else ",".join(["auto", *options.pin])
    if options.strategy is not None and options.pin:
        raise StrategyError(f"--pin {options.pin[0]} beside --strategy {options.strategy}: a whole strategy is evaluated as it is; give one of them")
    search, found = search_and_plan(*made, hardware=options.hardware, strategy=strategy, memory_gib=options.memory, precision=options.precision)
    print(found)
    if options.html is not None:
        save_page(found, options.html)
    if options.check is not None:
        from graphacc.report.plan_check import check_plan  # loads JAX

        print(check_plan(search, found))
    if options.output is not None:
        found.save(options.output)
    return 0


def _function(name: str):
    path, colon, function = name.rpartition(":")
    if not colon or not pathlib.Path(path).is_file():
        raise StrategyError(f"{name}: write SCRIPT:FUNCTION with the path of a Python file, such as train.py:setup")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))  # as when the script is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found = getattr(module, function, None)
    if not callable(found):
        raise StrategyError(f"{path} has no function {function!r}: it has {', '.join(name for name, value in vars(module).items() if callable(value) and not name.startswith('_')) or 'none'}")
    return found
