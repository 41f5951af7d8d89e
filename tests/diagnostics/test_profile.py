"""A compiled program's text, a trace of its run, and what `longhaul profile` makes of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longhaul.cli.main import main
from longhaul.diagnostics import chips, hlo, profile
from longhaul.diagnostics.profile import Event

TEXT = """HloModule jit_run, is_scheduled=true

%fused_slice (param_0: f32[100,64], param_1: s32[]) -> f32[1,64] {
  %param_0 = f32[100,64]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %dynamic-slice.1 = f32[1,64]{1,0} dynamic-slice(%param_0, %param_1, %param_1), dynamic_slice_sizes={1,64}
}

%fused_write (param_0.1: f32[100,64], param_1.1: f32[1,64], param_2: s32[]) -> f32[100,64] {
  %param_0.1 = f32[100,64]{1,0} parameter(0)
  %param_1.1 = f32[1,64]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  ROOT %dus = f32[100,64]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %param_2)
}

%fused_dot (param_0.2: f32[8,4], param_1.2: f32[4,16]) -> f32[8,16] {
  %param_0.2 = f32[8,4]{1,0} parameter(0)
  %param_1.2 = f32[4,16]{1,0} parameter(1)
  ROOT %d = f32[8,16]{1,0} dot(%param_0.2, %param_1.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(run)/learning/dot_general"}
}

ENTRY %main (a: f32[100,64], b: f32[1,64], i: s32[], x: f32[8,4], w: f32[4,16]) -> f32[8,16] {
  %a = f32[100,64]{1,0} parameter(0)
  %b = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %x = f32[8,4]{1,0} parameter(3)
  %w = f32[4,16]{1,0} parameter(4)
  %slice_fusion = f32[1,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(run)/environment/slice"}
  %write_fusion = f32[100,64]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused_write
  %copy.1 = f32[8,4]{0,1} copy(%x)
  %all-reduce = (f32[16]{0}, /*index=1*/f32[3]{0}) all-reduce(%b, %b), channel_id=1, to_apply=%fused_dot
  %gemm = (f32[8,16]{1,0}, s8[1024]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %dot_fusion = f32[8,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused_dot
}
"""  # noqa: E501


def test_operations_and_bytes_of_instructions_are_those_of_their_shapes() -> None:
    found = hlo.read(TEXT)
    assert found["dot_fusion"].operations == found["gemm"].operations == 2 * 8 * 16 * 4
    assert found["dot_fusion"].bytes == 4 * (8 * 4 + 4 * 16 + 8 * 16)
    assert found["slice_fusion"].bytes == 4 * (64 + 64) + 4  # of the hundred rows one is read, one written
    assert found["write_fusion"].bytes == 4 * (64 + 64) + 4  # in place
    assert found["all-reduce"].bytes == 4 * (16 + 3) + 2 * 4 * 64
    assert found["a"].bytes == 0


def test_an_instruction_knows_its_scope_and_part() -> None:
    found = hlo.read(TEXT)
    parts = {name: profile.part(found[name]) for name in ("slice_fusion", "dot_fusion", "copy.1", "all-reduce")}
    assert parts == {
        "slice_fusion": "environment", "dot_fusion": "learning", "copy.1": "copies", "all-reduce": "collectives",
    }  # fmt: skip
    assert profile.part(found["write_fusion"]) == profile.part(None) == "other"


def test_kernels_of_a_cuda_graph_count_for_their_instructions() -> None:
    """As an H100 told them: an event of a graph is named as its kernel, with underscores; others stay as they are."""
    named = ["loop_add_fusion_17", "copy_1", "copy.1", "memcpy32_post"]
    found = [Event(name, 0, float(i), i + 0.5) for i, name in enumerate(named)]
    told = profile.attributed(found, ["loop_add_fusion.17", "copy.1"])
    assert [event.instruction for event in told] == ["loop_add_fusion.17", "copy.1", "copy.1", "memcpy32_post"]
    assert [event[1:] for event in told] == [event[1:] for event in found]


def test_a_real_program_counts_its_products() -> None:
    def work(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(carried: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("inference"):
                return jnp.tanh(carried @ w), None

        return jax.lax.scan(step, x, None, length=7)[0]

    x, w = jnp.ones((32, 48)), jnp.ones((48, 48))
    text = jax.jit(work).lower(x, w).compile().as_text()
    assert text is not None
    found = [each for each in hlo.read(text).values() if each.operations and each.opcode != "call"]
    outer = [each for each in found if each.opcode == "fusion"] or found
    assert sum(each.operations for each in outer) == 2 * 32 * 48 * 48  # once: how often, the trace tells
    assert {profile.part(each) for each in outer} == {"inference"}


def test_time_is_shared_among_parts_and_gaps() -> None:
    program = hlo.read(TEXT)
    found = [
        Event("slice_fusion", 0, 0.0, 2.0), Event("dot_fusion", 0, 3.0, 6.0), Event("copy.1", 0, 6.0, 7.0),
        Event("dot_fusion", 1, 0.0, 5.0), Event("all-reduce", 1, 5.0, 10.0),
    ]  # fmt: skip
    read = profile.reading(found, program)
    assert read["shares"] == pytest.approx(
        {
            "environment": 2 / 17, "inference": 0.0, "learning": 8 / 17, "collectives": 5 / 17, "copies": 1 / 17,
            "other": 0.0, "gaps": 1 / 17,
        }
    )  # fmt: skip
    assert read["operations"] == 2 * 2 * 8 * 16 * 4
    assert [each["instruction"] for each in read["longest"]][:2] == ["dot_fusion", "all-reduce"]


def test_instructions_that_overlap_share_their_time() -> None:
    program = hlo.read(TEXT)
    found = [Event("slice_fusion", 0, 0.0, 4.0), Event("dot_fusion", 0, 0.0, 4.0)]
    shares = profile.reading(found, program)["shares"]
    assert (shares["environment"], shares["learning"], shares["gaps"]) == pytest.approx((0.5, 0.5, 0.0))


def test_a_trace_without_the_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction of the program"):
        profile.reading([], hlo.read(TEXT))


def test_the_roofline_is_the_slower_of_both_bounds() -> None:
    chip = chips.Chip("toy", 200.0, 100.0, 10.0, 1.0, 1.0, 1, 0.0)
    found = profile.roofline(operations=400.0, moved=20.0, seconds=4.0, chip=chip, devices=2)
    assert found["share_of_peak_operations"] == pytest.approx(0.5)
    assert found["share_of_peak_bytes"] == pytest.approx(0.25)
    assert found["bound_by"] == "operations" and found["operations_per_byte"] == 20.0


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("TPU v4", "tpu-v4"), ("TPU v5 lite", "tpu-v5e")],
)
def test_chips_are_known_by_what_jax_calls_them(kind: str, name: str) -> None:
    chip = chips.listed(kind)
    assert chip is not None and chip.name == name


def test_unknown_chips_are_not_guessed() -> None:
    assert chips.listed("cpu") is None


@pytest.mark.slow
def test_profile_counts_the_products_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of CartPole by PPO the products are known: those of the network, forth and back, a known number of times."""
    out = tmp_path / "trace"
    words = ["--num-envs", "64", "--num-steps", "16", "--mesh", "data=1", "--calls", "2", "--hidden-dim", "32"]
    assert main(["profile", "cartpole", *words, "--out", str(out), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    layers = 2 * (4 * 32 + 32 * 32)  # two towers
    heads = 2 * 32 + 32
    forth = 2 * (layers + heads)
    back = 2 * (layers + heads) + 2 * (2 * 32 * 32 + heads)  # no gradient by the observation is needed
    acts, values, epochs = 2 * (layers // 2 + 2 * 32), 2 * (layers // 2 + 32), 4
    least = acts + values + epochs * (forth + back)
    assert least <= found["operations_per_step"] <= 1.15 * (least + acts + values)
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["shares"]["learning"] > 0 and found["shares"]["environment"] > 0 and found["shares"]["inference"] > 0
    assert list(out.glob("plugins/profile/*/*.xplane.pb"))


def test_bad_calls_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "cartpole", "--calls", "0"]) == 2
    assert "--calls is 0; it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile", "plan", "plan --calibrate", "plan --hardware h100"])
def test_a_run_whose_actors_are_apart_is_refused(command: str, longhaul: Any) -> None:
    name, *flags = command.split()
    code, _, err = longhaul(name, "cartpole", "--topology", "actors", *flags)
    assert (code, err.count("\n")) == (2, 1)
    assert "--topology actors has several; choose --topology fused" in err
