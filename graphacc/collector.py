"""Python's garbage collector, out of the way while graphs and programs are made."""

import contextlib
import gc
from collections.abc import Iterator

MAX_UNSEEN = 1_500_000
_unseen = 0  # objects that were made old since a whole collection of ours


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No automatic collection in the block.

    Graphs and fake tensors are hundreds of thousands of small objects that stay: looking through them again and again takes a tenth to a sixth of a
    capture, and frees next to nothing before it ends. Nor one over them right behind the block: what was made counts as old from then on.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """Hand all objects to the oldest generation, without looking at any (``gc.freeze`` and back); whole collections see them.

    Python's own rule for when one of these is due does not count what is handed over, so one is made after `MAX_UNSEEN` objects.
    """
    global _unseen
    if gc.get_freeze_count():  # the user's own, which `unfreeze` would undo
        return
    _unseen += gc.get_count()[0]
    if _unseen > MAX_UNSEEN:
        gc.collect()
        _unseen = 0
    gc.freeze()
    gc.unfreeze()
