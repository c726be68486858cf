"""The loader of the native library, and the checks of its C ABI."""

import ctypes

import pytest
import torch

import graphacc
from graphacc.errors import GraphAccError
from graphacc.kernels import adam, library
from graphacc.kernels.adam import AdamGroup, AdamTensor


def test_a_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(graphacc, "__path__", [str(tmp_path)])
    with pytest.raises(library.NativeLibraryError, match=rf"not found \(looked at {tmp_path}/lib.*pip install") as caught:
        library.load.__wrapped__()
    assert isinstance(caught.value, (GraphAccError, ImportError))


def test_a_library_of_another_version_is_refused(monkeypatch):
    built = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", 10**6)
    with pytest.raises(library.NativeLibraryError, match=f"ABI version {built}, this graphacc needs 1000000.*pip install"):
        library.load.__wrapped__()


def test_the_portable_kernels_are_always_there():
    assert next(iter(library.available_isas())) == "portable"


def test_the_environment_chooses_the_instruction_set(monkeypatch):
    monkeypatch.delenv("GRAPHACC_ISA", raising=False)
    assert library.default_isa.__wrapped__() == list(library.available_isas())[-1]
    monkeypatch.setenv("GRAPHACC_ISA", "portable")
    assert library.default_isa.__wrapped__() == "portable"
    monkeypatch.setenv("GRAPHACC_ISA", "mmx")
    with pytest.raises(library.NativeLibraryError, match="GRAPHACC_ISA='mmx' is not available.*portable"):
        library.default_isa.__wrapped__()


def test_an_instruction_set_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"gacc_traffic_probe: instruction set number 99 is not in \[0, "):
        library.call("gacc_traffic_probe", None, None, None, None, ctypes.c_int64(0), ctypes.c_int32(99), ctypes.c_int32(1))


ARRAYS = torch.zeros(4, 8)


def tensor(**changes) -> AdamTensor:
    names = ("param", "exp_avg", "exp_avg_sq", "grad")
    addresses = {name: row.data_ptr() for name, row in zip(names, ARRAYS, strict=True)}
    return AdamTensor(**(addresses | {"numel": 8, "step": 1, "group": 0, "grad_dtype": 1, "copy_dtype": 0} | changes))


def group(**changes) -> AdamGroup:
    return AdamGroup(**({"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": 1} | changes))


@pytest.mark.parametrize(
    ("tensors", "groups", "threads", "message"),
    [
        ([tensor(), tensor(exp_avg=None)], [group()], 1, "tensor 1: an array is null"),
        ([tensor(numel=-1)], [group()], 1, "tensor 0: numel is negative"),
        ([tensor(step=0)], [group()], 1, "step is below 1"),
        ([tensor(group=1)], [group()], 1, "group is out of range"),
        ([tensor(grad_dtype=0)], [group()], 1, "grad_dtype"),
        ([tensor(copy_dtype=3)], [group()], 1, "copy_dtype is unknown"),
        ([tensor(copy_dtype=2)], [group()], 1, "copy and copy_dtype disagree"),
        ([tensor()], [group(beta2=1.0)], 1, "group 0: a beta is 1, expected 0 <= beta < 1"),
        ([tensor()], [group(beta1=float("nan"))], 1, "a beta is nan"),
        ([tensor()], [group()], 0, "num_threads is 0, expected 1 to 1024"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(tensors, groups, threads, message):
    ARRAYS.fill_(1.0)
    with pytest.raises(ValueError, match=message):
        adam.adam_step(tensors, groups, threads=threads)
    assert torch.equal(ARRAYS, torch.ones(4, 8))


def test_no_tensors_is_no_work():
    adam.adam_step([], [], threads=1)
    adam.adam_step([AdamTensor(numel=0, step=1, grad_dtype=1)], [group()], threads=1)
    with pytest.raises(ValueError, match="isa='mmx' is not available here"):
        adam.adam_step([], [], threads=1, isa="mmx")


@pytest.mark.parametrize("isa", library.available_isas())
def test_traffic_probe(isa):
    arrays = [torch.full((70_001,), float(i)) for i in range(4)]
    adam.traffic_probe(*arrays, threads=2, isa=isa)
    assert [array.unique().tolist() for array in arrays] == [[3.0], [4.0], [5.0], [3.0]]
    with pytest.raises(ValueError, match="four contiguous float32 tensors of equal size"):
        adam.traffic_probe(*arrays[:3], arrays[3][1:], threads=2)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 1_000_000)])
def test_huge_zeros(shape):
    like = torch.ones(shape).t() if len(shape) == 2 else torch.ones(shape)
    zeros = adam.huge_zeros_like(like)
    assert zeros.shape == like.shape and zeros.stride() == like.stride() and not zeros.any()
