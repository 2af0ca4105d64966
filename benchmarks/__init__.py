"""Measure the ops beside the limits of the hardware and beside the code that a user would call instead."""
