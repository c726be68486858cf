"""torch's own database of operators and of sample inputs for them."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's testing module warns where hypothesis is not installed
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

__all__ = ["op_db"]

# For every sample torch looks through the stack for the unittest.TestCase that asks, which took a quarter of the time; we have none.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None
