"""Optimizers that run on the host.

``CPUAdam`` is the host optimizer of ZeRO-Offload (arXiv 2101.06840, section 4): fp32 master parameters and moments in host
memory, all updated in one pass over memory by the SIMD kernels of `csrc/` on all cores, with bf16 gradients in and a
bf16 copy of the new parameters out in that same pass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from graphacc.kernels import adam, library

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTS_AMSGRAD = (*_MOMENTS, "max_exp_avg_sq")
_FP32 = (torch.float32,)
FP32_OR_BF16 = (torch.float32, torch.bfloat16)


class CPUAdam(torch.optim.Adam):
    """AdamW on the host: a drop-in for ``torch.optim.AdamW`` over fp32 CPU parameters.

    Constructor arguments, parameter groups, schedulers and ``state_dict`` are those of ``torch.optim.AdamW``; state dicts
    load in both directions. Results are those of ``AdamW(fused=True)`` up to rounding. They do not depend on the CPU's
    instruction set, nor on the number of threads, which is ``torch.get_num_threads()``.

    Args:
        params: dense fp32 CPU parameters, or groups of them.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``.
        adamw_mode: decoupled weight decay (AdamW); False adds ``weight_decay * parameter`` to the gradient (Adam).

    Raises:
        TypeError: a parameter that is not dense fp32 on the CPU.
        NativeLibraryError: the native library is missing.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        adamw_mode: bool = True,
    ):
        library.default_isa()
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=adamw_mode)

    def __setstate__(self, state: dict) -> None:
        """As in ``torch.optim.AdamW``, a loaded state does not change the kind of weight decay."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = self.defaults["decoupled_weight_decay"]

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            for i, param in enumerate(self.param_groups[-1]["params"]):
                _require(f"parameter {i} of group {number}", param, param, _FP32)
        except TypeError:
            del self.param_groups[-1]
            raise

    @staticmethod
    def functional_equivalent() -> type[torch.optim.Optimizer]:
        """The optimizer that a captured step runs instead, on the devices: the groups say which weight decay."""
        return torch.optim.Adam

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        grads: Mapping[Tensor, Tensor] | None = None,
        copies: Mapping[Tensor, Tensor] | None = None,
    ) -> Tensor | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
            grads: parameter -> the fp32 or bf16 gradient that is used in place of ``parameter.grad``.
            copies: parameter -> an fp32 or bf16 tensor of its shape that holds the parameter's value after the step,
                rounded to nearest even.

        Returns:
            What `closure` returned.

        Raises:
            TypeError, ValueError: a tensor of the wrong dtype, device, layout or shape, or an entry of `grads` or `copies`
                for what is not a parameter of this optimizer. No parameter has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = list(self._updates(grads or {}, copies or {}))
        with_gradient = [update for update in updates if update.grad is not None]
        _run(with_gradient, [_kernel_group(group) for group in self.param_groups])
        for update in updates:
            if update.grad is None and update.copy is not None:
                update.copy.copy_(update.param)
        return loss

    def _updates(self, grads: Mapping[Tensor, Tensor], copies: Mapping[Tensor, Tensor]) -> Iterator["_Update"]:
        """One checked `_Update` per parameter, its state initialised if it has a gradient."""
        params = {param for group in self.param_groups for param in group["params"]}
        for name, tensors in (("grads", grads), ("copies", copies)):
            for key in tensors:
                if key not in params:
                    raise ValueError(f"step({name}=...): a key of shape {tuple(key.shape)} is not a parameter of this optimizer")
        for number, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                where = f"parameter {i} of group {number}"
                _require(where, param, param, _FP32)
                grad = grads.get(param, param.grad)
                state = {} if grad is None else self._state_of(where, param, group["amsgrad"])
                update = _Update(where, number, param, grad, copies.get(param), state)
                update.check()
                yield update

    def _state_of(self, where: str, param: Tensor, amsgrad: bool) -> dict[str, Tensor]:
        names = ("step", *(_MOMENTS_AMSGRAD if amsgrad else _MOMENTS))
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state.update({name: adam.huge_zeros_like(param) for name in names[1:]})
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"CPUAdam: the state of {where} has no {missing}. It was begun with other settings (amsgrad={amsgrad} now); "
                "load a state dict of the same settings, or start with an empty state."
            )
        return {name: state[name] for name in names}


@dataclass
class _Update:
    """What one parameter's update reads and writes."""

    where: str
    """For messages: which parameter."""
    group: int
    param: Tensor
    grad: Tensor | None
    copy: Tensor | None
    state: dict[str, Tensor]
    """`step` and the moments; empty without a gradient."""

    @property
    def moments(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state.items() if name != "step"}

    def check(self) -> None:
        for name, tensor in self.moments.items():
            _require(f"{self.where}: state {name}", tensor, self.param, _FP32)
        if self.grad is not None:
            _require(f"{self.where}: gradient", self.grad, self.param, FP32_OR_BF16)
        if self.copy is not None:
            _require(f"{self.where}: copy", self.copy, self.param, FP32_OR_BF16)
            if self.copy.data_ptr() == self.param.data_ptr() and self.param.numel():
                raise ValueError(f"{self.where}: its copy is the parameter itself; give a tensor with memory of its own")

    def kernel_tensor(self, staging: "_Staging") -> adam.AdamTensor:
        order = _memory_order(self.param)
        address = {name: staging.written(tensor, order) for name, tensor in self.moments.items()}
        return adam.AdamTensor(
            param=staging.written(self.param, order),
            **address,
            grad=staging.read(self.grad, order),
            copy=None if self.copy is None else staging.written(self.copy, order),
            numel=self.param.numel(),
            step=int(self.state["step"]) + 1,
            group=self.group,
            grad_dtype=adam.DTYPES[self.grad.dtype],
            copy_dtype=adam.DTYPES[None if self.copy is None else self.copy.dtype],
        )


