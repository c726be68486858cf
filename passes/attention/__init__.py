"""Attention in a captured graph becomes graphacc::flash_attention, forward and backward."""

from graphacc.passes.attention.attach import ATTACH_ATTENTION, AttentionReport

__all__ = ["ATTACH_ATTENTION", "AttentionReport"]
