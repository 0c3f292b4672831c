"""Copies to the device and back; that nothing waits for them shows on a GPU only: test_async_decode_gpu.py."""

import torch

from tgis.engines.host_memory import Download, to_device, upload

CPU = torch.device("cpu")


def test_parts_are_views_of_one_copy() -> None:
    parts = [[1, 2, 3], [], [-(2**63), 2**63 - 1], range(4)]
    uploaded = upload(parts, CPU)
    assert [part.tolist() for part in uploaded] == [list(part) for part in parts]
    assert {part.dtype for part in uploaded} == {torch.int64}
    assert len({part.untyped_storage().data_ptr() for part in uploaded}) == 1
    assert {(part.data_ptr() - uploaded[0].data_ptr()) % 16 for part in uploaded} == {0}


def test_there_and_back() -> None:
    there = to_device([0.1, -0.0, float("inf")], torch.float64, CPU)
    assert Download(there).wait() == [0.1, -0.0, float("inf")]
    assert Download(torch.empty(0)).wait() == []
