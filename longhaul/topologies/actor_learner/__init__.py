"""Actor-learner topology: actors collect with a policy of their own, a learner learns from their rollouts."""
