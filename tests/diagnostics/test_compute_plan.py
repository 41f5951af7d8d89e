"""The compute planner: its cost model against numbers worked out by hand, and the command."""

from __future__ import annotations

import json

import pytest

from longhaul.cli import plan as plan_command
from longhaul.cli.main import main
from longhaul.diagnostics import compute_plan, hlo
from longhaul.diagnostics.chips import Chip
from longhaul.diagnostics.compute_plan import Assumptions, Calibration, Collective, Measured

CHIP = Chip("h-toy", bf16=2000.0, fp32=1000.0, memory_bandwidth=100.0, memory=50.0, link=10.0, per_host=4, price=3.0)
ASSUMED = Assumptions(network=5.0, latency=0.5, efficiency=0.5, save_minutes=30.0, keep=3)
WHAT = Measured(
    compute_seconds=10.0, steps=100, work=((2.0, 1500.0, 10.0), (1.0, 0.0, 200.0)),
    collectives=(Collective("all-reduce", 3.0, 20.0),),
    memory=40.0, state_bytes=7.0, carry_bytes=2.0,
)  # fmt: skip


def test_a_roofline_takes_the_longer_of_operations_and_bytes() -> None:
    # 2 x 1500 operations at 500/s, and once 200 bytes at 50/s.
    assert compute_plan.compute_seconds(WHAT, CHIP, ASSUMED, bf16=False) == pytest.approx(2 * 3.0 + 4.0)
    assert compute_plan.compute_seconds(WHAT, CHIP, ASSUMED, bf16=True) == pytest.approx(2 * 1.5 + 4.0)


def test_launches_do_not_shrink_with_the_batch() -> None:
    many = WHAT._replace(work=((1e6, 1e-9, 1e-9),))
    whole, half = (compute_plan.compute_seconds(many, CHIP, ASSUMED, bf16=False, share=share) for share in (1.0, 0.5))
    assert whole == half == pytest.approx(1e6 * compute_plan.LAUNCH["gpu"])


def test_collectives_cost_a_ring_and_hops() -> None:
    assert compute_plan.communication_seconds(WHAT, CHIP, ASSUMED, 1) == 0.0
    # Within a host: 3 x (2 x 3/4 x 20 / 10 + 2 x 2 x 0.5).
    assert compute_plan.communication_seconds(WHAT, CHIP, ASSUMED, 4) == pytest.approx(3 * (3.0 + 2.0))
    # Beyond it by the network: 3 x (2 x 7/8 x 20 / 5 + 2 x 3 x 0.5).
    assert compute_plan.communication_seconds(WHAT, CHIP, ASSUMED, 8) == pytest.approx(3 * (7.0 + 3.0))


def test_devices_that_share_parameters_speak_among_themselves() -> None:
    two = WHAT._replace(model=2, collectives=(*WHAT.collectives, Collective("all-reduce", 5.0, 8.0, within=True)))
    inside = 5 * (2 * 1 / 2 * 8 / 10 + 2 * 0.5)
    assert compute_plan.communication_seconds(two, CHIP, ASSUMED, 2) == pytest.approx(inside)
    # Four shards of two devices each, beyond a host: 3 x (2 x 3/4 x 20 / 5 + 2 x 2 x 0.5) for the gradient.
    assert compute_plan.communication_seconds(two, CHIP, ASSUMED, 8) == pytest.approx(inside + 3 * (6.0 + 2.0))
    rows = [compute_plan.row(two, CHIP, ASSUMED, n, 72_000.0, here=True, bf16=False, strong=False) for n in (2, 8)]
    assert [row.batch for row in rows] == [100, 400]
    assert [row.efficiency for row in rows] == [1.0, pytest.approx((10 + inside) / (10 + inside + 24))]
    assert [row.checkpoint for row in rows] == [7.0 + 2.0, 7.0 + 4 * 2.0]


@pytest.mark.parametrize(("operation", "moved"), [("all-gather", 1.5), ("all-to-all", 1.5), ("reduce-scatter", 6.0)])
def test_gathers_and_scatters_go_around_the_ring_once(operation: str, moved: float) -> None:
    # Of four devices: 3/4 x 20 / 10 and 2 x 0.5. Of what is scattered the 20 bytes are one of four parts.
    what = WHAT._replace(collectives=(Collective(operation, 1.0, 20.0),))
    assert compute_plan.communication_seconds(what, CHIP, ASSUMED, 4) == pytest.approx(moved + 1.0)


