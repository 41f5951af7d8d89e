"""What central inference is made of: frames, lanes for them, a batcher, the policy, trajectories, and the actor."""
