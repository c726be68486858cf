"""A captured graph of one length becomes one of every length up to it: what lies beyond the real length is kept from all results."""

from graphacc.passes.lengths import rules_attention, rules_index, rules_move, rules_reduce  # noqa: F401  (they register their rules)
from graphacc.passes.lengths.compare import Affine, LengthRefused, affine, varying
from graphacc.passes.lengths.layout import Length
from graphacc.passes.lengths.mask import Masked, length_input, mask_lengths

__all__ = ["Affine", "Length", "LengthRefused", "Masked", "affine", "length_input", "mask_lengths", "varying"]
