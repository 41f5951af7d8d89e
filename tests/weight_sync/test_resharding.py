"""Layouts and plans: whatever the layouts, what arrives equals NumPy's slices, once, in bounded buckets, balanced."""

from __future__ import annotations

from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.weight_sync import resharding
from longhaul.weight_sync.resharding import Box, Layout

Values = dict[str, np.ndarray]

DTYPES = ("float32", "bfloat16", "uint8")


# ---------------------------------------------------------------------------------------------------------- properties


@st.composite
def tiles(draw: st.DrawFn, shape: tuple[int, ...], most: int = 6) -> list[Box]:
    """Boxes that tile a shape: cut in two, at random places, again and again."""
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, most - 1))):
        i = draw(st.integers(0, len(boxes) - 1))
        axes = [axis for axis, (a, b) in enumerate(boxes[i]) if b - a > 1]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        a, b = boxes[i][axis]
        cut = draw(st.integers(a + 1, b - 1))
        box = boxes.pop(i)
        boxes += [(*box[:axis], span, *box[axis + 1 :]) for span in ((a, cut), (cut, b))]
    return boxes


@st.composite
def placed(draw: st.DrawFn, shapes: dict[str, tuple[tuple[int, ...], str]], ranks: int, whole: bool) -> Layout:
    """A random layout: tiles of each tensor on random ranks, with copies; with `whole`, each somewhere at least."""
    held: dict[str, list[tuple[int, Box]]] = {}
    for name, (shape, _) in shapes.items():
        boxes = draw(tiles(shape))[:ranks]
        owners = draw(st.permutations(range(ranks)))
        rest = owners[len(boxes) :]
        held[name] = [(rank, draw(st.sampled_from(boxes))) for rank in rest if draw(st.booleans())]
        if whole and len(boxes) == ranks:
            boxes = [tuple((0, size) for size in shape)] * ranks
        held[name] += list(zip(owners, boxes))
    return resharding.make(shapes, lambda name, _: held[name])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    sizes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
    shapes = {f"t{i}": (draw(sizes), draw(st.sampled_from(DTYPES))) for i in range(draw(st.integers(1, 3)))}
    source = draw(placed(shapes, 6, whole=True))
    # Copies may go to where boxes of another tiling are: any box is a fair thing to ask for.
    return source, draw(placed(shapes, 5, whole=False)), draw(st.sampled_from([4, 32, 10**9]))


def values(of: Layout) -> Values:
    """Every tensor with bytes of its own."""
    made = {}
    for i, tensor in enumerate(of.tensors):
        raw = np.random.default_rng(i).integers(0, 256, tensor.nbytes, np.uint8)
        made[tensor.name] = raw.view(np.dtype(tensor.dtype)).reshape(tensor.shape)
    return made


def cut(whole: Values, of: Layout) -> dict[int, Values]:
    """The parts of every rank, by NumPy's slices."""
    parts: dict[int, Values] = defaultdict(dict)
    for tensor in of.tensors:
        for rank, box in tensor.boxes:
            part = whole[tensor.name][tuple(slice(a, b) for a, b in box)]
            parts[rank][tensor.name] = np.array(part, order="C")
    return parts


def blank(parts: dict[int, Values]) -> dict[int, Values]:
    return {rank: {name: np.zeros_like(part) for name, part in held.items()} for rank, held in parts.items()}


def check(source: Layout, destination: Layout, bucket: int, **options: bool) -> resharding.Plan:
    """Properties of every plan."""
    made = resharding.plan(source, destination, bucket=bucket, **options)
    whole = values(source)
    wanted, found = cut(whole, destination), blank(cut(whole, destination))
    resharding.execute_numpy(made, cut(whole, source), found)
    written: dict[tuple[int, str], np.ndarray] = {
        (rank, name): np.zeros(part.nbytes, int) for rank, held in found.items() for name, part in held.items()
    }
    for move in made.moves:
        for runs in (move.taken, move.put):
            assert runs.starts().size * runs.length == move.nbytes
        for start in move.put.starts():
            written[move.destination, move.name][start : start + move.put.length] += 1
    for rank, held in wanted.items():
        for name, part in held.items():
            assert found[rank][name].tobytes() == part.tobytes(), (rank, name)
            assert (written[rank, name] == 1).all()
    for each in made.buckets:
        for end in ("source", "destination"):
            load: Counter[int] = Counter()
            for move in each:
                load[getattr(move, end)] += move.nbytes
            assert max(load.values()) <= bucket
    order = [tensor.name for tensor in destination.tensors]
    names = [order.index(move.name) for move in made.moves]
    assert names == sorted(names)
    return made


@settings(max_examples=80, deadline=None)
@given(pairs())
def test_arrived_shards_are_those_that_numpy_slices(given_pair: tuple[Layout, Layout, int]) -> None:
    check(*given_pair)


