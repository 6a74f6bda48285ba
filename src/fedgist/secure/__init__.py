"""Sums that hide their addends: the ring that numbers are added in, masks, shares of keys. Bytes and numpy only."""
