"""Self-play driving from Python: one policy drives all agents of generated worlds. Run: python examples/self_play.py

The recipe `driving-selfplay` as it stands takes 26 CPU-minutes; these sizes show the way, and learn a little.
"""

import longhaul

SMALL = {"scenarios": 32, "objects": 16, "agents": 8, "least": 4, "num_envs": 16, "num_steps": 32}

if __name__ == "__main__":
    result = longhaul.train("driving-selfplay", total_steps=400_000, evaluation_episodes=16, **SMALL)
    names = ("goal", "collision", "offroad", "progress")
    for policy in ("untrained", "trained", "idm"):  # idm: the Intelligent Driver Model in the same worlds
        print(policy, {name: round(result.evaluation[policy][name], 3) for name in names})

    scored = longhaul.evaluate(result, episodes=8)
    print({name: str(scored.estimates[name]) for name in names})
    print(f"longhaul render {result.folder} --out drive.html  # shows it")
