"""Classes of ours that are mixed into a model's own class, in place."""

from collections.abc import Callable, Mapping

from torch import nn

_set_type = object.__dict__["__class__"].__set__


def mix_in(model: nn.Module, mixin: type, names: Callable[[type], Mapping[str, object]] = lambda original: {}) -> None:
    """Put `mixin` in front of the model's own class.

    The model's ``__class__`` stays its own: pickle then writes nothing of ours into files, and code that asks a model for its class, or gives it another one
    (parametrizations do), keeps working. Its type is what has the mixin.

    Args:
        names: further attributes of the type, by the model's own class.
    """

    def become(model: nn.Module, original: type) -> None:
        own = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__class__": property(lambda self: own_class(type(self), mixin), become)}
        _set_type(model, type(original.__name__, (mixin, original), own | dict(names(original))))

    become(model, type(model))


def own_class(cls: type, mixin: type) -> type[nn.Module]:
    """The class that `mixin` was mixed into."""
    return cls.__mro__[cls.__mro__.index(mixin) + 1]
