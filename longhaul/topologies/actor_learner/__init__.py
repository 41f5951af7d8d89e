"""What actors are made of: tickets, shared memory, the lane of weights, the actor itself, its crew."""
