"""Weight synchronisation: parameters from a learner to whoever acts, exactly and in as few bytes as possible."""