class _Staging:
    """Gives the kernel addresses of arrays in the memory order that it is asked for, through dense copies where needed."""

    def __init__(self):
        self._alive: list[Tensor] = []
        self._results: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor, order: tuple[int, ...] | None) -> int:
        return self._dense(tensor, order).data_ptr()

    def written(self, tensor: Tensor, order: tuple[int, ...] | None) -> int:
        dense = self._dense(tensor, order)
        if dense is not tensor:
            self._results.append((tensor, dense))
        return dense.data_ptr()

    def write_back(self) -> None:
        for tensor, dense in self._results:
            tensor.copy_(dense)

    def _dense(self, tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
        ordered = tensor.is_contiguous() if order is None else tensor.stride() == order
        if ordered and not tensor.is_neg():
            return tensor
        if order is None:
            dense = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        else:
            dense = torch.empty_strided(tensor.shape, order, dtype=tensor.dtype)
        self._alive.append(dense.copy_(tensor))
        return dense


def _run(updates: list[_Update], groups: list[adam.AdamGroup]) -> None:
    staging = _Staging()
    tensors = [update.kernel_tensor(staging) for update in updates]
    adam.adam_step(tensors, groups, threads=torch.get_num_threads())
    staging.write_back()
    for update in updates:
        update.state["step"] += 1
        for tensor in (update.param, update.copy, *update.moments.values()):
            if tensor is not None:
                increment_version(tensor)  # so that autograd notices, as with torch's own in-place operators


def _kernel_group(group: dict) -> adam.AdamGroup:
    beta1, beta2 = group["betas"]
    return adam.AdamGroup(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
    )


def _memory_order(param: Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor with the parameter's order of dimensions; None for the contiguous order."""
    if param.is_contiguous():
        return None
    return torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()


def _require(where: str, tensor: Tensor, param: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """TypeError or ValueError unless `tensor` is a strided CPU tensor of one of `dtypes` and of the parameter's shape."""
    allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in dtypes:
        raise TypeError(
            f"CPUAdam: {where} has dtype {tensor.dtype}, device {tensor.device}, layout {tensor.layout}; it must be a dense "
            f"{allowed} tensor on the CPU. Keep fp32 master parameters on the host, and pass bf16 gradients and copies to "
            "step(grads=..., copies=...)."
        )
    if tensor.shape != param.shape:
        raise ValueError(
            f"CPUAdam: {where} has shape {tuple(tensor.shape)}, the parameter has {tuple(param.shape)}; they must be equal"
        )
