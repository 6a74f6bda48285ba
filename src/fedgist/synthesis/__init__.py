"""Synthesis: the pure maths of making data, as steps for `scan` and `compute`."""
