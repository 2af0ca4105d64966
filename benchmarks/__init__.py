"""How fast the ops are, against the hardware's limits and against what a user would call instead."""
