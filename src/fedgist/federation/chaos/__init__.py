"""A federation's faults, simulated by seed around the real host, engine, folders and states. docs/chaos.md."""
