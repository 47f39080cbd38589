"""Upper bounds on what recipes, files and images may ask, far above real use."""

from __future__ import annotations

SEED = 2**63 - 1  # largest seed: torch's and numpy's generators take 64 bits, with a sign

COUNT = 10**9  # most of anything that is counted: images, epochs, steps, runs

CLASSES = 10**6  # most classes of a model; ImageNet-21k has 21,841

IMAGE_SIDE = 8192  # largest side of a model's input, in pixels

# Most pixels of an image file unless `data.max_pixels` says otherwise: Pillow's own limit, half a gibibyte in RGB.
IMAGE_PIXELS = 178_956_970

MOST_IMAGE_PIXELS = 2**31 - 1  # largest `data.max_pixels`; Pillow counts in 32 bits

BATCH = 2**20  # most images of one batch over all processes together

WORKERS = 1024  # most loader processes, and most threads of an engine

RECIPE_BYTES = 2**20  # largest recipe file

RECIPE_VALUES = 100_000  # most values of a recipe after its aliases are expanded, each of which may stand for many

DEPTH = 64  # deepest nesting of a recipe or a JSON file; the readers of both are recursive

DIGITS = 400  # most digits of a number in a recipe; more than any float has, and few enough to be converted at once

FILE_BYTES = 2**29  # largest image, annotation or CIFAR file that is read whole

ARRAYS_BYTES = 2**35  # largest .npz file of calibration data

JSON_BYTES = 2**29  # largest JSON file. An engine's listing of ten thousand layers takes some ten megabytes.
