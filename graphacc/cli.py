"""The command `graphacc`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from graphacc.doctor import add_command as add_doctor_command
from graphacc.errors import GraphAccError, PlanError, StrategyError
from graphacc.passes.memory.addresses import solve_addresses
from graphacc.passes.memory.addresses.picture import save_picture
from graphacc.passes.memory.csvfile import read_problem, write_solution
from graphacc.passes.memory.jsonfile import read_order_problem, write_plan
from graphacc.passes.memory.plan import plan as plan_order_and_addresses
from graphacc.passes.memory.problem import AddressPlan, AddressProblem, LiveBuffer, OrderPlan, Status
from graphacc.plan_command import add_command as add_plan_command

EXIT_SOLVED, EXIT_UNSOLVED, EXIT_ERROR = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status: 0 solved, 1 no solution found, 2 wrong input."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (GraphAccError, OSError) as error:
        print(f"graphacc: {error}", file=sys.stderr)
        return EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graphacc", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan-memory",
        help="choose addresses for buffers with known live ranges, or an order and addresses",
        description="Chooses addresses for buffers with known live ranges. FILE is in MiniMalloc's CSV format: "
        "id,lower,upper,size with half-open live ranges; a column offset fixes the buffers where it is not empty. "
        "If FILE ends in .json it is an order problem, and the order of its operators is chosen too: an object with the lists "
        "operators (name, reads, writes, and optionally after, workspace) and buffers (name, size, and optionally is_input, "
        "is_output); reads, writes and after are lists of indices.",
    )
    plan.add_argument("file", metavar="FILE")
    plan.add_argument("--capacity", type=int, metavar="N", help="decide whether N bytes suffice; without it, minimise")
    plan.add_argument("--alignment", type=int, default=1, metavar="N", help="every offset is a multiple of N bytes (default 1)")
    plan.add_argument("--output", metavar="FILE", help="write the solution: the same columns and offset")
    plan.add_argument("--picture", metavar="FILE", help="draw the solution; the name ends in .png or .html")
    plan.add_argument("--seconds", type=float, default=10.0, metavar="S", help="budget (default 10)")
    plan.add_argument("--threads", type=int, default=2, metavar="N", help="searches at the same time (default 2)")
    plan.set_defaults(run=_plan_memory)
    add_plan_command(commands)
    add_doctor_command(commands)
    measure = commands.add_parser(
        "calibrate",
        help="measure this machine's devices, for predictions of time",
        description="Measures products, streams and collectives on the devices that are here, prints what was found beside what the "
        "fitted constants predict, and keeps the constants where Hardware.present() finds them. Takes under a minute; other work on "
        "the devices falsifies it.",
    )
    measure.add_argument("--devices", type=int, metavar="N", help="how many; on a CPU, virtual ones (default: all that JAX shows)")
    measure.add_argument("--output", metavar="FILE", help='write the constants as JSON, which Hardware.parse reads; the name ends in ".json"')
    measure.set_defaults(run=_calibrate)
    return parser


def _calibrate(options: argparse.Namespace) -> int:
    from graphacc.costs.calibrate import calibrate  # loads JAX

    if options.output and not options.output.endswith(".json"):
        raise StrategyError(f'--output {options.output}: the name must end in ".json", by which Hardware.parse knows a file')
    found = calibrate(options.devices)
    hardware, chip = found.hardware, found.hardware.chip
    print(found.table())
    print(
        f"{hardware}: {chip.fp32_flops / 1e9:.4g} GFLOP/s fp32, {chip.bf16_flops / 1e9:.4g} bf16, {chip.memory_bandwidth / 1e9:.4g} GB/s, "
        f"{1e6 * chip.launch_seconds:.3g} us a kernel; 90 % of the times within {100 * hardware.error:.0f} %"
    )
    if found.path:
        print(f"stored in {found.path}")
    if options.output:
        pathlib.Path(options.output).write_text(hardware.to_json(), encoding="utf-8")
    return EXIT_SOLVED


def _plan_memory(options: argparse.Namespace) -> int:
    return _plan_order(options) if options.file.lower().endswith(".json") else _plan_addresses(options)


def _plan_order(options: argparse.Namespace) -> int:
    if options.capacity is not None:
        raise PlanError("--capacity: an order problem is always minimised; leave it out")
    problem = read_order_problem(options.file)
    plan = plan_order_and_addresses(problem, seconds=options.seconds, threads=options.threads, alignment=options.alignment)
    print(f"order: {describe_order(plan.order)}")
    print(f"addresses: {describe(plan.addresses)}")
    print(f"together: lower bound {plan.lower_bound:,}; the limit is {plan.limit}")
    if options.output:
        write_plan(options.output, problem, plan)
    if options.picture:
        ranges = zip(problem.buffers, plan.live_ranges, plan.addresses.offsets, strict=False)  # workspaces have offsets too
        live = [(b, lower, upper, offset) for b, (lower, upper), offset in ranges if b.size and lower < upper]
        buffers = tuple(LiveBuffer(name=b.name, lower=lower, upper=upper, size=b.size) for b, lower, upper, _ in live)
        save_picture(options.picture, AddressProblem(buffers=buffers), {"plan": [offset for *_, offset in live]})
    return EXIT_SOLVED


def _plan_addresses(options: argparse.Namespace) -> int:
    problem = read_problem(options.file, capacity=options.capacity, alignment=options.alignment)
    plan = solve_addresses(problem, seconds=options.seconds, threads=options.threads)
    print(describe(plan))
    if not plan.offsets:
        return EXIT_UNSOLVED
    if options.output:
        write_solution(options.output, problem, plan.offsets)
    if options.picture:
        save_picture(options.picture, problem, {"plan": plan.offsets})
    return EXIT_SOLVED


def describe_order(plan: OrderPlan) -> str:
    """One line that says how the order was found."""
    gap = f", gap {100 * plan.gap:.3f} %" if plan.status is Status.FEASIBLE else ""
    bound = f"lower bound {plan.lower_bound:,} by {plan.bound_source}"
    return f"{plan.status.value}{gap}: peak {plan.peak:,} bytes, {bound}, {plan.seconds:.2f} s"


def describe(plan: AddressPlan) -> str:
    """One line that says how a solve ended."""
    bound = f"lower bound {plan.lower_bound:,} by {plan.bound_source}"
    if not plan.offsets:
        return f"{plan.status.value}: {bound}, {plan.seconds:.2f} s"
    gap = f", gap {100 * plan.gap:.3f} %" if plan.status is Status.FEASIBLE else ""
    return f"{plan.status.value}{gap}: {plan.height:,} bytes, {bound}, {plan.seconds:.2f} s"
