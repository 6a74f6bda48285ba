"""Federations across machines: kits for sites, what a site and the server run, and all of it on one machine."""
