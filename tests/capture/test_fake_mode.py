"""Fake tensors stay whole whenever Python collects garbage."""

import gc

import pytest
import torch

from graphacc._compat.torch_ import new_fake_mode


@pytest.mark.matrix
def test_what_the_converter_finds_again_outlives_its_last_owner():
    mode = new_fake_mode()
    converter = mode.fake_tensor_converter.meta_converter
    real = torch.randn(4)
    fake = mode.from_tensor(real)
    storage = next(iter(converter.storage_memo.values()))
    held = [converter.storage_memo.get(key) for key in list(converter.storage_memo)]
    del fake, storage
    gc.collect()
    assert [storage.nbytes() for storage in held] == [16]  # emptied by torch 2.9's own converter: "Got a null Storage", or a crash


def test_tensors_that_share_memory_are_fake_views_of_one_storage():
    mode = new_fake_mode()
    whole = torch.randn(4, 4)
    fakes = [mode.from_tensor(part) for part in (whole, whole[1:], whole.detach())]
    assert len({fake.untyped_storage()._cdata for fake in fakes}) == 1
