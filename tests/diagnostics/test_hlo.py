"""Facts that are read from compiled programs: collectives, their bytes, trips and groups, and calls of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul.diagnostics import hlo
from longhaul.diagnostics.hlo import Crossing
from longhaul.runtime import mesh as meshes

EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(meshes.DATA)


def text_of(function: Callable[..., Any], *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def on_two(function: Callable[..., Any], *, out: PartitionSpec = EVERYWHERE) -> Callable[..., Any]:
    """`function` of an array that is split over two devices."""
    return meshes.per_shard(function, meshes.make_mesh(2), (SPLIT,), out)


def test_a_mean_is_one_all_reduce_of_its_bytes() -> None:
    text = text_of(on_two(lambda x: meshes.mean_over_data(jnp.sum(x, axis=0))), jnp.ones((4, 7)))
    assert hlo.crossings(text) == [Crossing("all-reduce", 7 * 4, (), (0, 1))]
    assert hlo.host_calls(text) == []


def test_operations_in_loops_count_once_a_trip() -> None:
    """Two loops of known lengths in one of unknown length; XLA unrolls none of these."""

    def steps(x: jax.Array, n: jax.Array) -> jax.Array:
        def inner(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(meshes.mean_over_data(jnp.sin(y) @ y)), None

        def outer(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.scan(inner, y, None, length=5)[0], None

        return jax.lax.fori_loop(0, n, lambda i, y: jax.lax.scan(outer, y, None, length=7)[0], x)

    program = meshes.per_shard(steps, meshes.make_mesh(2), (EVERYWHERE, EVERYWHERE), EVERYWHERE)
    (found,) = hlo.crossings(text_of(program, jnp.eye(6), jnp.int32(3)))
    assert found == Crossing("all-reduce", 6 * 6 * 4, (None, 7, 5), (0, 1))
    assert found.times() == 35


def test_runs_are_counted_without_a_trace() -> None:
    def inner(y: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.sin(y) @ y), None

    def steps(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, n, lambda i, y: jax.lax.scan(inner, y, None, length=7)[0], x)

    text = text_of(steps, jnp.eye(64), jnp.int32(3))
    program, runs = hlo.read(text), hlo.runs(text)
    products = {name: runs.get(name) for name, each in program.items() if each.operations and each.opcode != "call"}
    assert set(products.values()) <= {7.0, None}  # None: inside a fusion
    assert sum(count or 0.0 for count in products.values()) == 7.0


def test_a_branch_takes_its_share_of_the_runs() -> None:
    def chosen(i: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.switch(i, [lambda x: x @ x, lambda x: x @ (x @ x), jnp.sin, jnp.cos], x)

    text = text_of(chosen, jnp.int32(1), jnp.eye(64))
    program, runs = hlo.read(text), hlo.runs(text)
    dots = [runs[name] for name, each in program.items() if each.operations and name in runs and each.opcode != "call"]
    assert dots == [0.25, 0.25, 0.25]


def test_each_kind_of_collective_is_found_with_the_bytes_of_its_result() -> None:
    x = jnp.ones((4, 2, 3))
    gathered = text_of(on_two(lambda x: jax.lax.all_gather(x[0], meshes.DATA)), x)
    assert [(each.operation, each.bytes) for each in hlo.crossings(gathered)] == [("all-gather", 2 * 6 * 4)]
    swapped = text_of(on_two(lambda x: jax.lax.ppermute(x, meshes.DATA, [(0, 1), (1, 0)]), out=SPLIT), x)
    assert [(each.operation, each.bytes) for each in hlo.crossings(swapped)] == [("collective-permute", 48)]
    dealt = text_of(on_two(lambda x: jax.lax.all_to_all(x[0], meshes.DATA, 0, 0, tiled=True), out=SPLIT), x)
    assert "all-to-all" in {each.operation for each in hlo.crossings(dealt)}


def test_a_call_of_the_host_is_found_wherever_it_stands() -> None:
    def told(x: jax.Array) -> jax.Array:
        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            jax.debug.callback(lambda v: None, y[0])
            return jnp.sin(y)

        return jax.lax.fori_loop(0, 9, step, x)

    def asked(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.lax.cond(x[0] > 0, lambda v: jax.pure_callback(np.sin, shape, v), lambda v: v, x)

    for function in (told, asked):
        (name,) = hlo.host_calls(text_of(function, jnp.ones(3)))
        assert "callback" in name
    assert hlo.host_calls(text_of(lambda x: jnp.sort(x) @ x, jnp.ones(30))) == []


GPU = """\
HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %y = f32[] add(%x, %x)
}

