"""Learning: functional optimisers, local training and evaluation, as pure steps for `scan` and `compute`."""
