"""Weight synchronisation: parameters from a learner to its actors, exactly and in as few bytes as possible."""
