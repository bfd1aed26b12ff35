"""The swap store: per run, rank and path one locked directory with one preallocated file of planes; its commits.

Nothing is imported here: `directory` and `manifest` load without torch.
"""
