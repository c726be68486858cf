"""A captured graph of one length becomes one of every length up to it: what lies beyond the real length is kept from all results."""

from graphacc.passes.lengths.compare import Affine, LengthRefused, affine, varying
from graphacc.passes.lengths.layout import Length
from graphacc.passes.lengths.mask import Masked, length_input, mask_lengths
from graphacc.passes.lengths import rules  # noqa: F401  (registers them)

__all__ = ["Affine", "Length", "LengthRefused", "Masked", "affine", "length_input", "mask_lengths", "varying"]
