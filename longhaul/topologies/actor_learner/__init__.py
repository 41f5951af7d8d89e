"""Actor-learner topology: actors collect rollouts with their own copy of the policy, one learner trains on them."""
