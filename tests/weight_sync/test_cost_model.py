"""The cost model: sums worked by hand, what a plan's bytes say, and the command that prints it."""

from __future__ import annotations

import dataclasses

import pytest

from longhaul.weight_sync import cost_model, resharding
from longhaul.weight_sync.cost_model import GB, Setting

IDEAL = Setting(params=1e12, efficiency=1.0)


def seconds(of: cost_model.Cost, name: str) -> float:
    return sum(term.seconds for term in of.terms if term.name == name)


@pytest.mark.parametrize(
    ("changes", "stage", "expected"),
    [
        ({}, "receiver NIC", 2.5),  # 2000 GB / 16 / 50 GB/s
        ({"per_replica": 32, "replicas": 8}, "receiver NIC", 1.25),
        ({"itemsize": 1.0}, "receiver NIC", 1.25),
        ({"trainers": 64, "replicas": 32, "relay": False}, "sender NIC", 20.0),
        ({"trainers": 64, "replicas": 32}, "sender NIC", 0.625),
        ({"trainers": 64, "replicas": 32}, "relay NIC", 2.5),
        ({"nic": 900 * GB}, "receiver NIC", 125 / 900),
        ({"staged": True}, "receiver PCIe", 125 / 55),
        ({}, "staging and check", 3 * 125 / 3350),
    ],
)
def test_a_full_update_takes_what_its_bytes_take(changes: dict[str, float], stage: str, expected: float) -> None:
    assert seconds(cost_model.full(dataclasses.replace(IDEAL, **changes)), stage) == pytest.approx(expected)


def test_a_delta_sends_less_but_reads_all() -> None:
    full, delta, host = cost_model.costs(IDEAL)
    assert seconds(delta, "receiver NIC") == pytest.approx(seconds(full, "receiver NIC") / 50)
    assert seconds(delta, "diff") == pytest.approx(2 * 2000 / 256 / 3350)
    assert seconds(delta, "decode") == pytest.approx(125 / (0.2 * 3350))
    assert seconds(host, "decode") == pytest.approx(125 / (16 * 2))
    assert host.bottleneck == "receiver cores"


def test_stages_overlap_but_not_on_one_resource() -> None:
    parts = [("a", 4.0, "x"), ("b", 1.0, "y"), ("c", 2.0, "y"), ("d", 0.5, "")]
    terms = tuple(cost_model.Term(name, value, "", on) for name, value, on in parts)
    one = cost_model.Cost("", terms, 1, 0.0)
    assert one.serial == one.pipelined == 7.5  # a single bucket overlaps with nothing
    many = one._replace(buckets=300)
    assert many.pipelined == pytest.approx(4.0 + 3.0 / 300 + 0.5)
    assert (many.bottleneck, many.busy) == ("x", {"x": 4.0, "y": 3.0})


def test_a_trillion_parameters_in_seconds() -> None:
    full, delta, _ = cost_model.costs(Setting(params=1e12))
    assert full.pipelined <= 5.0
    assert delta.pipelined <= 1.0
    for each in (full, delta):
        assert max(each.busy.values()) <= each.pipelined <= each.serial


def test_the_model_counts_the_bytes_that_a_plan_moves() -> None:
    shapes = {f"layer{i}": ((64, 64), "float32") for i in range(4)}
    of = Setting(params=4 * 64 * 64, itemsize=4.0, trainers=8, replicas=4, per_replica=2, nic=1.0, efficiency=1.0)
    made = resharding.plan(resharding.sharded(shapes, 8), resharding.replicas(resharding.sharded(shapes, 2, 1), 4))
    full = cost_model.full(dataclasses.replace(of, relay=False))
    assert max(sent for _, sent in made.sent) == seconds(full, "sender NIC")
    assert {received for _, received in made.received} == {seconds(full, "receiver NIC")}


def test_a_part_fits_into_its_accelerator_and_two_versions_are_told_if_they_do_not() -> None:
    with pytest.raises(ValueError, match=r"receivers is 100x1; each would hold 2,000 GB of .* in 180 GB; .* least 12$"):
        Setting(params=1e12, replicas=100, per_replica=1)
    with pytest.raises(ValueError, match=r"trainers is 2; each would hold 1,000 GB of .* in 500 GB; .* least 4$"):
        Setting(params=1e12, trainers=2, memory=500 * GB)
    said = {each: dict(cost_model.assumptions(Setting(params=1e12, per_replica=each)))["memory"] for each in (12, 32)}
    assert said[12] == "333.3 GB of 180 while a receiver stages a version beside its own: too much"
    assert said[32] == "125.0 GB of 180 while a receiver stages a version beside its own"


@pytest.mark.parametrize(
    ("name", "value"), [("params", 0.0), ("trainers", 0), ("efficiency", 1.5), ("delta_ratio", 0.5), ("nic", -1.0)]
)
def test_settings_that_mean_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value:g}; it must"):
        dataclasses.replace(IDEAL, **{name: value})


def test_local_runs_wait_for_cores() -> None:
    given = cost_model.Rates(gather=5 * GB, loopback=2 * GB, digest=10 * GB)
    for (receivers, cores, lane), expected in {
        (2, 2, "shm"): 0.1 + 0.05,
        (8, 2, "shm"): 0.1 + 0.05,
        (1, 2, "shm"): 0.1 + 0.1,
        (1, 1, "shm"): 0.2 + 0.1,
        (2, 2, "tcp"): 0.1 + 1.0,
        (1, 2, "tcp"): 0.1 + 0.5,
        (2, 4, "tcp"): 0.1 + 0.5,
    }.items():
        cost = cost_model.local(1 * GB, receivers, cores, given, lane)
        assert cost.pipelined == pytest.approx(expected + 2e-3)  # its messages
    with pytest.raises(ValueError, match="there are shm and tcp"):
        cost_model.local(1.0, 1, 1, given, "pigeon")


def test_a_sharded_round_takes_its_messages_and_the_time_of_its_bytes() -> None:
    """Seconds of each stage are a line through two sizes: 1 GB/s sent, 2 GB/s verified."""
    few, more = cost_model.Rehearsal(0, 0, 0.1, 0.3, 0.6, 0.7), cost_model.Rehearsal(10**9, 10**9, 0.1, 1.3, 2.1, 2.2)
    late = cost_model.Rehearsal(10**9, 10**9, 0.1, 9.3, 18.1, 18.2)  # one that waited for something else
    cost = cost_model.sharded(4 * 10**9, 2 * 10**9, [few, few, few], [more, late, more])
    assert {term.name: term.seconds for term in cost.terms} == pytest.approx(
        {"prepare": 0.1, "send": 0.2 + 4.0, "verify": 0.3 + 1.0, "decide": 0.1}
    )
    with pytest.raises(ValueError, match="give a larger share"):
        cost_model.sharded(10**9, 10**9, [more], [few])
