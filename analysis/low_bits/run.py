"""Trains a network of CIFAR-10 with weights and activations of few bits, each from the same float weights."""

import json
from pathlib import Path

from analysis.common.cifar import NETWORKS
from analysis.common.recipes import RecipeRun, run_all, write_table
from analysis.common.study import option, study_options

BITS = (8, 4, 3, 2)


def recipe_of(network: str, data: str, epochs: int, qat_epochs: int, file: Path) -> Path:
    """Write the recipe: LSQ's learned scales (arXiv 1902.08153), BatchNorm kept, first and last layers at 8 bits."""
    recipe = {
        "model": {"name": f"analysis.common.cifar:{network}"},
        "data": {"name": "cifar10", "root": data, "image_size": 32, "batch_size": 128},
        "train": {"epochs": epochs, "lr": 0.1, "weight_decay": 0.0005, "warmup_epochs": 1.0},
        "quantization": {
            "target": "any",
            "first_last_bits": 8,
            "batchnorm": "keep",
            "activations": {"calibrator": "lsq"},
        },
        "qat": {"epochs": qat_epochs, "lr": 0.01, "weight_decay": 0.0001, "distill": True, "scales": "learned"},
        "bench": {"engines": ["torch"], "batch_sizes": [1]},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return file


def main() -> None:
    o = study_options(
        __doc__,
        option("--data", default="cifar10", help="folder of cifar-10-batches-py"),
        option("--network", choices=NETWORKS, default="resnet20"),
        option("--bits", nargs="+", type=int, choices=BITS, default=list(BITS)),
        option("--epochs", type=int, default=60),
        option("--qat-epochs", type=int, default=30),
        option("--set", action="append", default=[], help="key=value for every run"),
        out="runs/low_bits",
    )
    recipe = str(recipe_of(o.network, o.data, o.epochs, o.qat_epochs, o.out / "recipe.yaml"))
    [first, *others] = [RecipeRun(label="float", recipe=recipe, command="train", overrides=o.set)] + [
        RecipeRun(
            label=f"w{bits}a{bits}",
            recipe=recipe,
            command="qat",
            overrides=[
                "train.epochs=0",
                f"model.weights={(o.out / 'float' / 'float.safetensors').resolve()}",
                f"quantization.weights.num_bits={bits}",
                f"quantization.activations.num_bits={bits}",
                *o.set,
            ],
        )
        for bits in o.bits
    ]
    rows = run_all([first], o.out)  # its weights are those that all others begin with
    print(write_table(f"{o.network} with few bits", rows + run_all(others, o.out), o.out / "low_bits.md"))


if __name__ == "__main__":
    main()
