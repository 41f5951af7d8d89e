"""What actors are made of: tickets, shared memory, weights' lane, the actor itself, and the crew that looks after them."""
