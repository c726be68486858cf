"""Private or unstable torch APIs, in one place. Tried with torch 2.9.1, 2.13.0 and 2.15.0; `probes` says what is off where one is missing."""

import contextlib
import dataclasses
import dis
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from graphacc._compat import probes
from graphacc._compat.probes import has

_C: Any = torch._C  # of what stubs do not know


def group_rank(name: str) -> int:
    """This process's rank in the process group registered under `name` (a mesh axis)."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name).rank()


def exchange_with(x: torch.Tensor, target: int, source: int, name: str) -> torch.Tensor:
    """Send `x` to rank `target` of the group registered under `name`, and receive rank `source`'s."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    group = _resolve_process_group(name)
    if target == group.rank():
        return x.clone()
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, dist.get_global_rank(group, target), group),
        dist.P2POp(dist.irecv, received, dist.get_global_rank(group, source), group),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def new_graph() -> torch.fx.Graph:
    """An empty graph to which nodes are appended quickly.

    Before torch 2.10 a node is linked in by seven assignments in Python, at each of which fx looks the node up in a table that it is not in yet:
    half of the time in which a graph is written. There the end of the graph is linked without the detour; later versions do it in C++.
    """
    graph: Any = torch.fx.Graph()
    if hasattr(torch.fx.Node, "_prepend") or not hasattr(graph, "_insert"):
        return graph
    root, put = graph._root, object.__setattr__

    def append(node: torch.fx.Node) -> None:
        last = root._prev
        put(last, "_next", node)
        put(node, "_prev", last)
        put(node, "_next", root)
        put(root, "_prev", node)
        put(node, "_sort_key", (last._sort_key[0] + 1,) if last is not root else (0,))

    graph._insert = append
    return graph


@contextlib.contextmanager
def compiling():
    """Make ``torch.compiler.is_compiling()`` true while tracing, as models expect who avoid data-dependent branches."""
    with patched(torch.compiler, _is_compiling_flag=True) if has(probes.COMPILING_FLAG) else contextlib.nullcontext():
        yield


def without_function_modes():
    """Without the user's modes of torch functions, such as ``with torch.device(...)`` and a default device: each is asked for every shape that is read."""
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def without_onednn():
    """Keep torch from choosing oneDNN's fused operators (torch.backends.mkldnn.flags, which warns of TF32 at every use)."""
    if not has(probes.ONEDNN_SWITCH):
        yield
        return
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


# --- capture -----------------------------------------------------------------------------------------------------------


@functools.cache
def fake_mode():
    """The mode whose tensors carry shape, dtype and strides but no data; real tensors may be mixed in as constants.

    There is one for the process, since fake tensors of two modes must not meet, and graphs are stitched together.
    """
    return new_fake_mode(allow_non_fake_inputs=True)


def is_fake(value: torch.Tensor) -> bool:
    """Whether a tensor is a fake one of `fake_mode`."""
    return getattr(value, "fake_mode", None) is fake_mode()


