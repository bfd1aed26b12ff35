"""Checkpoints in a place of their own: written from a live engine, read into any other, without one looked at.

``manifest`` and ``reader`` are pure. ``save`` and ``load`` know the engine, ``saved`` and ``scan`` do without.
"""
