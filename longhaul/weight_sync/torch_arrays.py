"""Conversion between NumPy arrays and torch tensors over the same memory, in every dtype that can be sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from longhaul.weight_sync.manifest import ITEMSIZES, numpy_dtype


def torch_array(tensor: Any, name: str = "a tensor") -> np.ndarray:
    """NumPy array of a torch tensor, over the same memory where it is contiguous and on the CPU."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZES:
        raise ValueError(f"{name} has dtype {dtype}; there are {', '.join(ITEMSIZES)}")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().view(numpy_dtype(dtype)).reshape(tuple(tensor.shape))


class _Window:
    """Memory of an array for `numpy.asarray`, not marked read-only: torch has no such mark, and warns."""

    def __init__(self, array: np.ndarray) -> None:
        place = (array.__array_interface__["data"][0], False)
        self.__array_interface__ = {"data": place, "shape": (array.nbytes,), "typestr": "|u1", "version": 3}
        self._array = array  # keeps the memory alive


def torch_tensor(array: np.ndarray) -> Any:
    """Torch tensor of a read-only array, over the same memory where that is contiguous. It must not be written."""
    import torch

    array = np.ascontiguousarray(array).reshape(array.shape)
    dtype = getattr(torch, str(array.dtype))
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    flat = torch.from_numpy(np.asarray(_Window(array)))
    return flat.view(dtype).reshape(array.shape)
