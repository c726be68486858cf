"""graphacc.optim.CPUAdam against torch.optim.AdamW, the oracle, on every instruction set that this CPU has."""

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from tolerances import assert_close

from graphacc.kernels import library
from graphacc.optim import CPUAdam

ULPS = 1e-6   # a few roundings of fp32, relative to the tensor's largest value
SIZES = (0, 1, 7, 8, 15, 16, 17, 1000, 100003)
OPTIONS = {
    "default": {},
    "large steps": {"lr": 0.1, "eps": 1e-3},
    "no decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "all": {"amsgrad": True, "maximize": True, "weight_decay": 0.3, "lr": 0.01},
    "average from the gradient's end": {"betas": (0.3, 0.6)},
}


ISAS = list(library.available_isas())  # of this processor: with or without AVX-512


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setattr(library, "default_isa", lambda: request.param)
    return request.param


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def parameters(shapes=SIZES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, seed: int) -> None:
    """Gradients of many magnitudes, zeros among them, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        magnitude = 10.0 ** torch.randint(-6, 3, param.shape, generator=generator)
        zero = torch.rand(param.shape, generator=generator) < 0.1
        param.grad = (torch.randn(param.shape, generator=generator) * magnitude).masked_fill(zero, 0.0)


def run(optimizer, params, *, steps: int, start: int = 0) -> list[torch.Tensor]:
    for step in range(start, start + steps):
        set_gradients(params, step)
        optimizer.step()
    return [param.detach() for param in params]


def bits(tensors) -> list[list[int]]:
    return [tensor.detach().contiguous().view(torch.int32).flatten().tolist() for tensor in tensors]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.default_cases(*(f"{ISAS[number % len(ISAS)]}-{name}" for number, name in enumerate(OPTIONS)))
def test_agrees_with_adamw(isa, options):
    ours, theirs = parameters(), parameters()
    optimizer, reference = CPUAdam(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
    for got, expected in zip(run(optimizer, ours, steps=20), run(reference, theirs, steps=20), strict=True):
        assert_close(got, expected, tolerance=ULPS)
    for a, b in zip(ours, theirs, strict=True):
        assert optimizer.state[a].keys() == reference.state[b].keys()
        for name, expected in reference.state[b].items():
            assert_close(optimizer.state[a][name], expected, tolerance=ULPS, what=name)


def test_l2_mode_agrees_with_adam(isa):
    ours, theirs = parameters(), parameters()
    got = run(CPUAdam(ours, weight_decay=0.1, adamw_mode=False), ours, steps=20)
    expected = run(torch.optim.Adam(theirs, weight_decay=0.1, foreach=False), theirs, steps=20)
    decoupled = run(CPUAdam(params := parameters(), weight_decay=0.1), params, steps=20)
    for a, b, c in zip(got, expected, decoupled, strict=True):
        assert_close(a, b, tolerance=ULPS)
        assert a.numel() == 0 or not torch.allclose(a, c)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}, {"adamw_mode": False}], ids=str)
def test_bits_do_not_depend_on_the_instruction_set_or_the_threads(monkeypatch, threads, options):
    def result(name, count):
        monkeypatch.setattr(library, "default_isa", lambda: name)
        threads(count)
        params = parameters()
        return bits(run(CPUAdam(params, **options), params, steps=3))

    expected = result("portable", 1)
    for name in library.available_isas():
        for count in (1, 2, 5):
            assert result(name, count) == expected, (name, count)


def test_unaligned_views(isa):
    storage, aligned = torch.randn(5, 4000), []
    ours = [torch.nn.Parameter(storage[i, i : i + 3000 + i]) for i in range(5)]
    aligned = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    assert len({param.data_ptr() % 64 for param in ours}) > 1
    outside = storage[4, 3008:].clone()
    for got, expected in zip(run(CPUAdam(ours), ours, steps=3), run(CPUAdam(aligned), aligned, steps=3), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(storage[4, 3008:], outside)


def layouts() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.randn(30, 20).t(),
        "channels last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "every second column": torch.randn(30, 20)[:, ::2],
        "one row": torch.randn(1, 20),
        "scalar": torch.randn(()),
    }


@pytest.mark.parametrize("layout", layouts())
def test_layouts_of_parameters_and_gradients(layout):
    ours = torch.nn.Parameter(layouts()[layout])
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer, reference = CPUAdam([ours]), torch.optim.AdamW([theirs])
    grad = torch.randn(ours.shape)
    dense = grad.t().contiguous().t() if grad.dim() == 2 else grad
    for gradient in (grad, dense, grad.new_tensor(0.5).expand(ours.shape), torch._neg_view(grad)):
        ours.grad = theirs.grad = gradient
        optimizer.step()
        reference.step()
    assert_close(ours, theirs, tolerance=ULPS)
    assert optimizer.state[ours]["exp_avg"].stride() == reference.state[theirs]["exp_avg"].stride()


def make_groups(params) -> list[dict]:
    return [{"params": params[:4], "lr": 0.1, "weight_decay": 0.0}, {"params": params[4:], "betas": (0.8, 0.9), "amsgrad": True}]


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_groups_schedulers_and_late_gradients(tensor_lr):
    results = []
    for make, options in ((CPUAdam, {}), (torch.optim.AdamW, {"foreach": False})):
        params = parameters()
        optimizer = make(make_groups(params), lr=torch.tensor(0.01) if tensor_lr else 0.01, **options)
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.05], total_steps=12, cycle_momentum=True),
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
        ]
        for step in range(8):
            set_gradients(params, step)
            params[-1].grad = params[-1].grad if step > 2 else None
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        assert optimizer.state[params[-1]]["step"] == 5
        results.append(params)
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected, tolerance=ULPS)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ours_first", [True, False])
def test_state_dicts_load_in_both_directions(amsgrad, fused, ours_first):
    def ours(params):
        return CPUAdam(params, amsgrad=amsgrad)

    def theirs(params):
        return torch.optim.AdamW(params, amsgrad=amsgrad, fused=fused)

    first, second = (ours, theirs) if ours_first else (theirs, ours)
    params, expected_params = parameters(), parameters()
    before, reference = first(params), torch.optim.AdamW(expected_params, amsgrad=amsgrad)
    run(before, params, steps=3)
    after = second(params)
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["decoupled_weight_decay"] is True
    run(after, params, steps=3, start=3)
    run(reference, expected_params, steps=6)
    for got, expected in zip(params, expected_params, strict=True):
        assert_close(got, expected, tolerance=ULPS)
    assert after.state_dict()["param_groups"][0].keys() == before.state_dict()["param_groups"][0].keys()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"])
def test_copies_of_the_optimizer_go_on_alike(clone):
    params = parameters((17, 100))
    optimizer = CPUAdam(params, weight_decay=0.1, adamw_mode=False)
    run(optimizer, params, steps=2)
    twin = clone(optimizer)
    run(optimizer, params, steps=2, start=2)
    twin_params = twin.param_groups[0]["params"]
    run(twin, twin_params, steps=2, start=2)
    assert bits(twin_params) == bits(params)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_bf16_gradients_and_copies(isa, amsgrad):
    ours, wide, copied = parameters(), parameters(), {}
    for i, param in enumerate(ours):
        storage = torch.full((param.numel() + i,), 9.0, dtype=torch.bfloat16)
        copied[param] = storage[i:].view(param.shape)
    optimizer, reference = CPUAdam(ours, amsgrad=amsgrad), CPUAdam(wide, amsgrad=amsgrad)
    for step in range(3):
        set_gradients(wide, step)
        grads = {}
        for a, b in zip(ours, wide, strict=True):
            grads[a] = b.grad.bfloat16()
            b.grad = grads[a].float()
        optimizer.step(grads=grads, copies=copied)
        reference.step()
    assert bits(ours) == bits(wide)
    for param in ours:
        assert torch.equal(copied[param], param.detach().bfloat16())


def test_bf16_copies_are_rounded_as_torch_rounds(isa):
    """Every bf16 value, the ties beside it and their neighbours, infinities, subnormals and NaNs; lr 0 keeps them."""
    high = torch.arange(65536, dtype=torch.int64) << 16
    patterns = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).to(torch.int32)
    param = torch.nn.Parameter(patterns.view(torch.float32))
    copied = torch.empty(param.shape, dtype=torch.bfloat16)
    param.grad = torch.zeros_like(param)
    CPUAdam([param], lr=0.0).step(copies={param: copied})
    expected = param.detach().bfloat16()
    nan = param.detach().isnan()
    assert torch.equal(param.detach().view(torch.int32)[~nan], patterns[~nan])
    assert torch.equal(copied.isnan(), nan)
    assert torch.equal(copied.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_any_layout_and_without_gradient(dtype):
    params = parameters(((30, 20), (40,)))
    copied = {params[0]: torch.empty(20, 60, dtype=dtype).t()[::2], params[1]: torch.empty(40, dtype=dtype)}
    set_gradients(params, 0)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer = CPUAdam(params)
    optimizer.step(copies=copied)
    assert torch.equal(params[1].detach(), before) and params[1] not in optimizer.state
    for param in params:
        assert torch.equal(copied[param], param.detach().to(dtype))


def test_autograd_notices_the_update():
    param = torch.nn.Parameter(torch.ones(4))
    loss = (param * param).sum()
    param.grad = torch.ones(4)
    CPUAdam([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closure():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert optimizer.step(closure) < 4.0


def test_two_callers_at_once(threads):
    threads(2)
    results = {}

    def train(seed):
        params = parameters((200_000, 17))
        results[seed] = bits(run(CPUAdam(params), params, steps=4, start=seed))

    workers = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    together = dict(results)
    for seed in range(3):
        train(seed)
    assert together == results and together[0] != together[1]


FORK = """
import os, torch
from graphacc.optim import CPUAdam
torch.set_num_threads(2)
param = torch.nn.Parameter(torch.ones(200_000))
param.grad = torch.ones(200_000)
optimizer = CPUAdam([param])
optimizer.step()
child = os.fork()
optimizer.step()
if child == 0:
    os._exit(7 if len(os.listdir("/proc/self/task")) == 2 else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads through /proc")
@pytest.mark.matrix
def test_a_forked_child_starts_its_own_threads():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


def refuse_bf16_param():
    CPUAdam([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])


def refuse_meta_param():
    CPUAdam([torch.nn.Parameter(torch.ones(3, device="meta"))])


def step_with(**kinds):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    before = param.detach().clone()
    try:
        CPUAdam([param]).step(**{name: {param: tensor} for name, tensor in kinds.items()})
    finally:
        assert torch.equal(param.detach(), before)


def step_converted_param():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([param])
    param.data = param.data.double()
    param.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()


def step_foreign_key():
    CPUAdam([torch.nn.Parameter(torch.ones(3))]).step(copies={torch.ones(5): torch.ones(5)})


def step_onto_itself():
    param = torch.nn.Parameter(torch.ones(3))
    CPUAdam([param]).step(copies={param: param})


def step_with_new_amsgrad():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = CPUAdam([param])
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.step()


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (refuse_bf16_param, TypeError, "parameter 0 of group 0 has dtype torch.bfloat16.*must be a dense float32.*master"),
        (refuse_meta_param, TypeError, "device meta"),
        (step_converted_param, TypeError, "parameter 0 of group 0 has dtype torch.float64"),
        (lambda: step_with(grads=torch.ones(3).half()), TypeError, "gradient has dtype torch.float16.*float32 or bfloat16"),
        (lambda: step_with(grads=torch.ones(4)), ValueError, r"gradient has shape \(4,\), the parameter has \(3,\)"),
        (lambda: step_with(grads=torch.ones(3).to_sparse()), TypeError, "gradient has .*layout torch.sparse_coo"),
        (lambda: step_with(copies=torch.ones(3, 1)), ValueError, r"copy has shape \(3, 1\), the parameter has \(3,\)"),
        (lambda: step_with(copies=torch.ones(3, dtype=torch.float64)), TypeError, "copy has dtype torch.float64"),
        (step_foreign_key, ValueError, r"step\(copies=...\): a key of shape \(5,\) is not a parameter"),
        (step_onto_itself, ValueError, "its copy is the parameter itself"),
        (step_with_new_amsgrad, ValueError, "has no .'max_exp_avg_sq'.*amsgrad=True"),
        (lambda: CPUAdam([torch.nn.Parameter(torch.ones(3))], betas=(1.0, 0.9)), ValueError, "beta"),
        (lambda: CPUAdam([torch.nn.Parameter(torch.ones(3))], lr=-1.0), ValueError, "learning rate"),
    ],
)
def test_errors(act, error, message):
    with pytest.raises(error, match=message):
        act()


def test_a_refused_group_is_not_added():
    optimizer = CPUAdam([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1
