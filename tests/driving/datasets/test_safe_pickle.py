"""A pickle can run anything; ours runs nothing, and reads what scenarios are made of."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.driving.datasets import readers, safe_pickle, scenarionet
from longhaul.driving.datasets.log import BadData, Malformed
from longhaul.driving.datasets.safe_pickle import Array, Unpickler, unpickle, weigh
from tests.helpers import log_files as made
from tests.helpers.damaged_inputs import Call, bomb


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_of_a_malicious_pickle_runs(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    document = made.scenarionet(made.make_log(11, 5))
    for bad in (
        Call(os.system, (f"touch {mark}",)),
        Call(eval, (f"open({str(mark)!r}, 'w')",)),
        Call(exec, (f"open({str(mark)!r}, 'w')",)),
        Call(open, (str(mark), "w")),
        Call(__import__, ("os",)),
        Call(pickle.loads, (pickle.dumps(Call(os.mkdir, (str(mark),))),)),
        Call(np.fromfile, (str(mark),)),
        Path(mark),
    ):
        path = tmp_path / "a.pkl"
        path.write_bytes(pickle.dumps(document | {"metadata": bad}, protocol=protocol))
        if protocol < 2:  # no such file is taken for a pickle at all
            with pytest.raises(BadData):
                list(readers.read(path))
            with pytest.raises(Malformed, match="which no scenario needs and which is never run"):
                scenarionet.read(path.read_bytes())
        else:
            with pytest.raises(BadData, match=r"it asks for .* which no scenario needs and which is never run"):
                list(readers.read(path))
        assert not mark.exists()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


@pytest.mark.parametrize(
    "program",
    [
        opcodes(b"cbuiltins\neval\n", text("1"), b"\x85R"),
        opcodes(text("os"), text("system"), b"\x93", text("true"), b"\x85R"),
        opcodes(text("numpy"), text("ndarray.tofile"), b"\x93"),  # a dotted name
        opcodes(b"(ios\nsystem\n"),  # INST
        opcodes(b"(", b"cos\nsystem\n", b"o"),  # OBJ
        opcodes(b"cnumpy\ndtype\n", b")\x81"),  # NEWOBJ
        opcodes(b"cnumpy\ndtype\n", b")}\x92"),  # NEWOBJ_EX
        opcodes(text("a"), b"Q"),  # BINPERSID
        opcodes(b"\x82\x01"),  # EXT1
        opcodes(b"\x96" + struct.pack("<Q", 1 << 40)),  # BYTEARRAY8 of a terabyte
        opcodes(b"\x8e" + struct.pack("<Q", 1 << 40)),  # BINBYTES8 of a terabyte
        opcodes(b"\x8d" + struct.pack("<Q", 1 << 62)),  # BINUNICODE8 of far more
        opcodes(b"\x95" + struct.pack("<Q", 1 << 62)),  # a frame
        opcodes(b"\x8b" + struct.pack("<i", -5)),  # LONG4 of negative length
        opcodes(b"h\x05"),  # a memo that is not there
        opcodes(b"ccollections\ndefaultdict\n", b"}b"),  # a state for a class
        opcodes(b"ccollections\ndefaultdict\n", b")R", b"}", text("clear"), b"Ns", b"b"),  # and for a dictionary
        opcodes(b"cnumpy\nndarray\n", b"N}", text("__init__"), b"Ns\x86b"),  # attributes set on one of our classes
        opcodes(b"0"),
        b"",
        b"\x80\x04",
        b"\x80\x09N.",
    ],
)
def test_instructions_that_no_scenario_needs(program: bytes) -> None:
    names = {name: dict(vars(each)) for name, each in vars(safe_pickle).items() if isinstance(each, type)}
    with pytest.raises(Malformed):
        unpickle(program)
    assert names == {name: dict(vars(each)) for name, each in vars(safe_pickle).items() if isinstance(each, type)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_and_arrays_come_back(protocol: int) -> None:
    counts: dict[str, int] = collections.defaultdict(int)
    counts["a"] = 3
    value = {
        "counts": counts,
        "ordered": collections.OrderedDict(x=1),
        "plain": [None, True, 1, -(2**70), 1.5, "text", b"bytes", (1, 2), {"set"}],
        "scalar": np.float32(2.5),
        "integer": np.int64(-7),
    }
    arrays = {
        "f4": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f8": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3)),
        "text": np.array(["ab", "c"]),
        "point": np.array(4.0),
    }
    found = unpickle(pickle.dumps(value | arrays, protocol=protocol))
    assert found["counts"] == {"a": 3}
    assert found["ordered"] == {"x": 1}
    assert found["plain"][:-1] == value["plain"][:-1]
    assert float(found["scalar"]) == 2.5
    assert int(found["integer"]) == -7
    for name, array in arrays.items():
        assert isinstance(found[name], Array)
        np.testing.assert_array_equal(found[name].real(), array)
        assert found[name].plain() == array.tolist()
    objects = unpickle(pickle.dumps(np.array(["a", None], object), protocol=protocol))
    assert objects.plain() == ["a", None]
    with pytest.raises(Malformed, match="something else than numbers"):
        objects.real()


def forged(shape: Any, dtype: str, data: Any) -> Array:
    """An array with parts that no array has."""
    buffer = io.BytesIO()
    state = (1, shape, np.dtype(dtype), False, data)
    whole = pickle.dumps(np.zeros(1), protocol=3)
    assert whole.endswith(b"b.")
    pickle.Pickler(buffer, protocol=3).dump(state)
    start = whole.index(b"R")  # up to the call of _reconstruct; what follows is its state
    return unpickle(whole[: start + 1] + buffer.getvalue()[2:-1] + b"b.")


def test_arrays_that_do_not_fit_together() -> None:
    good = forged((2, 2), "<f8", bytes(32))
    assert good.real().shape == (2, 2)
    for shape, dtype, data in [
        ((2, 3), "<f8", bytes(32)),
        ((1 << 62, 4), "<f8", bytes(32)),
        ((-1,), "<f8", bytes(32)),
        (("a",), "<f8", bytes(32)),
        (4, "<f8", bytes(32)),
        ((4,), "<f8", bytes(31)),
        ((4,), "O", bytes(32)),  # pointers out of a file's bytes
        ((4,), "<M8[s]", bytes(32)),
        ((4,), "<c8", bytes(32)),
        ((2,), "<f8", [1.0, 2.0]),
    ]:
        with pytest.raises(Malformed):
            forged(shape, dtype, data).real()


def test_references_cannot_stand_for_more_than_there_is_memory() -> None:
    log = made.make_log(11, 5)
    document = made.scenarionet(log)
    document["map_features"]["101"] = {"type": "LANE_FREEWAY", "polyline": list(bomb(40))}
    with pytest.raises(Malformed):
        scenarionet.read(pickle.dumps(document))
    row = [0.0, 0.0] * 5000
    document["map_features"]["101"] = {"type": "LANE_FREEWAY", "polyline": [row] * 100_000}
    with pytest.raises(Malformed, match="stands for"):
        scenarionet.read(pickle.dumps(document))
    document = made.scenarionet(log)
    one = document["tracks"]["3"]
    document["tracks"] = {str(index): one for index in range(1000)}
    document["length"] = 1 << 20
    with pytest.raises(Malformed, match="1000 tracks over 1048576 steps"):
        scenarionet.read(pickle.dumps(document))
    line = np.zeros((1 << 14, 3))
    document = made.scenarionet(log)
    document["map_features"] = {str(index): {"type": "CROSSWALK", "polygon": line} for index in range(300)}
    with pytest.raises(Malformed, match="more than 4194304 points"):
        scenarionet.read(pickle.dumps(document))


def test_no_key_takes_for_ever_to_hash_and_no_name_to_be_written_out() -> None:
    pair = b"K\x00" + b"2\x86" * 45  # a number, then 45 times: the pair of what is there and itself
    for program in (
        b"}" + pair + b"K\x01s.",
        b"}(" + pair + b"K\x01u.",
        b"(" + pair + b"K\x01d.",
        b"\x8f(" + pair + b"\x90.",
    ):
        with pytest.raises(Malformed, match="neither a number nor text"):
            unpickle(b"\x80\x04" + program)
    with pytest.raises(Malformed, match="neither a number nor text"):
        unpickle(b"\x80\x04(" + pair + b"\x91.")
    document = made.scenarionet(made.make_log(11, 5))
    for path in (("id",), ("metadata", "sdc_id"), ("tracks", "7", "type"), ("map_features", "101", "entry_lanes")):
        holder: Any = document
        for key in path[:-1]:
            holder = holder[key]
        before, holder[path[-1]] = holder[path[-1]], bomb(40)
        with pytest.raises(Malformed, match="stands for"):
            scenarionet.read(pickle.dumps(document))
        holder[path[-1]] = before
    assert scenarionet.read(pickle.dumps(document)).id == "straight"


def test_a_shape_that_is_none_is_not_written_out() -> None:
    array = np.arange(4.0)
    program = pickle.dumps(array, 2)
    assert unpickle(program).real().tolist() == [0, 1, 2, 3]
    forged_ = Array()
    forged_.__setstate__((1, (bomb(40),), None, False, b""))
    with pytest.raises(Malformed):
        forged_.real()


def test_a_list_within_itself_and_repeated_encoding_are_refused() -> None:
    with pytest.raises(Malformed, match="holds itself"):
        unpickle(b"\x80\x04]q\x00h\x00a.")
    encode = b"c_codecs\nencode\nq\x00X\x40\x42\x0f\x00" + b"x" * 1_000_000 + b"q\x01"
    calls = b"h\x00h\x01\x85R" * 20
    with pytest.raises(Malformed, match="again and again"):
        unpickle(b"\x80\x04](" + encode + calls + b"e.")
    assert len(unpickle(b"\x80\x04](" + encode + b"h\x00h\x01\x85Re.")[-1]) == 1_000_000


@pytest.mark.parametrize(
    "made",
    [
        b"c_codecs\nencode\n",
        b"cnumpy\nndarray\n",
        b"cnumpy\ndtype\n",
        b"ccollections\nOrderedDict\n)R",
        b"}",
        b"]",
        b"K\x00",
    ],
)
def test_only_arrays_take_a_state(made: bytes) -> None:
    """Of a function or a class of ours, BUILD would set attributes."""
    state = {"__setstate__": 1, "answer": 42}
    with pytest.raises(Malformed, match="attributes for something else than an array"):
        unpickle(b"\x80\x04" + made + pickle.dumps(state, 4)[2:-1] + b"b.")
    assert not hasattr(Unpickler._latin, "answer")


def test_a_document_weighs_what_it_stands_for() -> None:
    shared = [1, 2, 3]
    assert weigh({"a": shared, "b": shared}) == 1 + 2 + 2 * 4
    assert weigh(bomb(20)) == 2**21 - 1
    assert weigh(["x" * 80, b"y" * 16]) == 1 + 11 + 3
    assert weigh(5) == 1


def test_a_document_has_a_depth() -> None:
    """Pairs of one another are refused by their depth: before, each of 300,000 was looked at (1.5 s)."""
    pairs = b"\x80\x04)%b."
    assert unpickle(pairs % (b"\x85" * 99)) is not None
    with pytest.raises(Malformed, match="more than 100 lists and dicts within one another"):
        unpickle(pairs % (b"2\x86" * 1000))
