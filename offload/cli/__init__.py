"""The command ``offload``: fine-tune a model, or see the plan of it first.

``main`` has the commands and nothing heavy; each command imports what it needs when it runs, so that
``offload plan`` and every refusal come without loading torch.
"""
