"""Operators of the ``graphacc`` namespace that a StepGraph may hold besides ATen's, each with a real CPU implementation."""

from graphacc.ops import (  # noqa: F401  (registers the operators)
    attention,
    chunked,
    ctc,
    experts,
    flash_attention,
    host,
    mesh,
    products,
    quantize,
    random,
    recurrence,
)
