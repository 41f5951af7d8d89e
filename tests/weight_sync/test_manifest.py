"""A version's manifest: one text, one root; whatever is not exactly one is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longhaul.weight_sync import packing
from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.manifest import (
    DIGEST,
    ITEMSIZES,
    MAGIC,
    Manifest,
    Tensor,
    check,
    from_bytes,
    layout,
    numpy_dtype,
    text,
    to_bytes,
    views,
)

TENSORS, SIZE = layout([("a", (3, 5), "bfloat16"), ("b.weight", (), "float32"), ("c", (0, 4), "int8")])
GOOD = Manifest("run", 7, 3, -1, SIZE, TENSORS)


def test_tensors_lie_in_order_each_at_the_beginning_of_a_line() -> None:
    assert [(each.offset, each.nbytes) for each in TENSORS] == [(0, 30), (64, 4), (128, 0)]
    assert SIZE == 128


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZES))), max_size=6), st.integers(0, 1 << 60))
@settings(max_examples=50, deadline=None)
def test_bytes_lead_back_to_the_same_manifest(forms: list, version: int) -> None:
    tensors, size = layout((f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(forms))
    before = Manifest("r", 1, version, version - 1, size, tensors)
    after = from_bytes(to_bytes(before))
    assert after == before and after.root == before.root == digest(text(before))


def test_the_root_knows_of_every_field() -> None:
    others = [
        GOOD._replace(run="other"),
        GOOD._replace(epoch=8),
        GOOD._replace(version=4),
        GOOD._replace(base=1),
        GOOD._replace(size=SIZE + 1),
        *(
            GOOD._replace(tensors=(TENSORS[0]._replace(**change), *TENSORS[1:]))
            for change in (
                {"name": "A"},
                {"shape": (5, 3)},
                {"dtype": "float16"},
                {"sharding": "model"},
                {"digest": bytes([1, *bytes(DIGEST - 1)])},
            )
        ),
    ]
    roots = {each.root for each in [GOOD, *others]}
    assert len(roots) == len(others) + 1


def test_every_flipped_bit_and_every_cut_is_seen() -> None:
    good = to_bytes(GOOD)
    for at in range(len(good)):
        for bit in (0, 5):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            with pytest.raises(ValueError, match="manifest"):
                from_bytes(bytes(bad))
        with pytest.raises(ValueError, match="manifest"):
            from_bytes(good[:at])
    with pytest.raises(ValueError, match="follows"):
        from_bytes(good + b"\0")


A = Tensor("a", (4,), "float32", 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": (A, A._replace(offset=64))}, "two tensors are named"),
        ({"tensors": (A._replace(name="__metadata__"),)}, "safetensors keeps that name"),
        ({"tensors": (A._replace(shape=(17,)), A._replace(name="b", offset=64))}, "within"),
        ({"tensors": (A._replace(offset=128),)}, "past the image"),
        ({"tensors": (A._replace(offset=4),)}, "multiple of 64"),
        ({"tensors": (A._replace(offset=-64),)}, "multiple of 64"),
        ({"tensors": (A._replace(shape=(-1,)),)}, "none negative"),
        ({"tensors": (A._replace(shape=(1 << 40, 1 << 40)),)}, "bytes from"),
        ({"tensors": (A._replace(dtype="object"),)}, "dtype"),
        ({"tensors": (A._replace(name=""),)}, "name"),
        ({"tensors": (A._replace(name="a\n"),)}, "name"),
        ({"tensors": (A._replace(digest=b"short"),)}, "digest"),
        ({"version": 3, "base": 3}, "a base is older"),
        ({"version": -1, "base": -2}, "version"),
        ({"run": ""}, "run"),
        ({"size": 0}, "image"),
    ],
)
def test_impossible_manifests_are_refused_going_out_and_coming_in(change: dict, words: str) -> None:
    bad = Manifest("run", 0, 5, -1, 128, (A,))._replace(**change)
    with pytest.raises(ValueError, match=words):
        to_bytes(bad)
    body = text(bad)
    with pytest.raises(ValueError, match=words):
        from_bytes(MAGIC + digest(body) + len(body).to_bytes(8, "little") + body)


@pytest.mark.parametrize(
    "change",
    [{"extra": 1}, {"epoch": True}, {"epoch": 1.0}, {"epoch": "1"}, {"tensors": {}}, {"tensors": [[1]]}, {"run": None}],
)
def test_other_forms_of_its_text_are_refused(change: dict) -> None:
    body = json.dumps({**json.loads(text(GOOD)), **change}, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ValueError, match="manifest"):
        from_bytes(MAGIC + digest(body) + len(body).to_bytes(8, "little") + body)
    check(GOOD)


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    found = {
        dtype: random.integers(0, 256, 6 * ITEMSIZES[dtype], np.uint8).view(numpy_dtype(dtype)).reshape(2, 3)
        for dtype in ITEMSIZES
        if dtype != "bool"
    }
    found |= {"bool": np.array([True, False]), "scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.int8)}
    return found | {
        "strided": np.arange(12, dtype=np.int16).reshape(3, 4).T,
        "large": np.arange(1 << 18, dtype=np.int32),
    }


@pytest.mark.parametrize("parts", [1, 3])
def test_an_image_holds_every_bit_of_its_tensors(parts: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    tensors = arrays()
    planned, size = packing.describe(tensors)
    image = np.zeros(size, np.uint8)
    with ThreadPoolExecutor(parts) as pool:
        found = packing.gather(tensors, planned, image, pool, parts)
        made = Manifest("run", 0, 0, -1, size, found)
        for name, view in views(made, image).items():
            assert view.shape == tensors[name].shape and view.dtype == tensors[name].dtype
            assert view.tobytes() == tensors[name].tobytes(), name
            assert digest(tensors[name].tobytes()) == next(each.digest for each in found if each.name == name)
        assert packing.verify(made, image, pool, parts) == []
        image[planned[3].offset] ^= 1
        assert packing.verify(made, image, pool, parts) == [planned[3].name]


@given(st.lists(st.integers(0, 1 << 20), max_size=12))
@settings(max_examples=20, deadline=None)
def test_images_that_arrive_in_any_pieces_are_verified(cuts: list[int]) -> None:
    tensors = arrays()
    planned, size = packing.describe(tensors)
    image = np.zeros(size, np.uint8)
    for tensor in planned:
        image[tensor.offset : tensor.end] = np.frombuffer(
            np.ascontiguousarray(tensors[tensor.name]).tobytes(), np.uint8
        )
    found = tuple(each._replace(digest=digest(image[each.offset : each.end])) for each in planned)
    for spoilt in (None, planned[0], planned[-1]):
        if spoilt is not None:
            image[spoilt.offset] ^= 4
        arrival = packing.Arrival(Manifest("run", 0, 0, -1, size, found))
        for cut in sorted(cut for cut in cuts if cut < size):
            arrival.arrived(image, cut)
        arrival.arrived(image, size)
        assert arrival.complete and arrival.damaged == ([] if spoilt is None else [spoilt.name])
        if spoilt is not None:
            image[spoilt.offset] ^= 4