%inside (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[16]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}

%body (t: (s32[], bf16[1024,4])) -> (s32[], bf16[1024,4]) {
  %t = (s32[], bf16[1024,4]{1,0:T(8,128)}) parameter(0)
  %v = bf16[1024,4]{1,0} get-tuple-element(%t), index=1
  %ar = bf16[1024,4]{1,0} all-reduce-start(%v), to_apply=%add
  %done = bf16[1024,4]{1,0} all-reduce-done(%ar)
  %home = bf16[1024,4]{1,0:S(5)} copy-start(%done)
  ROOT %out = (s32[], bf16[1024,4]) tuple(%t, %done)
}

%condition (t: (s32[], bf16[1024,4])) -> pred[] {
  %t = (s32[], bf16[1024,4]) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[8], b: (s32[], bf16[1024,4])) -> f32[16] {
  %a = f32[8]{0} parameter(0)
  %b = (s32[], bf16[1024,4]) parameter(1)
  %w = (s32[], bf16[1024,4]) while(%b), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"},"other":1}
  %ags = ((f32[8]{0}), f32[16]{0}) async-start(%a), calls=%inside
  %agd = f32[16]{0} async-done(%ags), calls=%inside
  %pair = (f32[8]{0}, f32[16]{0}) all-gather-start(%a), dimensions={0}
  %s = (f32[8]{0}, u32[], token[]) send(%a, %tok), channel_id=3, is_host_transfer=true
  ROOT %r = f32[16]{0} all-gather-done(%pair)
}
"""
"""As XLA writes programs for GPUs: operations are started and awaited apart, and may stand in a computation apart."""


def test_operations_that_are_started_apart_count_once() -> None:
    assert hlo.crossings(GPU) == [
        Crossing("all-reduce", 1024 * 4 * 2, (12,)),
        Crossing("all-gather", 64, (), (0, 1)),
        Crossing("all-gather", 64, ()),
    ]
    assert hlo.host_calls(GPU) == ["copy-start to the host's memory", "send of the host"]


@pytest.mark.parametrize(
    ("groups", "first", "over"),
    [
        ("{{0,2},{1,3}}", (0, 2), True),
        ("{{0,1},{2,3}}", (0, 1), False),
        ("[2,2]<=[4]", (0, 1), False),
        ("[2,2]<=[2,2]T(1,0)", (0, 2), True),
        ("[1,4]<=[4]", (0, 1, 2, 3), True),
        ("mesh['a'=2,'b'=2] {'a'}", (0, 2), True),
        ("mesh['a'=2,'b'=2] {'b'}", (0, 1), False),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", (0, 1), False),
        ("mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b','c'}", (0, 2, 1, 3), True),
        ("{}", (), True),  # all
    ],
)
def test_who_meets_in_a_collective_is_read(groups: str, first: tuple[int, ...], over: bool) -> None:
    """And whether they are of different shards, where two devices side by side make one."""
    line = f"%r = f32[2]{{0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add"
    (found,) = hlo.crossings(f"ENTRY %main (a: f32[2]) -> f32[2] {{\n  ROOT {line}\n}}\n")
    assert found == Crossing("all-reduce", 8, (), first)
    assert found.over_shards(2) is over
    assert found.over_shards(1)


def test_a_type_has_the_bytes_of_its_elements() -> None:
    assert hlo.size("(f32[4]{0}, pred[], /*index=2*/bf16[2,3]{1,0:T(8,128)(2,1)})") == 16 + 1 + 12
    assert hlo.size("f8e4m3fn[10]") == 10
    assert hlo.size("(s4[3], token[], u32[])") == 2 + 4


SCATTERS = """\
HloModule jit_f, is_scheduled=true

