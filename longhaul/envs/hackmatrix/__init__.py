"""HackMatrix, a turn-based game on six by six cells, as an environment."""
