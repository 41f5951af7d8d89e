"""Hyperparameters by Optuna: each trial is a run, and poor ones are pruned. Run: python examples/optuna_search.py"""

import optuna

import longhaul


def objective(trial):
    """Return of a run's evaluation; the curve decides at each record whether the trial goes on."""

    def report(metrics):  # called between compiled calls: true stops the run
        if metrics.get("episode/return") is not None:
            trial.report(metrics["episode/return"], step=int(metrics["update"]))
        return trial.should_prune()

    result = longhaul.train(
        "cartpole",
        run_name=f"{trial.study.study_name}-{trial.number}",
        lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
        gamma=trial.suggest_categorical("gamma", [0.9, 0.99]),
        update_epochs=trial.suggest_int("update_epochs", 1, 8),
        num_envs=16, num_steps=32, total_steps=65_536, block=8, log_interval=8, evaluation_episodes=20,
        callback=report,
    )  # fmt: skip
    if result.stopped:
        raise optuna.TrialPruned
    return result.evaluation["trained"]["return"]


if __name__ == "__main__":
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=32)
    study = optuna.create_study(
        study_name="cartpole", direction="maximize", pruner=pruner, sampler=optuna.samplers.TPESampler(seed=0)
    )
    study.optimize(objective, n_trials=8)
    print([trial.state.name for trial in study.trials])
    print(study.best_value, study.best_params)
