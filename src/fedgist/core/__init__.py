"""The kernel: messages, federation, sites, work, ledger, randomness. It knows nothing else of the package."""