def as_fake(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of `fake_mode` that is like one of the meta device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(fake_mode(), meta, device)


def new_fake_mode(*, allow_non_fake_inputs: bool = False):
    """A fake tensor mode of its own, safe against a garbage collection at any moment.

    PyTorch's converter finds the fakes that it made before by weak references and does not claim what it found (``_fix_weakref``). Up to
    torch 2.12 the Python object is then emptied if its last owner goes at that moment, and its next use ends the process.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)
    if has(probes.FAKES_THAT_STAY):
        converter = mode.fake_tensor_converter.meta_converter
        converter.storage_memo, converter.tensor_memo = _Claiming(), _Claiming()
    return mode


class _Claiming(weakref.WeakValueDictionary):
    """Tensors or storages by weak references: what is found stays whole as long as it is held."""

    def get(self, key, default=None):
        found = super().get(key)
        if found is None:
            return default
        found._fix_weakref()
        return found

    def __getitem__(self, key):
        found = super().__getitem__(key)
        found._fix_weakref()
        return found


def trace_functional(function, args, table):
    """Trace ``function(*args)`` on fake tensors into a GraphModule of functional operators.

    Mutations and views are removed (AOTAutograd's functional tensors), autograd runs inside the trace, and `table`
    (operator -> decomposition) is applied to forward and backward alike. The module's Python code is made only where it is
    asked for; nobody here does.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    functional = dispatch_functionalize(function, FunctionalTensorMode())
    with preserve_node_meta(), enable_python_dispatcher(), _code_on_demand(), _linalg_checks_without_tokens():
        return make_fx(functional, decomposition_table=table, tracing_mode="real")(*args)


def _code_on_demand() -> contextlib.AbstractContextManager:
    if not has(probes.CODE_ON_DEMAND):
        return contextlib.nullcontext()
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def _linalg_checks_without_tokens() -> contextlib.AbstractContextManager:
    """torch 2.13 orders the check of linear algebra by tokens that a plain trace does not have; captures refuse the check by its name."""
    if not has(probes.EFFECTS):
        return contextlib.nullcontext()
    from torch._higher_order_ops import effects

    has_effects = effects.has_effects

    def needs_token(op, *rest) -> bool:
        return op is not torch.ops.aten._linalg_check_errors.default and has_effects(op, *rest)

    return patched(effects, has_effects=needs_token)


@functools.cache
def solve_factors_transposed() -> bool:
    """Whether torch's solve keeps the factors of the transpose of a real contiguous matrix, by which its backward then goes: torch 2.9 does, 2.13 not."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        upper = torch.tensor([[1.0, 2.0], [0.0, 1.0]], device="cpu")
        factors = torch.ops.aten._linalg_solve_ex.default(upper, upper)[1]
        return not torch.equal(factors, upper)


def annotate_nodes(values):
    """Until the next call, nodes traced under `trace_functional` get `values` as their ``meta["custom"]``."""
    torch.fx.traceback.current_meta["custom"] = values


def annotation():
    """The last values given to `annotate_nodes`."""
    return torch.fx.traceback.current_meta.get("custom", {})


def next_node_number():
    """The number that autograd gives the next node of this thread: ``grad_fn._sequence_nr()``."""
    from torch._C import _autograd

    return _autograd._get_sequence_nr()


PATCHING = threading.RLock()
"""Held where a model is captured, or run by PyTorch in parts, and where its state on the devices changes or is read; one for all models, since `patched` is for the whole process."""


@contextlib.contextmanager
def patched(owner, **replacements):
    """Set attributes of a module or a class for the time of the block, in one thread at a time; names that it lacks are removed again."""
    missing = object()
    with PATCHING:  # or threads could put back what another one has set
        before = {name: vars(owner).get(name, missing) for name in replacements}
        try:
            for name, value in replacements.items():
                setattr(owner, name, value)
            yield
        finally:
            for name, value in before.items():
                delattr(owner, name) if value is missing else setattr(owner, name, value)


def in_this_thread(replacement: Callable, original: Callable) -> Callable:
    """A function for `patched` that is `replacement` in the thread that makes it, and `original` in others, which know nothing of a capture."""
    thread = threading.get_ident()

    @functools.wraps(replacement)
    def chosen(*args, **kwargs):
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return chosen


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad) is around this code."""
    return has(probes.TRANSFORMS) and _C._functorch.peek_interpreter_stack() is not None


def unwrapped(tensor):
    """The tensor inside of those that transforms of torch.func (vmap, grad) wrap around it."""
    while in_transform() and _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
    return tensor


def nothing_around() -> bool:
    """Whether neither `watched_by_autograd` nor `mode_around` can have an answer, quickly: loops ask it at every call."""
    if not _can_look() or torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return False
    if _C._functorch.peek_interpreter_stack() is not None:
        return False
    return not torch.is_grad_enabled() or _C._autograd._top_saved_tensors_default_hooks(True) is None


@functools.cache
def _can_look() -> bool:
    return all(map(has, (probes.FORWARD_MODE, probes.TRANSFORMS, probes.SAVED_TENSOR_HOOKS, probes.MODES)))


def watched_by_autograd() -> str | None:
    """What is done here with every call that autograd itself sees, if anything: a program would not do it."""
    if has(probes.FORWARD_MODE) and forward_ad._current_level >= 0:
        return "forward-mode differentiation (torch.autograd.forward_ad) around it"
    if in_transform():
        return "a transform of torch.func (vmap, grad, jacrev) around it"
    hooks = _saved_tensors_hooks() if torch.is_grad_enabled() else None
    if hooks is not None and not getattr(hooks[0], "__module__", "").startswith("torch."):  # checkpoint's and save_on_cpu's change no result
        return "torch.autograd.graph.saved_tensors_hooks around it"
    return None


def _saved_tensors_hooks() -> tuple | None:
    if not has(probes.SAVED_TENSOR_HOOKS):
        return None
    return _C._autograd._top_saved_tensors_default_hooks(True)


def own_saved_tensors() -> contextlib.AbstractContextManager:
    """What autograd keeps inside is none of the business of the hooks around it: those of checkpoint run the model again where somebody looks at it."""
    return contextlib.nullcontext() if _saved_tensors_hooks() is None else torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def mode_around() -> str | None:
    """A mode of the user's, or of torch's (FlopCounterMode), that sees every function or operator; torch's contexts of a device change none."""
    if not has(probes.MODES) or not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return None
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [mode for mode in _get_current_function_mode_stack() if not type(mode).__module__.startswith("torch.")]
    modes += _get_current_dispatch_mode_stack()
    return next((f"a {type(mode).__name__} around it" for mode in modes if not type(mode).__module__.startswith("graphacc.")), None)


def is_multi_grad_hook(hook: object) -> bool:
    """Whether a tensor's hook is one of those of ``register_multi_grad_hook``, which count nodes of autograd's own graph."""
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.")


def caches_parametrizations() -> bool:
    """Whether the caller is inside ``torch.nn.utils.parametrize.cached()``."""
    return has(probes.PARAMETRIZATION_CACHE) and parametrize._cache_enabled > 0


def own_parametrization_cache() -> contextlib.AbstractContextManager:
    """Weights that are computed inside are not those of the surrounding ``parametrize.cached()``, and do not stay in it."""
    return patched(parametrize, _cache={}) if has(probes.PARAMETRIZATION_CACHE) else contextlib.nullcontext()


@contextlib.contextmanager
def decided_branches(*, packed_sequences: bool, checkpointed=lambda policy: contextlib.nullcontext()):
    """Answer, while tracing, the questions that torch's and transformers' own code asks of tensor values.

    - nn.Transformer: "is this mask causal?" is not looked up in the mask, which is applied as it is.
    - transformers: "are several sequences packed in a row?" is answered 'no' unless `packed_sequences`, and experts take
      the grouped product that is one operator for every dtype.
    - torch.utils.checkpoint runs the function once, inside `checkpointed(policy)`: the recomputation is a pass's work. `policy` is what a
      selective policy of the user's says, or None (see `_policy_of`). The reentrant form gives no gradients where no argument requires one,
      as always.
    - the inference fast paths of nn.MultiheadAttention, which are not composed of ATen operators, are off; what nn.TransformerEncoder's gives at
      padding is written out.
    - BatchNorm that averages over all batches does not ask for their number.
    - flex_attention, which asks torch.compile for its operator, is composed of ATen operators, as in PyTorch without torch.compile.
    """
    import torch.nn.modules.batchnorm as batchnorm
    import torch.nn.modules.transformer as transformer
    import torch.utils.checkpoint as checkpoint

    masking, experts = sys.modules.get("transformers.masking_utils"), sys.modules.get("transformers.integrations.moe")
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(patched(transformer, _detect_is_causal_mask=_hinted_causal))
        if fastpath:
            stack.enter_context(_forward_replaced(transformer.TransformerEncoder, _encodes_padding))
        stack.enter_context(_forward_replaced(batchnorm._BatchNorm, _averages_all_batches))
        if has(probes.CHECKPOINTS):
            stack.enter_context(patched(checkpoint, **_checkpoints_run_once(checkpointed)))
        if masking is not None and not packed_sequences:
            stack.enter_context(patched(masking, find_packed_sequence_indices=in_this_thread(lambda position_ids: None, masking.find_packed_sequence_indices)))
        if experts is not None:
            stack.enter_context(patched(experts, _can_use_grouped_mm=lambda *args: False))
        if flex is not None and has(probes.FLEX_ATTENTION):
            stack.enter_context(patched(flex, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True, flex_attention_hop=sys.modules["torch._higher_order_ops.flex_attention"].math_attention))
        yield


def _hinted_causal(mask, is_causal=None, size=None) -> bool:
    return is_causal is True


@dataclasses.dataclass(frozen=True)
class _OfInstances:
    """A method of instances alone: the class shows its own, by which a call knows whether the model is the same."""

    shown: types.FunctionType
    method: types.FunctionType

    def __get__(self, instance, owner=None):
        return self.shown if instance is None else types.MethodType(self.method, instance)


def _forward_replaced(kind: type[torch.nn.Module], replacement):
    forward: Any = kind.forward
    return patched(kind, forward=_OfInstances(forward, replacement(forward)))


def _encodes_padding(forward):
    """nn.TransformerEncoder.forward as it is with nested tensors where it converts to them: zeros at padding."""

    @functools.wraps(forward)
    def encode(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        may_convert = mask is None and src.dim() == 3 and _may_convert_to_nested(self)
        if not may_convert or src_key_padding_mask is None or not _is_padded(src_key_padding_mask):
            return forward(self, src, mask, src_key_padding_mask, is_causal)
        first = self.layers[0]
        tensors = [src, *(x for part in (first.self_attn, first.norm1, first.norm2, first.linear1, first.linear2) for x in part.parameters())]
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
            return _encoded_as_nested(self, src, src_key_padding_mask)
        return forward(self, src, mask, src_key_padding_mask, is_causal)

    return encode


def _may_convert_to_nested(encoder) -> bool:
    """Whether nn.TransformerEncoder.forward converts a padded batch to nested tensors, as far as neither values nor gradients decide."""
    return getattr(encoder, "use_nested_tensor", False) and not encoder.layers[0].training and not torch.is_autocast_enabled("cuda")


def _is_padded(padding: torch.Tensor) -> bool:
    """Whether a batch has padding; True also where its values are not known."""
    try:
        return bool((padding != 0).any())
    except RuntimeError:
        return True


def _encoded_as_nested(encoder, src: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """What nested tensors give: a sequence of N positions that count is the first N, and the others become zeros in front of the last norm.

    Args:
        src: [B, T, D].
        padding: [B, T], True or a negative number at padding. If it is not at the end of every sequence, nothing is converted, unless `mask_check` is off.
    """
    added: Any = torch.nn.functional._canonical_mask(padding, "src_key_padding_mask", None, "mask", src.dtype)
    keep = added.logical_not()
    first = torch.arange(src.shape[1], device=src.device) < keep.sum(1, keepdim=True)
    converts = (first == keep).all() if getattr(encoder, "mask_check", True) else torch.ones((), dtype=torch.bool, device=src.device)
    added = torch.where(converts, torch.zeros_like(added).masked_fill(~first, -torch.inf), added)
    out = src
    for layer in encoder.layers:
        out = layer(out, src_key_padding_mask=added)
    out = torch.where((converts & ~first).unsqueeze(-1), 0.0, out)
    return out if encoder.norm is None else encoder.norm(out)


def _averages_all_batches(forward):
    """BatchNorm's forward, in which the average over all batches (momentum=None) takes the number of batches as a tensor."""

    @functools.wraps(forward)
    def normalize(self, input):
        if self.momentum is not None or not self.training or not self.track_running_stats or self.num_batches_tracked is None:
            return forward(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        now = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = torch.nn.functional.batch_norm(input, *now, self.weight, self.bias, True, 1.0, self.eps)
        share = 1.0 / self.num_batches_tracked.to(torch.promote_types(self.running_mean.dtype, torch.float32))
        for average, value in zip((self.running_mean, self.running_var), now):
            average.mul_(1.0 - share).add_(value * share)
        return out

    return normalize


def _checkpoints_run_once(checkpointed) -> dict:
    """Stand-ins for the two forms of torch.utils.checkpoint: call the function, inside `checkpointed(policy)`."""
    from torch.utils import checkpoint
    from torch.utils.checkpoint import check_backward_validity, noop_context_fn

    class CheckpointFunction:
        @staticmethod
        def apply(function, preserve_rng_state, *args):
            if torch.is_grad_enabled():
                check_backward_validity(args)
            if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
                with torch.no_grad():
                    return function(*args)
            with checkpointed(None):
                return function(*args)

    def generator(fn, preserve_rng_state=True, context_fn=noop_context_fn, *args, **kwargs):
        return implementation(fn, args, kwargs, context_fn=context_fn)

    def implementation(fn, args, kwargs, *, context_fn=noop_context_fn, **options):
        forward, _ = context_fn()
        policy = _policy_of(forward)
        with checkpointed(policy), contextlib.nullcontext() if policy is not None else forward:
            yield

    CheckpointFunction.apply = staticmethod(in_this_thread(CheckpointFunction.apply, checkpoint.CheckpointFunction.apply))
    called = "_checkpoint_without_reentrant_generator_impl"  # by `checkpoint` since torch 2.15
    functions = {"_checkpoint_without_reentrant_generator": generator, **({called: implementation} if hasattr(checkpoint, called) else {})}
    return {"CheckpointFunction": CheckpointFunction, **{name: in_this_thread(function, getattr(checkpoint, name)) for name, function in functions.items()}}


def _policy_of(context):
    """What a context of ``create_selective_checkpoint_contexts`` says: (operator, args, kwargs) -> whether results are kept; None for another one."""
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, _CachingTorchDispatchMode

    if not isinstance(context, _CachingTorchDispatchMode):
        return None

    def keeps(operator, args, kwargs) -> bool:
        said = context.policy_fn(SelectiveCheckpointContext(is_recompute=False), operator, *args, **kwargs)
        return said in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    return keeps


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What torch raises when code under fake tensors asks for a tensor's values."""
    if not has(probes.VALUES_ASKED):
        return ()
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, GuardOnDataDependentSymNode)


def dynamic_shape_errors() -> tuple[type[Exception], ...]:
    """What torch raises when an operator's output shape depends on a tensor's values."""
    if not has(probes.VALUES_ASKED):
        return ()
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    return (DynamicOutputShapeException,)


def foreach_operators() -> list[str]:
    """Names of ATen's functional operators on lists of tensors, such as ``_foreach_add``."""
    if not has(probes.FOREACH):
        return []
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(name for name in names if name.startswith("_foreach_") and not name.endswith("_"))


# --- lowering ----------------------------------------------------------------------------------------------------------


def decomposition(overload):
    """Torch's own decomposition of an operator overload into simpler ones, or None."""
    from torch._decomp import decomposition_table

    return decomposition_table.get(overload)


# --- passes and the reference executor ---------------------------------------------------------------------------------


def register_group(name: str, group) -> None:
    """Let functional collectives find process group `group` under `name` (a mesh axis)."""
    torch._C._distributed_c10d._register_process_group(name, group)


def unregister_group(name: str) -> None:
    torch._C._distributed_c10d._unregister_process_group(name)


def defining_module(overload) -> str | None:
    """The Python module that registered a ``torch.library.custom_op``; None for operators that come with torch."""
    definition = _definition(overload)
    return None if definition is None else definition._init_fn.__module__


def python_body(overload):
    """The Python function that a ``torch.library.custom_op`` runs on every device; None for any other operator."""
    definition = _definition(overload)
    return definition._init_fn if definition is not None and None in definition._backend_fns else None


def flex_attention_operators() -> dict:
    """The operators of torch's by which modifications of scores index tensors, as compositions of ATen operators."""
    if not has(probes.FLEX_ATTENTION) or "torch.nn.attention.flex_attention" not in sys.modules:
        return {}
    scattered = torch.ops.flex_lib.zeros_and_scatter.default
    body = python_body(scattered)
    return {} if body is None else {scattered: body}


def _definition(overload):
    """The ``torch.library.custom_op`` that an operator comes from, or None."""
    if not has(probes.CUSTOM_OPERATORS):
        return None
    from torch._library.custom_ops import OPDEFS

    return OPDEFS.get(overload._schema.name)


# --- loop --------------------------------------------------------------------------------------------------------------


def without_modes() -> contextlib.AbstractContextManager:
    """No dispatch mode (such as a fake tensor mode) is active inside."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def outside_of_transforms():
    """A context outside of torch.func's transforms (vmap, grad), in which tensors are ordinary ones."""
    if not in_transform():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def described(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
    """The results of an operator as tensors that have only shape and dtype."""
    from torch.utils import _pytree as pytree

    def run(make, device: str) -> object:
        given = pytree.tree_map_only(torch.Tensor, lambda x: make(x.shape, dtype=x.dtype, device=device), (args, kwargs))
        return func(*given[0], **given[1])

    with without_modes(), torch.no_grad():
        try:
            return run(torch.empty, "meta")
        except NotImplementedError:  # some backward operators of losses can only be run
            return pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), run(torch.zeros, "cpu"))


def swap_values(a: torch.Tensor, b: torch.Tensor) -> None:
    """Let two tensors exchange memory, form and device, and stay the objects that they are; `torch.utils.swap_tensors` refuses those with weak references.

    Raises:
        RuntimeError: a graph of autograd refers to one of them.
    """
    torch._C._swap_tensor_impl(a, b)


def storage_users(tensor) -> int:
    """How many objects (the tensor, views and detached tensors, a storage that Python holds) share the memory of `tensor`; at least 2 where torch does not say."""
    if not has(probes.STORAGE_USERS):
        return 2
    return _references(tensor) - _references_of_one() + 1


def _references(tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


@functools.cache
def _references_of_one() -> int:
    """torch 2.13 keeps the Python object of a storage, torch 2.9 does not."""
    with without_modes():
        return _references(torch.empty(1, device="cpu"))


def untraced(function):
    """A function of a module as torch.compile calls it without tracing it; itself where torch.compile's frontend was never loaded."""
    frontend = sys.modules.get("torch._dynamo")
    if frontend is not None and function not in _untraced:
        _untraced[function] = frontend.disable(function)
    return _untraced.get(function, function)


_untraced: dict = {}  # no functools.cache: torch.compile's frontend warns where it meets one


@dataclasses.dataclass(frozen=True)
class Applied:
    """A call of ``torch.autograd.Function.apply``."""

    frame: object  # Python's, of the call or of the forward in it
    call: tuple[type, tuple, dict] | None  # the class and the arguments; None where they cannot be told


def applied_functions() -> list[Applied]:
    """The calls of ``torch.autograd.Function.apply`` that the caller runs in, outermost first."""
    found, frame = [], sys._getframe(1)
    forwards = set() if _APPLY is not None else set(_forwards(torch.autograd.Function))
    while frame is not None:
        if frame.f_code is _APPLY:
            held = frame.f_locals
            found.insert(0, Applied(frame, (held["cls"], tuple(held["args"]), dict(held["kwargs"]))))
        elif frame.f_code in forwards:
            found.insert(0, Applied(frame, _arguments_of_apply(frame)))
        frame = frame.f_back
    return found


def _forwards(base: type) -> Iterator[types.CodeType]:
    for function in base.__subclasses__():
        if isinstance(function.forward, types.FunctionType):
            yield function.forward.__code__
        yield from _forwards(function)


def _arguments_of_apply(frame: types.FrameType) -> tuple[type, tuple, dict] | None:
    """The class and the arguments with which C++ has called its forward, whose frame this is, as torch 2.15 does."""
    code, held = frame.f_code, frame.f_locals
    if _rebinds_arguments(code):
        return None
    names, num_positional = code.co_varnames, code.co_argcount
    num_named = num_positional + code.co_kwonlyargcount
    args, kwargs = [held[name] for name in names[:num_positional]], {name: held[name] for name in names[num_positional:num_named]}
    if code.co_flags & inspect.CO_VARARGS:
        args += held[names[num_named]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= held[names[num_named + bool(code.co_flags & inspect.CO_VARARGS)]]
    context = args[0] if args else None  # a forward without one does not say of which class it is, nor whether `apply` has called it
    function = getattr(context, "_forward_cls", None) if isinstance(context, torch.autograd.function.FunctionCtx) else None
    return None if function is None or function.forward.__code__ is not code else (function, tuple(args[1:]), kwargs)


@functools.lru_cache(maxsize=256)
def _rebinds_arguments(code: types.CodeType) -> bool:
    """Whether a function's arguments may be other ones when it has run for a while."""
    flags = code.co_flags
    count = code.co_argcount + code.co_kwonlyargcount + bool(flags & inspect.CO_VARARGS) + bool(flags & inspect.CO_VARKEYWORDS)
    names = set(code.co_varnames[:count])
    changed = (item.argval for item in dis.get_instructions(code) if item.opname.startswith(("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF")))
    nested = (part for part in code.co_consts if isinstance(part, types.CodeType))
    written = {name for value in changed for name in (value if isinstance(value, tuple) else (value,))}
    return not names.isdisjoint(written) or any(names & set(part.co_freevars) for part in nested)


_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""Of `apply`, where it is a function of Python's (before torch 2.15)."""

SEES_APPLY = _APPLY is not None
"""Whether `applied_functions` knows every call of `apply`; otherwise those alone whose forward is a function that gets the context first."""


def output_of_function(tensor: torch.Tensor) -> int | None:
    """Which output of a torch.autograd.Function a tensor is, in autograd's own graph; None if it is none."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if tensor.grad_fn is None else tensor.output_nr


def is_profiling() -> bool:
    """Whether a profiler of torch runs; where torch does not say, ranges are given to it in any case, at some microseconds each."""
    if not has(probes.TORCH_PROFILER):
        return True
    return _C._autograd._profiler_enabled()


def leave_out(optimizer: torch.optim.Optimizer, result: object) -> bool:
    """Let the class's own code be left out of the step whose pre-hooks run now, which gives `result`.

    `torch.optim.Optimizer.profile_hook_step` wraps it, and finds it in a cell, which holds another function until that is called.

    Returns:
        False, and nothing is changed, where the wrapper is not found.
    """
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name != "wrapper" or frame.f_locals.get("self") is not optimizer or "func" not in frame.f_code.co_freevars):
        frame = frame.f_back
    if frame is None:
        return False
    function = frame.f_locals["func"]
    steps = (vars(base).get("step") for base in type(optimizer).__mro__)
    wrapper = next((step for step in steps if getattr(step, "__code__", None) is frame.f_code and getattr(step, "__wrapped__", None) is function), None)
    if wrapper is None:
        return False
    cell = wrapper.__closure__[frame.f_code.co_freevars.index("func")]

    def left_out(*args, **kwargs):
        if sys._getframe(1) is not frame:
            return function(*args, **kwargs)  # another thread's step, or one behind a pre-hook that raised
        cell.cell_contents = function
        return result

    cell.cell_contents = left_out
    return True