# Of WHAT's 3 all-reduces of 20 bytes each takes 1 + 20 x 0.1 = 3 s between two: 9 of the pair's 29 s.
PAIR = Calibration(alone=10.0, pair=29.0, spread=0.1, small=1.0, byte=0.1, cores=2)


def test_processes_of_one_machine_share_its_cores() -> None:
    def compute(cores: int, processes: int) -> float:
        return compute_plan.slowdown(WHAT, PAIR._replace(cores=cores), processes)

    assert [compute(1, n) for n in (1, 2, 4)] == [1.0, 2.0, 4.0]  # they take turns
    assert [compute(2, n) for n in (1, 2, 4)] == [1.0, 2.0, 4.0]
    free = PAIR._replace(pair=20.0)  # 11 s of computing: two cores that disturb each other a little
    assert [compute_plan.slowdown(WHAT, free, n) for n in (2, 4)] == [pytest.approx(1.1), pytest.approx(2.2)]
    many = free._replace(cores=4)
    assert [compute_plan.slowdown(WHAT, many, n) for n in (2, 4, 8)] == pytest.approx([1.1, 1.3, 2.6])


def test_messages_of_a_ring_take_turns_with_their_processes() -> None:
    def meeting(cores: int, processes: int) -> float:
        return compute_plan.meeting_seconds(WHAT, PAIR._replace(cores=cores), processes)

    assert [meeting(2, n) for n in (1, 2)] == [0.0, pytest.approx(9.0)]
    # Four send three times as many messages in a row and 3/2 of the bytes: 3 x (3 x 1 + 20 x 0.1 x 3/2).
    assert meeting(4, 4) == pytest.approx(18.0)
    assert meeting(2, 4) == meeting(1, 4) == pytest.approx(36.0)


def test_a_calibrated_plan_repeats_the_runs_that_it_is_from_and_says_its_error() -> None:
    rows = [compute_plan.calibrated(WHAT, CHIP, ASSUMED, PAIR, n, 72_000.0, strong=False) for n in (1, 2, 4)]
    assert [row.update_seconds for row in rows] == pytest.approx([10.0, 29.0, 40.0 + 36.0])
    assert [row.batch for row in rows] == [100, 200, 400]
    assert [row.fits for row in rows] == [True, False, False]  # 40 bytes each of 50
    # By a tree of four messages for a ring of six: 3 x (2 x 1 + 3) x 2 = 30 s of 36.
    assert [row.error for row in rows] == pytest.approx([0.1, 0.1, 0.2 + 6.0 / 76.0])
    strong = compute_plan.calibrated(WHAT, CHIP, ASSUMED, PAIR, 4, 72_000.0, strong=True)
    assert (strong.batch, strong.update_seconds) == (100, pytest.approx(10.0 + 36.0))


def test_a_forecast_that_nothing_was_measured_for_has_no_error() -> None:
    for here in (True, False):
        row = compute_plan.row(WHAT, CHIP, ASSUMED, 1, 1e6, here=here, bf16=False, strong=False)
        assert row.error is None
        words = dict(compute_plan.assumptions_in_words(WHAT, CHIP, ASSUMED, here=here, bf16=False, strong=False))
        assert words["error"].startswith("unknown")


def test_numbers_of_devices_are_multiples_of_a_shard() -> None:
    usual = plan_command.DEVICES
    assert plan_command._numbers((), usual, 1, None)[:4] == [1, 2, 4, 8]
    assert plan_command._numbers((), usual, 4, None)[:3] == [4, 8, 16]
    assert plan_command._numbers((), usual, 3, None)[:3] == [3, 6, 12]
    with pytest.raises(ValueError, match=r"--on is 6, and with --mesh model=4 .* ask for multiples of 4"):
        plan_command._numbers((8, 6), usual, 4, None)


