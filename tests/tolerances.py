"""The one table of tolerances: the largest error that a test accepts, per dtype, relative to the tensor's largest value."""

import torch

RELATIVE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.complex64: 2e-5}
PARAMETERS_AFTER_STEPS = 1e-4
LOSS = 1e-5


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """max |got - expected| / max |expected|; NaN and infinity must stand at the same places."""
    got, expected = got.detach().cpu(), expected.detach().cpu()
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    got, expected = got.to(wide), expected.to(wide)
    finite = torch.isfinite(expected)
    same = torch.where(finite, torch.isfinite(got), (got == expected) | (got.isnan() & expected.isnan()))
    if not bool(same.all()):
        return float("inf")
    scale = expected[finite].abs().max().item() if finite.any() else 0.0
    difference = (got - expected)[finite].abs().max().item() if finite.any() else 0.0
    return difference / scale if scale else difference


def assert_close(got: torch.Tensor, expected: torch.Tensor, *, tolerance: float | None = None, what: str = "tensor") -> None:
    """Assert equal dtype and shape, and a relative error within the table (exact for integers and booleans)."""
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    limit = RELATIVE.get(expected.dtype, 0.0) if tolerance is None else tolerance
    error = relative_error(got, expected)
    assert error <= limit, f"{what}: relative error {error:.3g} is above {limit:.3g}"
