"""The network that a command looks at: of a recipe, or a model by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.data.load import class_count
from compress.errors import RecipeError
from compress.models.by_name import build_model
from compress.recipe.tree import Recipe, load_recipe, parse_recipe

IMAGENET_CLASSES = 1000


def chosen_recipe(
    recipe: str | None,
    model: str | None,
    overrides: Sequence[str] | None,
    *,
    image_size: int = 224,
    weights: str | None = None,
) -> Recipe:
    """The recipe of that name, or defaults around a model with 1,000 classes."""
    if (recipe is None) == (model is None):
        raise RecipeError("give one of --recipe and --model")
    if recipe is not None:
        if weights is not None:
            raise RecipeError("--weights goes with --model; for a recipe use --set model.weights=...")
        return load_recipe(recipe, overrides or ())
    data = {"name": "shapes", "image_size": image_size}
    tree = {"model": {"name": model, "weights": weights, "num_classes": IMAGENET_CLASSES}, "data": data}
    return parse_recipe(tree, overrides or (), source="--model")


def network_of(recipe: Recipe, *, weights: bool = True) -> nn.Module:
    """The network that training starts from, in evaluation mode.

    Args:
        recipe: its data need not be on this machine, unless only its folders name the number of classes.
        weights: load the recipe's weights; False leaves those from the seed.
    """
    spec = recipe.model if weights else dataclasses.replace(recipe.model, weights=None)
    torch.manual_seed(recipe.train.seed)
    return build_model(spec, num_classes=spec.num_classes or class_count(recipe.data), task=recipe.task).eval()


def weights_text(recipe: Recipe) -> str:
    """Which weights `network_of` loads, in words."""
    if recipe.model.weights is not None:
        return f"weights of {recipe.model.weights}"
    return f"random weights (seed {recipe.train.seed})"


def blank_images(recipe: Recipe, count: int = 2) -> Tensor:
    """Zeros, (count, channels, height, width)."""
    channels = 3 if recipe.data.mean is None else len(recipe.data.mean)
    return torch.zeros(count, channels, *recipe.data.height_width)
