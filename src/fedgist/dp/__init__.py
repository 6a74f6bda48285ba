"""Differential privacy: what a release costs, the noise that it gets, and the budget of a data set."""
