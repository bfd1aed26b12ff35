"""Models the engine is shown with, the text they train on, and transformers checkpoints.

``presets`` is pure arithmetic and ``pretrained`` reads headers, both without torch, so that a plan needs
none; ``decoder`` and ``text`` import it. Nothing here knows the engine.
"""
