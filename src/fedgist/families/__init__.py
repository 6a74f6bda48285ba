"""Families: what several methods share, with its messages and exchanges; between the pure maths and the methods."""
