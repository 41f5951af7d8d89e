"""Programs compiled for a GPU that the machine lacks: their kernels counted by hand, and what is said without them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
from typing import Any

import pytest

from longhaul.algorithms import values
from longhaul.cli.main import main
from longhaul.config.recipes import recipe
from longhaul.config.resolve import resolve
from longhaul.diagnostics import chip_program, compiled_run, compute_plan, hlo
from longhaul.diagnostics.chips import CHIPS
from longhaul.diagnostics.compute_plan import Assumptions, Collective, Measured
from longhaul.runtime.errors import RunError
from longhaul.types import PLATFORM, platform

# A program as XLA writes one for a GPU. Its loop over updates has no known length; the loop over steps has 8 trips.
KERNELS = """\
HloModule jit_run, is_scheduled=true

%product (p0: f32[64,32], p1: f32[32,16]) -> f32[64,16] {
  %p0 = f32[64,32]{1,0} parameter(0)
  %p1 = f32[32,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sine (p2: f32[64,16]) -> f32[64,16] {
  %p2 = f32[64,16]{1,0} parameter(0)
  ROOT %sine.1 = f32[64,16]{1,0} sine(%p2)
}

%less (p3: s32[]) -> pred[] {
  %p3 = s32[] parameter(0)
  %eight = s32[] constant(8)
  ROOT %compare.1 = pred[] compare(%p3, %eight), direction=LT
}

%steps.condition (arg.1: (s32[], f32[64,16])) -> pred[] {
  %arg.1 = (s32[], f32[64,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %fusion.1 = pred[] fusion(%i.1), kind=kLoop, calls=%less
}

%steps.body (arg.2: (s32[], f32[64,16])) -> (s32[], f32[64,16]) {
  %arg.2 = (s32[], f32[64,16]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%arg.2), index=0
  %x.2 = f32[64,16]{1,0} get-tuple-element(%arg.2), index=1
  %copy.2 = s32[] copy(%i.2)
  %fusion.2 = f32[64,16]{1,0} fusion(%x.2), kind=kLoop, calls=%sine
  ROOT %tuple.2 = (s32[], f32[64,16]{1,0}) tuple(%copy.2, %fusion.2)
}

%updates.condition (arg.3: (s32[], f32[64,16])) -> pred[] {
  %arg.3 = (s32[], f32[64,16]{1,0}) parameter(0)
  %i.3 = s32[] get-tuple-element(%arg.3), index=0
  ROOT %fusion.3 = pred[] fusion(%i.3), kind=kLoop, calls=%less
}

%updates.body (arg.4: (s32[], f32[64,16])) -> (s32[], f32[64,16]) {
  %arg.4 = (s32[], f32[64,16]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[64,16]{1,0}) while(%arg.4), condition=%steps.condition, body=%steps.body, \
backend_config={"known_trip_count":{"n":"8"}}
}

ENTRY %main (a: f32[64,32], b: f32[32,16], n: s32[]) -> (s32[], f32[64,16]) {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %gemm_fusion_dot.1 = f32[64,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
  %tuple.4 = (s32[], f32[64,16]{1,0}) tuple(%n, %gemm_fusion_dot.1)
  ROOT %while.2 = (s32[], f32[64,16]{1,0}) while(%tuple.4), condition=%updates.condition, body=%updates.body
}
"""

WORK = compute_plan.work(1, 1, hlo.runs(KERNELS), hlo.read(KERNELS))


def test_kernels_count_with_the_trips_of_their_loops() -> None:
    """By hand: a product, 8 copies and 8 sines, and the condition of the loop of unknown length; that of the other
    loop does not run."""
    product = 1.0, 2.0 * 64 * 32 * 16, 4.0 * (64 * 32 + 32 * 16 + 64 * 16)
    sine, copy, condition = (8.0, 0.0, 2 * 4.0 * 64 * 16), (8.0, 0.0, 8.0), (1.0, 0.0, 5.0)
    assert sorted(WORK) == sorted([product, sine, copy, condition])


def test_a_description_has_the_numbers_of_the_data_sheet() -> None:
    for name in chip_program.LAYOUTS:
        words = chip_program.description(name).split()
        given = {key.rstrip(":"): value for key, value in itertools.pairwise(words) if key.endswith(":")}
        assert float(given["memory_bandwidth"]) == CHIPS[name].memory_bandwidth
        assert float(given["device_memory_size"]) == CHIPS[name].memory
        assert int(given["shared_memory_per_block_optin"]) < int(given["shared_memory_per_core"])
    assert "major: 9 minor: 0" in chip_program.description("h100")


def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
    remedy = "the GPU's compiler is not installed: pip install 'longhaul-rl[plan]'"
    assert chip_program.missing("h100") == remedy
    there.append("jax_plugins.xla_cuda13")
    assert chip_program.missing("h100") is None
    assert chip_program.missing("tpu-v4") == "only l4, a100, h100, h200 have a compiler on other machines"


def test_programs_are_traced_for_the_platform_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (platform(), values.at_once(None)) == ("cpu", values.ROWS_OF_A_CORE)
    monkeypatch.setenv(PLATFORM, "gpu")
    assert (platform(), values.at_once(None)) == ("gpu", values.ROWS_OF_AN_ACCELERATOR)


def test_a_process_of_its_own_gets_the_chip_and_the_platform() -> None:
    run = resolve(dataclasses.replace(recipe("cartpole"), devices=1))
    told = compiled_run.ask(run, __name__, "heard", "h100", variables={PLATFORM: "gpu"})
    assert told == ["cartpole", "h100", "gpu"]


def heard(run: Any, chip: str) -> list[str]:
    return [run.recipe, chip, platform()]


WHAT = Measured(None, 64, WORK, (), memory=9.0, state_bytes=7.0, carry_bytes=2.0, own=True)
SURE = Assumptions(efficiency=1.0)
H100 = CHIPS["h100"]


def test_each_kernel_of_its_own_program_takes_its_launch_and_its_work() -> None:
    """18 launches, and the bytes of a product, 8 sines and little else; the product's operations take less."""
    moved = 14_336 + 8 * 8_192 + 8 * 8 + 5
    work = compute_plan.roofline_seconds(WHAT, H100, SURE, bf16=False)
    assert work == pytest.approx(moved / H100.memory_bandwidth)
    seconds = compute_plan.compute_seconds(WHAT, H100, SURE, bf16=False)
    assert seconds == pytest.approx(18 * compute_plan.KERNEL + work)
    of_a_cpu = compute_plan.compute_seconds(WHAT._replace(own=False), H100, SURE, bf16=False)
    assert of_a_cpu == pytest.approx(18 * compute_plan.LAUNCH["gpu"])  # more than the work of each


def test_a_forecast_says_what_it_was_off_by() -> None:
    def error(what: Measured, chip: str, devices: int = 1) -> float | None:
        return compute_plan.row(
            what, CHIPS[chip], SURE, devices, 1e6, here=False, bf16=False, strong=False
        ).error  # fmt: skip

    assert error(WHAT, "h100") == compute_plan.OFF["h100", True]
    assert error(WHAT._replace(own=False), "h100") == compute_plan.OFF["h100", False]
    assert error(WHAT, "a100") is None  # no run of one was compared
    many = WHAT._replace(collectives=(Collective("all-reduce", 1.0, 36_620.0),))
    row = compute_plan.row(many, H100, SURE, 8, 1e6, here=False, bf16=False, strong=False)
    share = row.communication_seconds / row.update_seconds
    assert 0.1 < share < 0.9
    assert row.error == pytest.approx(compute_plan.OFF["h100", True] + share)


def test_a_compiler_that_fails_is_said_and_the_plan_is_from_a_cpus_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> Measured:
        raise RunError("no such target")

    monkeypatch.setattr(chip_program, "missing", lambda chip: None)
    monkeypatch.setattr(chip_program, "measured", failing)
    words = ["cartpole", "--num-envs", "8", "--num-steps", "8", "--hardware", "h100", "--on", "1", "--json", "-"]
    assert main(["plan", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["devices"] == 1  # those of the plan, not the four of this process
    assert not found["measured"]["own"]
    assert found["assumptions"]["compute"].endswith("the chip's own program was not compiled: no such target")
    assert found["plan"][0]["error"] == compute_plan.OFF["h100", False]


def test_the_chips_own_program_is_planned_where_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "work": WORK, "crossings": [], "steps": 64, "memory": 9.0, "state_bytes": 7.0, "carry_bytes": 2.0,
    }  # fmt: skip
    asked: list[Any] = []

    def ask(run: Any, module: str, name: str, *words: str, variables: dict[str, str]) -> Any:
        asked.extend([run.all_devices, module, name, *words, variables])
        return json.loads(json.dumps(told))

    monkeypatch.setattr(chip_program, "missing", lambda chip: None)
    monkeypatch.setattr(compiled_run, "ask", ask)
    assert main(["plan", "cartpole", "--hardware", "h100", "--on", "1", "--json", "-"]) == 0
    assert asked == [1, "longhaul.diagnostics.chip_program", "compiled", "h100", {"LONGHAUL_PLATFORM": "gpu"}]
    found = json.loads(capsys.readouterr().out)
    (row,) = found["plan"]
    assert found["measured"]["instructions"] == 18
    reached = Assumptions(efficiency=compute_plan.REACHED)
    assert row["steps_per_second"] == pytest.approx(64 / compute_plan.compute_seconds(WHAT, H100, reached, bf16=False))
    assert "18 kernels of the chip's own program" in found["assumptions"]["compute"]


@pytest.mark.slow
@pytest.mark.skipif(chip_program.missing("h100") is not None, reason="the GPU's compiler is not installed")
@pytest.mark.parametrize("chip", sorted(chip_program.LAYOUTS))
def test_a_real_program_is_compiled_for_each_chip(chip: str) -> None:
    """CartPole with its 16 minibatches of at least a forward and a backward product of each of three layers."""
    run = resolve(dataclasses.replace(recipe("cartpole"), num_envs=64, num_steps=16, devices=1))
    what = chip_program.measured(run, chip, 1)
    steps, products = 64 * 16, 2 * (4 * 64 + 64 * 64) + 64 * 2 + 64
    kernels = sum(times for times, _, _ in what.work)
    assert what.steps == steps
    assert 16 * 12 < kernels < 16 * 300
    operations = sum(times * operations for times, operations, _ in what.work)
    assert operations >= 2.0 * steps * products * 4 * 2  # learning alone, each of four epochs forward and backward
