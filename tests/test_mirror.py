"""Tests mirror the package: `longhaul/a/b.py` is tested by `tests/a/test_b.py` or `tests/a/test_b_ASPECT.py`.

The two tables list the files without one. A new file gets a test of its own; a line leaves when its file has one.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "longhaul"

ELSEWHERE = {
    "algorithms/actor_critic.py": "algorithms/test_ppo.py",
    "algorithms/config.py": "algorithms/test_ppo.py",
    "algorithms/run_context.py": "algorithms/test_ppo.py",
    "algorithms/registry.py": "algorithms/test_sac.py",
    "algorithms/values.py": "bench/cases/test_training.py",
    "bench/harness.py": "bench/cases/test_training.py",
    "cli/bench_hackmatrix.py": "bench/cases/test_hackmatrix_grid.py",
    "cli/evaluate.py": "training/test_evaluate.py",
    "cli/export.py": "training/test_export.py",
    "cli/plan.py": "diagnostics/test_compute_plan.py",
    "cli/play/games.py": "cli/play/test_console.py",
    "cli/push.py": "training/test_hub.py",
    "cli/reason.py": "end_to_end/test_reasoning_runs.py",
    "cli/train.py": "cli/test_run_flags.py",
    "config/population.py": "topologies/test_fused_population.py",
    "diagnostics/chips.py": "diagnostics/test_profile.py",
    "diagnostics/compiled_run.py": "diagnostics/test_checks.py",
    "diagnostics/scaling_grid.py": "diagnostics/test_scaling_law.py",
    "driving/datasets/argoverse.py": "driving/datasets/test_readers.py",
    "driving/datasets/geopackage.py": "driving/datasets/test_nuplan.py",
    "driving/datasets/gpudrive.py": "driving/datasets/test_readers.py",
    "driving/datasets/lane_boundaries.py": "driving/datasets/test_nuplan.py",
    "driving/datasets/log.py": "driving/generator/test_generate.py",
    "driving/datasets/scenarionet.py": "driving/datasets/test_safe_pickle.py",
    "driving/generator/kernels.py": "driving/generator/test_generate.py",
    "driving/generator/roads.py": "driving/generator/test_generate.py",
    "driving/generator/traffic.py": "driving/generator/test_generate.py",
    "driving/render/log_picture.py": "driving/test_inspect_logs.py",
    "driving/render/recording.py": "driving/render/test_frames.py",
    "driving/render/save.py": "driving/render/test_frames.py",
    "driving/scenario/bank.py": "driving/scenario/test_from_log.py",
    "driving/scenario/scenario.py": "driving/scenario/test_lane_graph.py",
    "driving/sim/config.py": "driving/sim/test_observation.py",
    "driving/sim/features.py": "driving/sim/test_observation.py",
    "driving/sim/reward.py": "driving/sim/test_simulator.py",
    "envs/hackmatrix/board_generation.py": "envs/hackmatrix/test_environment.py",
    "envs/hackmatrix/observation.py": "envs/hackmatrix/test_environment.py",
    "envs/hackmatrix/state.py": "envs/hackmatrix/test_environment.py",
    "envs/hackmatrix/swift_rules/rules.py": "envs/hackmatrix/swift_rules/test_environment.py",
    "envs/hackmatrix/swift_rules/state.py": "envs/hackmatrix/swift_rules/test_environment.py",
    "envs/host/gymnasium_vector.py": "envs/host/test_vector.py",
    "envs/host/jax_vector.py": "topologies/inference_server/test_server.py",
    "envs/host/numpy_cartpole.py": "envs/host/test_vector.py",
    "envs/host/registry.py": "envs/host/test_vector.py",
    "envs/host/torch_vector.py": "envs/host/test_vector.py",
    "networks/config.py": "networks/test_layers.py",
    "reasoning/config.py": "end_to_end/test_reasoning_runs.py",
    "reasoning/evaluate.py": "reasoning/test_test_time_compute.py",
    "runtime/batch_shards.py": "end_to_end/test_deterministic.py",
    "runtime/cache_dir.py": "runtime/test_compile_cache.py",
    "runtime/devices.py": "runtime/test_process_group.py",
    "runtime/launch/local.py": "runtime/test_process_group.py",
    "runtime/launch/ray_cluster.py": "runtime/launch/test_ray.py",
    "spaces.py": "envs/host/test_vector.py",
    "telemetry/aggregate.py": "training/test_loop.py",
    "telemetry/health_log.py": "telemetry/test_health.py",
    "telemetry/pages.py": "training/test_report.py",
    "telemetry/follower.py": "telemetry/test_tracking.py",
    "topologies/actor_learner/config.py": "topologies/test_staleness.py",
    "topologies/actor_process.py": "topologies/actor_learner/test_actor_pool.py",
    "topologies/inference_server/config.py": "end_to_end/test_inference_server_runs.py",
    "topologies/inference_server/learner.py": "end_to_end/test_chaos_roles.py",
    "topologies/inference_server/shm_transport.py": "topologies/inference_server/test_server.py",
    "training/assemble.py": "algorithms/test_batch_scaling.py",
    "training/compilation.py": "runtime/test_device_memory.py",
    "training/evaluate_driving.py": "training/test_evaluate.py",
    "training/final_evaluation.py": "training/test_loop.py",
    "training/inference_server.py": "end_to_end/test_chaos_roles.py",
    "training/members.py": "topologies/test_fused_population.py",
    "training/model_card.py": "training/test_hub.py",
    "training/offline_data.py": "algorithms/test_bc.py",
    "training/run_dir.py": "config/test_resolve.py",
    "training/serving/actions.py": "training/serving/test_http.py",
    "training/serving/batch_programs.py": "training/serving/test_http.py",
    "training/serving/completions.py": "training/serving/test_http.py",
    "training/serving/live_weights.py": "training/serving/test_http.py",
    "training/serving/metrics.py": "training/serving/test_http.py",
    "types.py": "algorithms/test_ppo.py",
    "weight_sync/model_shapes.py": "bench/cases/test_sync.py",
    "weight_sync/transports/shared_memory.py": "weight_sync/test_receiver.py",
    "weight_sync/transports/tcp.py": "weight_sync/transports/test_sockets.py",
}
"""Source file -> the test file that imports it and tests it."""

THROUGH = {
    "__main__.py": "the entry point: every test that starts the command runs it",
    "algorithms/off_policy.py": "the common part of DQN, SAC and TD3, by their tests",
    "bench/cases/actors.py": "a measurement; names and sizes of all cases in bench/cases/test_training.py",
    "bench/cases/central.py": "a measurement, as bench/cases/actors.py",
    "bench/cases/reasoning.py": "a measurement, as bench/cases/actors.py",
    "bench/cases/replay.py": "a measurement, as bench/cases/actors.py",
    "bench/sync_receiver.py": "the receiving process of bench/cases/test_sync.py",
    "cli/actor.py": "the process of an actor on another machine, by end_to_end/test_inference_server_runs.py",
    "cli/profile.py": "by diagnostics/test_profile.py, through the command",
    "cli/scaling.py": "by diagnostics/test_scaling_law.py, through the command",
    "envs/hackmatrix/rules.py": "by envs/hackmatrix/test_environment.py, by rule cases",
    "envs/hackmatrix/reward.py": "by envs/hackmatrix/test_environment.py, through the helper of its games",
    "telemetry/curve_fit.py": "by telemetry/test_forecast.py and diagnostics/test_scaling_law.py, through both fits",
    "topologies/inference_server/actor.py": "by topologies/inference_server/test_server.py, through real actors",
    "topologies/inference_server/actor_pool.py": "by end_to_end/test_inference_server_runs.py, through whole runs",
    "training/checkpoint/weight_source.py": "by training/test_publish.py, which pulls a run's checkpoints",
}
"""Source file -> the reason why no test imports it: its tests go through others."""

SOURCES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def own(source: str) -> list[Path]:
    """Test files of a source file's name."""
    path = TESTS / source
    return [*path.parent.glob(f"test_{path.stem}.py"), *path.parent.glob(f"test_{path.stem}_*.py")]


def imported(test: Path) -> set[str]:
    """Modules of the package that a test file imports, whole or in part."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_every_source_file_has_its_test_or_a_line_here() -> None:
    assert [source for source in SOURCES if not own(source) and source not in ELSEWHERE | THROUGH] == []


def test_no_line_is_stale() -> None:
    assert [source for source in ELSEWHERE | THROUGH if source not in SOURCES or own(source)] == []
    assert not ELSEWHERE.keys() & THROUGH.keys()


@pytest.mark.parametrize("source", ELSEWHERE)
def test_the_named_test_imports_the_file(source: str) -> None:
    module = "longhaul." + source.removesuffix(".py").replace("/", ".")
    assert module in imported(TESTS / ELSEWHERE[source])
