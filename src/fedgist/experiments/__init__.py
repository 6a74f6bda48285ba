"""Runs: configuration, the runner, the report."""
