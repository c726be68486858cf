"""Classes of ours that are mixed into a model's own class, in place."""

import abc
import weakref
from collections.abc import Callable, Mapping

from torch import nn

_types: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
"""(mixin, class) -> the type that has both: models of one class stay of one type, as `torch.func.stack_module_state` wants them."""
_set_type = object.__dict__["__class__"].__set__


class Mixin(nn.Module):
    """What is mixed in. The type that it makes is none that the user's code has defined: its ``__init_subclass__`` and metaclass do not hear of it."""

    def __init_subclass__(cls, **options):
        if "_graphacc_mixed" not in vars(cls):
            super().__init_subclass__(**options)


def mix_in(model: nn.Module, mixin: type, names: Callable[[type], Mapping[str, object]] = lambda original: {}) -> None:
    """Put `mixin` in front of the model's own class.

    The model's ``__class__`` stays its own: pickle then writes nothing of ours into files, and code that asks a model for its class, or gives it another one
    (parametrizations do), keeps working. Its type is what has the mixin.

    Args:
        mixin: a subclass of `Mixin`.
        names: further attributes of the type, by the model's own class.
    """

    def become(model: nn.Module, original: type) -> None:
        further = names(original)
        known = None if further else _types.get((mixin, original))
        if known is not None:
            _set_type(model, known)
            return
        own = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__class__": property(lambda self: own_class(type(self), mixin), become)}
        own |= {**further, "_graphacc_mixed": True}
        try:
            _set_type(model, _made(type(original), original.__name__, (mixin, original), own))
        except TypeError:  # where another base than nn.Module comes first (ABC, Generic), objects are laid out otherwise
            _set_type(model, _made(_putting_first(mixin, type(original)), original.__name__, (original,), own))
        _types[mixin, original] = type(model)

    become(model, type(model))


def _made(metaclass: type, name: str, bases: tuple[type, ...], attributes: dict) -> type:
    """A class, without the code of a metaclass of the user's."""
    maker = abc.ABCMeta if issubclass(metaclass, abc.ABCMeta) else type
    return maker.__new__(metaclass, name, bases, attributes)


def _putting_first(mixin: type, metaclass: type) -> type:
    """A metaclass whose classes have the mixin in front of their bases, and the layout of these."""

    def mro(cls) -> list[type]:
        found = type.mro(cls)
        return found if mixin in found else [found[0], *(base for base in mixin.__mro__ if base not in found), *found[1:]]

    return type(metaclass.__name__, (metaclass,), {"mro": mro})


def own_class(cls: type, mixin: type) -> type[nn.Module]:
    """The class that `mixin` was mixed into."""
    mro = cls.__mro__[cls.__mro__.index(mixin) + 1 :]
    return next(base for base in mro if base is not Mixin)
