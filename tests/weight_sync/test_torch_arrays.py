"""NumPy arrays as torch tensors over the same memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from longhaul.weight_sync.torch_arrays import torch_tensor


def test_torch_reads_an_array_of_any_dtype_where_it_lies() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float64, np.int8, np.bool_, ml_dtypes.float8_e4m3fn):
        array = np.arange(6).astype(dtype).reshape(2, 3)
        array.flags.writeable = False
        found = torch_tensor(array)
        assert found.data_ptr() == array.__array_interface__["data"][0] and tuple(found.shape) == (2, 3)
        assert found.float().tolist() == array.astype(np.float32).tolist()
    assert torch_tensor(np.zeros((0, 2), np.int32)).shape == (0, 2) and torch_tensor(np.array(3)).item() == 3
