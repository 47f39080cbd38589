"""fp16 by torch.compile in channels_last: what the engine is compared with."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from analysis.cuda_engine.networks import image_size, images, network

MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile. Both use CUDA graphs; the first takes the libraries' products and convolutions as cuDNN's own
benchmark picks them, the second also measures Triton templates, which takes minutes."""


def compiled(name: str, batch: int, mode: str) -> tuple[Any, Tensor]:
    """A compiled network and its input on the GPU; nothing has run yet."""
    import torch._inductor.config as inductor_config  # lazy: processes that compile kernels import this file too

    inductor: Any = inductor_config
    inductor.autotune_num_choices_displayed = 0
    torch.backends.cudnn.benchmark = True
    model = network(name).cuda().half().to(memory_format=torch.channels_last)
    x = images(batch, image_size(name)).cuda().half().contiguous(memory_format=torch.channels_last)
    return torch.compile(model, mode=mode), x


def compile_ahead(name: str, batch: int, mode: str) -> str:
    """Compile in a process of its own, into the caches on disk; the seconds it took, or why it failed."""
    start = time.monotonic()
    try:
        fast, x = compiled(name, batch, mode)
        with torch.inference_mode():
            fast(x)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    del fast, x
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return f"{time.monotonic() - start:.1f} s"