@settings(max_examples=40, deadline=None)
@given(pairs())
def test_a_rank_takes_from_itself_what_it_has(given_pair: tuple[Layout, Layout, int]) -> None:
    source, destination, bucket = given_pair
    check(source, destination, bucket, together=True)
    stays = resharding.plan(destination, destination, bucket=bucket, together=True)
    assert all(move.source == move.destination for move in stays.moves)
    assert stays.sent == stays.received == ()


# ------------------------------------------------------------------------------------------------------------- examples

MODEL = {
    "embedding": ((50, 16), "bfloat16"), "layers.0.up": ((16, 24), "bfloat16"), "layers.0.scale": ((16,), "float32"),
    "layers.0.down": ((24, 16), "bfloat16"), "temperature": ((), "float32"),
}  # fmt: skip


def by_name(name: str, shape: tuple[int, ...]) -> int | None:
    return {"up": 1, "down": 0}.get(name.split(".")[-1])


def test_from_fully_sharded_training_to_tensor_parallel_replicas() -> None:
    source = resharding.sharded(MODEL, 8)
    serving = resharding.sharded(MODEL, 4, by_name)
    made = check(source, resharding.replicas(serving, 3), 10**9)
    held = sum(resharding.volume(box) * t.itemsize for t in serving.tensors for _, box in t.boxes)
    assert made.nbytes == 3 * held  # no byte more than what the destinations hold
    assert [sum(1 for _ in resharding.plan(source, source).moves), resharding.plan(source, source).nbytes] == [
        sum(len(t.boxes) for t in source.tensors),
        sum(resharding.volume(box) * t.itemsize for t in source.tensors for _, box in t.boxes),
    ]


@pytest.mark.parametrize("speeds", [None, {0: 1.0, 1: 1.0, 2: 2.0, 3: 4.0}])
def test_copies_share_the_work_by_their_links(speeds: dict[int, float] | None) -> None:
    shapes = {f"layer{i}": ((64, 8 + i), "float32") for i in range(12)}
    bucket = 1024
    made = resharding.plan(resharding.replicated(shapes, 4), resharding.replicated(shapes, 3), speeds, bucket=bucket)
    seconds = [sent / (speeds or {}).get(rank, 1.0) for rank, sent in made.sent]
    assert len(seconds) == 4
    # Never further apart than one move on the slowest link takes.
    assert max(seconds) - min(seconds) <= bucket / min((speeds or {0: 1.0}).values())
    assert sum(sent for _, sent in made.sent) == made.nbytes == 3 * sum(64 * (8 + i) * 4 for i in range(12))


def test_a_box_that_no_source_holds_is_named() -> None:
    shapes = {"kernel": ((4, 6), "float32")}
    half = resharding.make(shapes, lambda *_: [(0, ((0, 2), (0, 6))), (1, ((2, 4), (0, 3)))])
    with pytest.raises(ValueError, match=r"kernel: no source holds \[2:4, 3:6\], which a destination needs"):
        resharding.plan(half, resharding.replicated(shapes, 1))
    with pytest.raises(ValueError, match="bias: no source holds a tensor of this name"):
        resharding.plan(half, resharding.replicated({"bias": ((4,), "float32")}, 1))
    with pytest.raises(ValueError, match="kernel: dtype float32 at the source, bfloat16 at the destination"):
        resharding.plan(half, resharding.replicated({"kernel": ((4, 6), "bfloat16")}, 1))
    with pytest.raises(ValueError, match=r"rank 0 holds \[0:5\], which is no part of the shape \(4,\)"):
        resharding.make({"bias": ((4,), "float32")}, lambda *_: [(0, ((0, 5),))])
    with pytest.raises(ValueError, match="a bucket of 3 bytes; it must hold at least one element, 4 bytes"):
        resharding.plan(half, half, bucket=3)
    with pytest.raises(ValueError, match="named twice"):
        resharding.make({"bias": ((4,), "float32")}, lambda *_: 2 * [(0, ((0, 4),))])


def test_plans_are_remembered_by_what_the_layouts_are() -> None:
    first = resharding.plan(resharding.sharded(MODEL, 5), resharding.replicated(MODEL, 2))
    assert resharding.plan(resharding.sharded(MODEL, 5), resharding.replicated(MODEL, 2)) is first
    assert resharding.plan(resharding.sharded(MODEL, 4), resharding.replicated(MODEL, 2)) is not first
    assert resharding.plan(resharding.sharded(MODEL, 5, 1), resharding.replicated(MODEL, 2)) is not first


def test_runs_are_as_long_as_memory_allows() -> None:
    whole = ((0, 4), (0, 6), (0, 8))
    assert resharding.runs(((1, 3), (0, 6), (0, 8)), whole, 2) == resharding.Runs(96, 192, ())
    assert resharding.runs(((1, 3), (2, 5), (0, 8)), whole, 2) == resharding.Runs(128, 48, ((2, 96),))
    assert resharding.runs(((1, 3), (2, 4), (3, 4)), whole, 2) == resharding.Runs(134, 2, ((2, 96), (2, 16)))
    assert resharding.runs((), (), 4) == resharding.Runs(0, 4, ())


