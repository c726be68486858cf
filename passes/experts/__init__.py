"""Routing to experts in a captured graph becomes graphacc's own operators, forward and backward."""

from graphacc.passes.experts.attach import ATTACH_EXPERTS, ExpertReport
from graphacc.passes.experts.order import ORDER_ROWS
from graphacc.passes.experts.parallel import check_pins, expert_parallel_pass, find_experts

__all__ = ["ATTACH_EXPERTS", "ORDER_ROWS", "ExpertReport", "check_pins", "expert_parallel_pass", "find_experts"]
