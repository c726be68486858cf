"""The planner core (`graphacc.passes.memory`) behind the two calls that this adapter makes."""

from graphacc.passes.memory.addresses import solve_addresses
from graphacc.passes.memory.order.solve import solve_order
from graphacc.passes.memory.problem import AddressProblem, Problem
from graphacc.runtime.replan.ordering import SequenceOrder
from graphacc.runtime.replan.planner import Solvers


def core_solvers(threads: int) -> Solvers:
    """The core; `threads` is for its address solver, the order is searched by one."""

    def order(problem: Problem, seconds: float, bound_wanted: float) -> SequenceOrder:
        plan = solve_order(problem, seconds=seconds, bound_wanted=bound_wanted)
        return SequenceOrder(order=plan.order, peak=plan.peak, lower_bound=plan.lower_bound)

    def addresses(problem: AddressProblem, seconds: float) -> tuple[int, ...]:
        return solve_addresses(problem, seconds=seconds, threads=threads).offsets

    return Solvers(order=order, addresses=addresses)
