"""Identities of what was recorded, which every step compares and looks up: hashed once, and equal at once where they are the same object."""

from collections.abc import Hashable


class Identity:
    """A nested tuple whose hash is computed once."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable):
        self.value = value
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Identity) and self._hash == other._hash and self.value == other.value)

    def __repr__(self) -> str:
        return repr(self.value)