def test_layouts_of_jax_are_where_its_shards_are() -> None:
    mesh = meshes.make_mesh(2, 2)
    specs = {"a": PartitionSpec("data", "model"), "b": PartitionSpec(None, "model"), "c": PartitionSpec()}
    shapes = {"a": (4, 6), "b": (2, 8), "c": ()}
    generator = np.random.default_rng(0)
    made_of = {name: jnp.asarray(generator.random(shape), jnp.bfloat16) for name, shape in shapes.items()}
    arrays = {name: jax.device_put(made_of[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}
    made = resharding.of_jax(arrays)
    parts = {
        shard.device.id: {name: np.asarray(a.addressable_data(i)) for name, a in arrays.items()}
        for i, shard in enumerate(arrays["a"].addressable_shards)
    }
    whole = {name: np.asarray(array) for name, array in arrays.items()}
    target = resharding.sharded({n: (a.shape, a.dtype) for n, a in arrays.items()}, 3)
    found = blank(cut(whole, target))
    resharding.execute_numpy(resharding.plan(made, target), parts, found)
    for rank, held in cut(whole, target).items():
        for name, part in held.items():
            assert found[rank][name].tobytes() == part.tobytes()


def test_the_source_that_is_done_first_is_found_without_asking_all() -> None:
    """Against the definition, over sets of ranks that overlap, with links of several speeds."""
    draw = np.random.default_rng(3)
    links = {rank: float(draw.choice([1.0, 2.0, 3.5])) for rank in range(6)}
    choose, busy = resharding._Chooser(links), np.zeros(8)
    for _ in range(400):
        ranks = tuple(sorted(draw.choice(8, draw.integers(1, 8), replace=False).tolist()))
        nbytes = int(draw.integers(1, 50)) * 7  # so that sums are exact in binary
        wanted = min(ranks, key=lambda rank: (busy[rank] + nbytes / links.get(rank, 1.0), rank))
        assert choose(ranks, nbytes) == wanted
        busy[wanted] += nbytes / links.get(wanted, 1.0)


def test_many_small_copies_between_many_ranks_are_shared_out_evenly() -> None:
    shapes = {f"layers.{i}.norm": ((512,), "bfloat16") for i in range(100)}
    found = resharding.plan(resharding.replicated(shapes, 256), resharding.replicated(shapes, 256))
    assert {sent for _, sent in found.sent} == {received for _, received in found.received} == {100 * 1024}


def test_uneven_parts_are_the_first_ones_larger_and_small_tensors_leave_ranks_empty() -> None:
    made = resharding.sharded({"a": ((10, 3), "uint8"), "b": ((2,), "uint8"), "c": ((), "uint8")}, 4)
    a, b, c = made.tensors
    assert [box[0] for _, box in a.boxes] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert b.boxes == ((0, ((0, 1),)), (1, ((1, 2),)))
    assert c.boxes == tuple((rank, ()) for rank in range(4))


def test_a_sample_has_runs_of_the_same_lengths_between_the_same_ranks() -> None:
    shapes: dict[str, tuple[tuple[int, ...], str]] = {"table": ((640, 64), "bfloat16"), "one": ((), "float32")}
    for i in range(8):
        shapes |= {f"{i}.kernel": ((96, 64), "bfloat16"), f"{i}.bias": ((64,), "bfloat16")}
    held = resharding.sharded(shapes, 4)
    for needed in (resharding.sharded(shapes, 2, 1), resharding.replicas(resharding.sharded(shapes, 2), 2)):
        few, some = (resharding.sample(held, needed, share) for share in (0.0, 0.25))
        assert resharding.sample(held, needed, 1.0) == (held, needed)
        assert few[0].nbytes < some[0].nbytes and some[0].nbytes == pytest.approx(held.nbytes / 4, rel=0.02)

        def forms(source: resharding.Layout, destination: resharding.Layout) -> set[object]:
            moves = list(resharding.plan(source, destination).moves)
            between = {(move.source, move.destination) for move in moves}
            lengths = {(each.length, bool(each.axes)) for move in moves for each in (move.taken, move.put) if each.axes}
            return between | lengths

        assert forms(*some) == forms(held, needed) >= forms(*few)
        for sampled, layout in zip(some, (held, needed), strict=True):
            whole = {tensor.name: tensor for tensor in layout.tensors}
            for rank in layout.ranks:
                arrays = {
                    name: np.arange(resharding.volume(box)).reshape([b - a for a, b in box])
                    for name, box in ((name, dict(each.boxes)[rank]) for name, each in whole.items())
                }
                found = resharding.rows(sampled, rank, arrays)
                for tensor in sampled.tensors:
                    first = arrays[tensor.name].reshape(-1)[: found[tensor.name].size]
                    assert found[tensor.name].shape == tuple(b - a for a, b in dict(tensor.boxes)[rank])
                    assert found[tensor.name].reshape(-1).tolist() == first.tolist()
    with pytest.raises(ValueError, match="share is 2"):
        resharding.sample(held, held, 2.0)
