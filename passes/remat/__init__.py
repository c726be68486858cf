"""Rematerialisation: backward computes again what would otherwise be kept from the forward."""

from graphacc.passes.remat.attach import RematReport, needs_remat, remat_pass
from graphacc.passes.remat.recompute import recompute, verify_recomputed
from graphacc.passes.remat.regions import find_regions
from graphacc.passes.remat.variants import VARIANTS

__all__ = ["VARIANTS", "RematReport", "find_regions", "needs_remat", "recompute", "remat_pass", "verify_recomputed"]
