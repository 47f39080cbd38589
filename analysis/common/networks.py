"""Networks by name with random weights."""

from typing import Any

import torch
import torchvision
from torch import Tensor, nn


def random_network(name: str, **options: Any) -> nn.Module:
    """A network of torchvision, else of timm, with random weights."""
    torch.manual_seed(0)
    if name in torchvision.models.list_models():
        model: nn.Module = torchvision.models.get_model(name, **options)
    else:
        import timm  # optional: an extra of the package

        model = timm.create_model(name, **options)
    return model


def with_statistics(model: nn.Module, *batches: Tensor) -> nn.Module:
    """Set the statistics of images, so that activations keep their size."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        for batch in batches:
            model.train()(batch)
    for norm in norms:
        norm.momentum = 0.1  # None would make the compiler break the graph
    return model.eval()
