"""A model on torch_xla's own runtime: ``graphacc.compile(model, capture="torch_xla")``.

For models whose code follows the values of tensors, which no fixed program can. torch_xla records operators, and runs what it has recorded
wherever a value is asked for, and after every ``optimizer.step()``. It is one device; numbers, random ones too, are torch_xla's own.
The parameters are the same objects as before, now on the device ``xla``: ties and optimizers hold on to them.
"""

import copy
import functools
import weakref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from graphacc.capture.borrow import distinct_buffers, distinct_parameters
from graphacc.capture.lazy import xla
from graphacc.errors import StrategyError
from graphacc.loop.mixed import Mixin, mix_in, own_class
from graphacc.runtime.distributed import process_count
from graphacc.strategy import Strategy

_EXPLANATION = (
    'capture="torch_xla": the model runs on torch_xla\'s own runtime, on one device; GraphAcc compiles no program and plans no memory for it'
)


_results: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> weak references to what its last call returned


class OnTorchXla(Mixin):
    """Mixed into a model's class: its calls take tensors of the host, ``state_dict()`` gives them.

    What a call returns stays on the device: a tensor that meets it outside of the model has to be there too, ``labels.to(logits.device)``.
    """

    def __call__(self, *args, **kwargs):
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to(xla.runtime_device()), (args, kwargs))
        result = super().__call__(*args, **kwargs)
        _results[self] = [weakref.ref(x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return result

    def explain(self) -> str:
        """What runs the model, as text."""
        return _EXPLANATION

    def __deepcopy__(self, memo):
        """An ordinary copy on the host with the current values."""
        original = own_class(type(self), OnTorchXla)
        copied = original.__new__(original)
        memo[id(self)] = copied
        memo |= {id(item.tensor): _on(torch.device("cpu"), item.tensor) for item in (*distinct_parameters(self), *distinct_buffers(self))}
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for key in [key for key, hook in copied._state_dict_hooks.items() if hook is _to_host]:
            del copied._state_dict_hooks[key]
        return copied

    def __reduce_ex__(self, protocol):
        return copy.deepcopy(self).__reduce_ex__(protocol)


def run_on_torch_xla(model: nn.Module, strategy: Strategy, *, seed: int) -> nn.Module:
    """Move a model to torch_xla's device, in place.

    Args:
        strategy: of one device.
        seed: of torch_xla's random numbers.

    Raises:
        StrategyError: the strategy asks for what this runtime is not used for.
        CaptureError: torch_xla is missing.
    """
    if strategy != Strategy() or process_count() > 1:
        raise StrategyError(
            f'capture="torch_xla" runs a model as it is written, on one device of one process, and cannot follow {strategy} in '
            f'{process_count()} process(es): leave strategy, precision and devices out, or choose capture="lazy"'
        )
    device = xla.runtime_device()
    _check_backward(device)
    xla.set_seed(seed)
    for item in (*distinct_parameters(model), *distinct_buffers(model)):
        torch.utils.swap_tensors(item.tensor, _on(device, item.tensor))
    mix_in(model, OnTorchXla)
    model._register_state_dict_hook(_to_host)
    _install_hook()
    return model


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy of a parameter or buffer."""
    moved = tensor.detach().to(device, copy=True)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _check_backward(device: torch.device) -> None:
    """Let backward work: autograd made its threads, one per kind of device known then, at the first backward of the process.

    If that was before torch_xla was loaded, backward runs in the thread that calls it from now on.
    """
    try:
        torch.ones((), device=device, requires_grad=True).mul(1.0).backward()
    except RuntimeError:
        torch.autograd.set_multithreading_enabled(False)
        torch.ones((), device=device, requires_grad=True).mul(1.0).backward()


def _to_host(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    host = {id(value): value.cpu() for value in state.values() if isinstance(value, Tensor)}
    state.update({name: host.get(id(value), value) for name, value in state.items()})


@functools.cache
def _install_hook() -> None:
    """Run what was recorded after every step of an optimizer that holds tensors of this device."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Run the update, with the results of the last call that are still held, so that reading them computes nothing again."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(parameter.device.type == xla.DEVICE for parameter in parameters):
        return
    held = [result for results in _results.values() for reference in results if (result := reference()) is not None]
    buffers = [buffer for model in _results for buffer in model.buffers()]
    state = pytree.tree_leaves([*optimizer.state.values()])
    changed = {id(x): x for x in (*parameters, *buffers, *state, *held) if isinstance(x, Tensor) and x.device.type == xla.DEVICE}
    xla.run_recorded(list(changed.values()))