%take_new (old: f32[], new: f32[]) -> f32[] {
  %old = f32[] parameter(0)
  ROOT %new = f32[] parameter(1)
}

%change (map: f32[1000,64], where: s32[10,2], what: f32[10], whole: f32[50]) -> f32[1000,64] {
  %map = f32[1000,64]{1,0} parameter(0)
  %where = s32[10,2]{1,0} parameter(1)
  %what = f32[10]{0} parameter(2)
  %whole = f32[50]{0} parameter(3)
  %twice = f32[10]{0} add(%what, %what)
  ROOT %scatter.1 = f32[1000,64]{1,0} scatter(%map, %where, %twice), to_apply=%take_new
}

%change_two (a: f32[1000], b: f32[1000], where: s32[10], x: f32[10], y: f32[10]) -> (f32[1000], f32[1000]) {
  %a = f32[1000]{0} parameter(0)
  %b = f32[1000]{0} parameter(1)
  %where.1 = s32[10]{0} parameter(2)
  %x = f32[10]{0} parameter(3)
  %y = f32[10]{0} parameter(4)
  ROOT %scatter.2 = (f32[1000]{0}, f32[1000]{0}) scatter(%a, %b, %where.1, %x, %y), to_apply=%take_new
}

%read_too (map.1: f32[1000,64], what.1: f32[10], where.2: s32[10,2]) -> f32[1000,64] {
  %map.1 = f32[1000,64]{1,0} parameter(0)
  %what.1 = f32[10]{0} parameter(1)
  %where.2 = s32[10,2]{1,0} parameter(2)
  %sum = f32[1000,64]{1,0} add(%map.1, %map.1)
  ROOT %scatter.3 = f32[1000,64]{1,0} scatter(%sum, %where.2, %what.1), to_apply=%take_new
}

ENTRY %main (m: f32[1000,64], w: s32[10,2], n: f32[10], o: f32[50], c: f32[1000], v: s32[10]) -> f32[1000,64] {
  %m = f32[1000,64]{1,0} parameter(0)
  %w = s32[10,2]{1,0} parameter(1)
  %n = f32[10]{0} parameter(2)
  %o = f32[50]{0} parameter(3)
  %c = f32[1000]{0} parameter(4)
  %v = s32[10]{0} parameter(5)
  %one = f32[1000,64]{1,0} fusion(%m, %w, %n, %o), kind=kInput, calls=%change
  %two = (f32[1000]{0}, f32[1000]{0}) fusion(%c, %c, %v, %n, %n), kind=kInput, calls=%change_two
  %alone = f32[1000,64]{1,0} scatter(%one, %w, %n), to_apply=%take_new
  ROOT %three = f32[1000,64]{1,0} fusion(%alone, %n, %w), kind=kInput, calls=%read_too
}
"""
"""As XLA writes programs for GPUs: a scatter is fused with what makes its updates, and may have several operands."""


def test_what_a_fusion_changes_in_place_counts_with_its_changes_alone() -> None:
    program = hlo.read(SCATTERS)
    updates, indices, row, whole = 4 * 10, 4 * 10 * 2, 4 * 10, 4 * 1000 * 64
    assert program["one"].bytes == updates + indices + row + 4 * 50, "written; read: where, what, a whole operand"
    assert program["two"].bytes == 2 * updates + 4 * 10 + 2 * row
    assert program["alone"].bytes == 2 * updates
    assert program["three"].bytes == updates + whole + row + indices, "what is read as a whole counts as a whole"
