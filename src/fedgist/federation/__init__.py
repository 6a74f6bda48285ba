"""Federations across machines: kits, what sites and the server run, their protocol; may touch experiments and below."""
