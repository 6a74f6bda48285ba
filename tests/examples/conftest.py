"""Importing scikit-learn's data sets draws from Python's global generator, so it is done before any test watches it."""

import sklearn.datasets  # noqa: F401
