"""Pictures that need no download: scikit-learn's digits as two loaders of (images, classes)."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def digits(size=32, count=1797, batch_size=32):
    """Loaders of the training and the evaluation split: images (N, 3, size, size) from -1 to 1, classes (N,)."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.images), generator=torch.Generator().manual_seed(0))[:count]
    images = torch.from_numpy(bunch.images).float()[order, None] / 8 - 1
    images = torch.nn.functional.interpolate(images, (size, size), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    targets = torch.from_numpy(bunch.target)[order]
    cut = len(images) * 3 // 4
    train, val = (TensorDataset(images[part], targets[part]) for part in (slice(cut), slice(cut, None)))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=batch_size)
