"""Operators of the ``graphacc`` namespace that a StepGraph may hold besides ATen's, each with a real CPU implementation."""

from graphacc.ops import attention, chunked, ctc, experts, flash_attention, host, mesh, quantize, random, recurrence  # noqa: F401  (registers the operators)
