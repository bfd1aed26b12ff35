"""Where torch's fused Adam has the bits of ours."""

import torch

FUSED_ADAM_IS_OURS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Elsewhere the two were never compared: torch's may round in other places."""
