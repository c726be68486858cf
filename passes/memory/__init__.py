"""Memory planning: operator order and static addresses. Knows nothing of torch or XLA."""