def test_numbers_of_devices_divide_worlds_that_they_share() -> None:
    assert plan_command._numbers((), [1, 2, 4, 8], 1, 12) == [1, 2, 4]
    assert plan_command._numbers((6, 3), [1], 1, 12) == [6, 3]
    with pytest.raises(ValueError, match=r"--on is 4, and --share strong shares 15 worlds, which 2 shards"):
        plan_command._numbers((4, 8), [1], 2, 15)


def test_weak_scaling_keeps_the_batch_of_a_device() -> None:
    row = compute_plan.row(WHAT, CHIP, ASSUMED, 4, steps=72_000.0, here=True, bf16=False, strong=False)
    assert (row.batch, row.update_seconds) == (400, pytest.approx(25.0))
    assert row.efficiency == pytest.approx(10.0 / 25.0)
    assert row.hours == pytest.approx(72_000 / (400 / 25.0) / 3600)
    assert row.dollars == pytest.approx(row.hours * 4 * 3.0)
    assert row.checkpoint == 7.0 + 4 * 2.0
    assert row.written == row.checkpoint * 3  # 75 minutes, a save every 30


def test_strong_scaling_shares_it() -> None:
    row = compute_plan.row(WHAT, CHIP, ASSUMED, 4, steps=72_000.0, here=True, bf16=False, strong=True)
    assert (row.batch, row.update_seconds) == (100, pytest.approx(2.5 + 15.0))
    assert row.efficiency == pytest.approx(10.0 / (4 * 17.5))


def test_a_row_tells_whether_its_memory_fits() -> None:
    rows = [
        compute_plan.row(WHAT._replace(memory=m), CHIP, ASSUMED, 1, 1e6, here=True, bf16=False, strong=False)
        for m in (50, 51)
    ]
    assert [row.fits for row in rows] == [True, False]


def test_a_profile_becomes_the_work_of_one_device_in_one_update() -> None:
    program = {
        "dot": hlo.Instruction("dot", "dot", "", "f32[2]", 100.0, 16.0),
        "sum": hlo.Instruction("sum", "all-reduce", "", "(f32[3]{0}, f32[2]{0})", 0.0, 40.0),
        "loop": hlo.Instruction("loop", "while", "", "f32[2]", 0.0, 0.0),
    }
    assert compute_plan.work(5, 2, {"dot": 30, "sum": 10, "loop": 10, "gone": 1}, program) == ((3.0, 100.0, 16.0),)


def test_like_collectives_are_counted_together() -> None:
    crossing = hlo.Crossing("all-reduce", 20, (None, 4), (0, 2))
    found = compute_plan.collectives([crossing, crossing, crossing._replace(group=(0, 1))], model=2)
    assert found == (Collective("all-reduce", 8, 20), Collective("all-reduce", 4, 20, within=True))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "data=1"])
def test_a_real_run_is_planned(mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The collectives of CartPole's update: its gradient once a minibatch, and little else; of one device, too, which
    has none itself."""
    words = ["--num-envs", "64", "--num-steps", "16", "--mesh", mesh, "--calls", "1", "--on", "1", "512"]
    assert main(["plan", "cartpole", *words, "--steps", "1e9", "--hardware", "h100", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    moved = sum(each["runs"] * each["bytes"] for each in found["measured"]["collectives"])
    parameters = 2 * (4 * 64 + 64 + 64 * 64 + 64) + 64 * 2 + 2 + 64 + 1
    assert 16 * 4 * parameters <= moved <= 16 * 4 * parameters + 1000
    alone, many = found["plan"]
    assert (alone["devices"], alone["efficiency"], many["devices"]) == (1, 1.0, 512)
    assert 0.0 < many["efficiency"] < 1.0
    assert many["hours"] < alone["hours"]
    assert "none of it overlaps" in found["assumptions"]["collectives"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--efficiency", "1.5"], "--efficiency is 1.5; it must lie in 0.001 to 1"),
        (["--on", "0"], "--on is 0; it must lie in 1 to 1000000"),
        (["--hardware", "h101"], "did you mean h100"),
        (["--calibrate", "--hardware", "h100"], "--calibrate measures this machine, and --hardware is h100"),
        (["--calibrate", "--mesh", "data=2"], "--calibrate runs processes of one device each, and --mesh is data=2"),
    ],
)
def test_bad_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cartpole", *words]) == 2
    assert said in capsys.readouterr().err
