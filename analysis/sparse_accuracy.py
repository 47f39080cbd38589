"""What taking weights away costs and brings: accuracy, kept magnitude, size and engine latency of one network.

    python analysis/sparse_accuracy.py --data digits [--set model.name=resnet18]
    python analysis/sparse_accuracy.py --data shapes [--device cuda]

Everything that a recipe says is taken from one, recipes/resnet50-sparse.yaml unless told otherwise; --set changes it.
Variants start from the same trained float network and train on for the same epochs, taught by it: 2:4 masks, the same
after a channel permutation search, whole channels removed until as many multiply-accumulates are gone as 2:4 saves,
the dense network trained on likewise, INT8 with QAT of the float network, and INT8 QAT of the permuted 2:4 network
with its zeros held. "One shot" is the accuracy before that training. Accuracies are the engine's on the whole
evaluation split, means over seeds; latencies are the engine's on this machine's CPU, batch 1, all variants in turn. The
engine is OpenVINO, and where that is not installed, ONNX Runtime, for which INT8 is then placed; the table names it.
Neither has kernels for 2:4 convolutions, so the 2:4 rows show what such an engine makes of them; "packed" is what the
weights take up in the format of 2:4 kernels.

A variant that is finished is kept under --work, by the recipe's digest, and not made again; the tables of both data
sets are written from one JSON file, so each may be run on its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from sparse_accuracy_report import draw, table
from torch import Tensor, fx, nn

import compress
from compress import QATSpec, QuantSpec, Recipe, SparsitySpec, TrainSpec, build_engine, export_onnx
from compress.data import BatchPlan
from compress.data.base import DataSet
from compress.export.audit import audit_sparsity
from compress.files import write_json, write_text
from compress.graph.layers import layers as layer_table
from compress.graph.trace import trace
from compress.measure import describe_machine, latency_ratio, measure_accuracy, measure_latency
from compress.measure.sizes import model_sizes
from compress.quantization.calibrate import quantize
from compress.quantization.spec import Target
from compress.sparsity.channel import prune_channels
from compress.sparsity.parametrization import apply_masks, squash_masks
from compress.sparsity.schedule import MaskSchedule
from compress.sparsity.sparsifier import sparsify
from compress.training import evaluate, fit, load_model, save_model
from compress.training.loop import AfterStep

Row = dict[str, Any]
PRECISIONS: dict[str, tuple[str | None, ...]] = {"openvino": ("f32", None), "onnxruntime": ("f32",)}
"""Engines, of which the first that is here is taken, and the precisions of float to time; None = its own choice."""
VARIANTS = ("float", "float, trained on", "2:4", "2:4 permuted", "channels", "int8", "2:4 permuted, int8")


STUDIES: dict[str, tuple[str, ...]] = {
    "digits": (),
    "shapes": (
        "data.name=shapes",
        "data.image_size=48",
        "data.batch_size=64",
        "data.num_classes=20",
        "data.train_images=6000",
        "data.val_images=2000",
        "train.epochs=10",
    ),
}
"""What a study changes in the recipe."""
QUICK = (
    "model.name=resnet18",
    "data.image_size=32",
    "data.train_images=192",
    "data.val_images=100",
    "train.epochs=1",
    "finetune.epochs=1",
    "qat.epochs=1",
    "sparsity.permute_seconds=2",
    "sparsity.calibration_images=32",
)


@dataclass(frozen=True)
class Seed:
    """One training of a study with all that follows from it."""

    recipe: Recipe
    data: DataSet
    folder: Path
    number: int
    device: str
    engine: str

    @property
    def example(self) -> Tensor:
        """Two images on the device."""
        return next(iter(self.data.val.batches(BatchPlan(batch_size=2))))[0].to(self.device)

    def network(self) -> nn.Module:
        """The float network, untrained."""
        torch.manual_seed(self.number)
        return compress.build_model(self.recipe.model, num_classes=self.data.train.num_classes).to(self.device)

    @property
    def sparsity(self) -> SparsitySpec:
        """How the recipe masks, with this seed for the permutation search."""
        return replace(cast(SparsitySpec, self.recipe.sparsity), seed=self.number)

    def images(self, limit: int) -> list[Tensor]:
        """Training images in their stored order, in batches on the device."""
        plan = BatchPlan(batch_size=32, limit=limit)
        return [images for images, _ in self.data.train.batches(plan, device=self.device)]

    def trained(self, variant: str) -> nn.Module:
        """A finished network without quantizers, from its file."""
        model = self.network()
        load_model(model, self.path(variant, "safetensors"))
        return model.eval()

    def path(self, variant: str, kind: str) -> Path:
        """A variant's file."""
        return self.folder / f"{variant.replace(':', '').replace(', ', '-').replace(' ', '-')}.{kind}"

    def top1(self, model: nn.Module) -> float:
        """Percent, in torch."""
        return 100 * evaluate(model, self.data.val, batch_size=64, device=self.device).top1

    def train_on(
        self,
        model: nn.Module,
        spec: TrainSpec,
        teacher: nn.Module | None = None,
        after_step: AfterStep | None = None,
        behind: int = 0,
    ) -> None:
        """Train in place, evaluate at the end; the seed is that of everything random, `behind` the epochs so far."""
        spec = replace(spec, seed=self.number, evaluate_every=max(1, spec.epochs))
        fit(
            model.train(),
            self.data,
            spec,
            batch_size=self.recipe.data.batch_size,
            folder=None,
            teacher=teacher if spec.distill else None,
            device=self.device,
            after_step=after_step,
            first_epoch=behind,
        )


def make_float(seed: Seed) -> tuple[nn.Module, Row]:
    """The dense network."""
    model = seed.network()
    seed.train_on(model, seed.recipe.train)
    return model, {}


def make_trained_on(seed: Seed) -> tuple[nn.Module, Row]:
    """The dense network, trained on as the sparse ones are: what those epochs bring by themselves."""
    teacher, model = seed.trained("float"), seed.trained("float")
    facts: Row = {"one_shot": seed.top1(model)}
    seed.train_on(model, seed.recipe.finetune, teacher, behind=seed.recipe.train.epochs)
    return model, facts


def make_masked(seed: Seed, *, permute: bool) -> tuple[nn.Module, Row]:
    """2:4 as the recipe says, in the given order of channels or a better one."""
    teacher, model = seed.trained("float"), seed.trained("float")
    spec = replace(seed.sparsity, permute=permute)
    report = sparsify(model, spec, example_inputs=seed.example, batches=seed.images(spec.calibration_images))
    weights = {path: cast(Tensor, teacher.get_submodule(path).weight).detach() for path in report.masked}
    norms = {path: weight.abs().sum().item() for path, weight in weights.items()}
    facts: Row = {
        "kept_magnitude": sum(norms[row.layer] * (row.kept_magnitude or 0.0) for row in report.rows if row.eligible)
        / sum(norms.values()),
        "masked": list(report.masked),
        "one_shot": seed.top1(model),
    }
    after_step = MaskSchedule(model, spec).after_step
    seed.train_on(model, seed.recipe.finetune, teacher, after_step, behind=seed.recipe.train.epochs)
    squash_masks(model)
    return model, facts


def make_channels(seed: Seed) -> tuple[nn.Module, Row]:
    """Channels removed until the multiply-accumulates are those that 2:4 leaves."""
    teacher, model = seed.trained("float"), seed.trained("float")
    masked = read(seed, "2:4")["masked"]
    share = (macs(model, seed.example, masked) / macs(model, seed.example)) / 2
    report = prune_channels(model, SparsitySpec(pattern=f"channel:{share:.4f}"), example_inputs=seed.example)
    facts: Row = {"one_shot": seed.top1(model), "removed": report.removed}
    seed.train_on(model, seed.recipe.finetune, teacher, behind=seed.recipe.train.epochs)
    return model, facts


def make_int8(seed: Seed, variant: str) -> tuple[nn.Module, Row]:
    """INT8 of a finished network, with QAT; zeros of a masked one are held."""
    teacher, start = seed.trained("float"), seed.trained(variant)
    target = cast(Target, seed.engine)
    spec = replace(cast(QuantSpec, seed.recipe.quantization), target=target, rules=())
    qmodel = quantize(start, seed.example, seed.images(spec.calibration_images), spec=spec)
    names = read(seed, variant).get("masked", [])
    zeros = {name: cast(Any, qmodel.get_submodule(name)).weight.detach() != 0 for name in names}
    if zeros:
        apply_masks(qmodel, zeros)
    facts = {"one_shot": seed.top1(qmodel), "kept_magnitude": read(seed, variant).get("kept_magnitude")}
    behind = seed.recipe.train.epochs + (seed.recipe.finetune.epochs if zeros else 0)
    seed.train_on(qmodel, cast(QATSpec, seed.recipe.qat), teacher, behind=behind)
    if zeros:
        squash_masks(qmodel)
    return qmodel, facts | {"masked": names}


MAKERS: dict[str, Callable[[Seed], tuple[nn.Module, Row]]] = {
    "float": make_float,
    "float, trained on": make_trained_on,
    "2:4": lambda seed: make_masked(seed, permute=False),
    "2:4 permuted": lambda seed: make_masked(seed, permute=True),
    "channels": make_channels,
    "int8": lambda seed: make_int8(seed, "float"),
    "2:4 permuted, int8": lambda seed: make_int8(seed, "2:4 permuted"),
}


def macs(model: nn.Module, example: Tensor, only: list[str] | None = None) -> int:
    """Multiply-accumulates of an image; of the named layers alone where given."""
    found = layer_table(trace(model, example[:1]))
    return sum(layer.macs or 0 for layer in found if only is None or layer.path in only)


def read(seed: Seed, variant: str) -> Row:
    """What is known of a finished variant."""
    return dict(json.loads(seed.path(variant, "json").read_text()))


def make(seed: Seed, variant: str) -> None:
    """Make a variant: weights, ONNX file, and figures, which come last and say that it is finished."""
    began = time.perf_counter()
    model, facts = MAKERS[variant](seed)
    model = model.eval().cpu()
    if not isinstance(model, fx.GraphModule):
        save_model(model, seed.path(variant, "safetensors"), {"variant": variant})
    onnx = export_onnx(model, seed.example.cpu(), seed.path(variant, "onnx"), preprocessing=seed.data.val.preprocessing)
    with build_engine(onnx, seed.engine, batch_size=32, precision="f32") as engine:
        batches = seed.data.val.batches(BatchPlan(batch_size=32))
        seen = measure_accuracy(engine, batches, preprocessing=seed.data.val.preprocessing)
    masked = facts.get("masked", [])
    base, example = (seed.trained("float").cpu(), seed.example.cpu()) if variant != "float" else (model, seed.example)
    counted = model if variant == "channels" else base
    facts["macs"] = macs(counted, example.cpu()) - macs(counted, example.cpu(), masked) // 2 if masked else None
    facts["macs"] = facts["macs"] or macs(counted, example.cpu())
    facts["violations"] = violations(onnx, masked)
    facts |= sizes(onnx, model, masked) | {"top1": 100 * seen.top1, "seconds": time.perf_counter() - began}
    write_json(seed.path(variant, "json"), facts)


def violations(onnx: Path, masked: list[str]) -> int | None:
    """Groups of four in the file that hold more than two values, over the masked layers; None = none is masked."""
    prefixes = tuple(f"/{name.replace('.', '/')}/" for name in masked)
    counts = [row.violations or 0 for row in audit_sparsity(onnx) if prefixes and row.name.startswith(prefixes)]
    return sum(counts) if masked else None


def sizes(onnx: Path, model: nn.Module, masked: list[str]) -> Row:
    """Bytes of the file and of its weights, and of these with the masked ones packed: half of them, 2 bits each."""
    total = model_sizes(onnx)
    width = 1 if isinstance(model, fx.GraphModule) else 4
    elements = sum(cast(Tensor, model.get_submodule(name).weight).numel() for name in masked)
    saved = elements * (width - (width + 2 / 8) / 2)
    return {
        "file_bytes": total.file_bytes,
        "weight_bytes": total.weight_bytes,
        "packed_bytes": total.weight_bytes - saved,
    }


def latencies(seed: Seed, *, threads: int, seconds: float) -> dict[str, Row]:
    """Median milliseconds of every variant, at float32 and at the engine's own choice if it has one, all in turn."""
    with ExitStack() as stack:
        engines = {
            (variant, precision): stack.enter_context(
                build_engine(
                    seed.path(variant, "onnx"), seed.engine, batch_size=1, threads=threads, precision=precision
                )
            )
            for variant in VARIANTS
            for precision in PRECISIONS[seed.engine]
        }
        labels = {f"{variant}, {precision or 'default'}": (variant, precision) for variant, precision in engines}
        timed = measure_latency(
            {label: engines[key] for label, key in labels.items()}, batch_size=1, runs=400, seconds=seconds
        )
    found = {labels[t.label]: t for t in timed}
    rows: dict[str, Row] = {variant: {} for variant in VARIANTS}
    for (variant, precision), t in found.items():
        name = precision or "default"
        rows[variant] |= {
            f"p50_ms_{name}": t.p50_ms,
            f"ratio_{name}": latency_ratio(t, found["float", precision]),
            f"computes_in_{name}": t.float_precision,
        }
    return rows


def engine_here() -> str:
    """The engine of this machine that the study runs on."""
    here = {row.name for row in compress.engine_availability() if row.available}
    found = next((name for name in PRECISIONS if name in here), None)
    if found is None:
        raise SystemExit(f"sparse_accuracy: none of {', '.join(PRECISIONS)} is installed, and accuracy is an engine's")
    return found


def run(name: str, recipe: Recipe, *, work: Path, seeds: int, device: str, threads: int, seconds: float) -> Row:
    """All variants of a study, those that are finished taken from their files, then the latencies of seed 0."""
    data = compress.load_data(recipe.data)
    engine = engine_here()
    work = work / f"{name}-{engine}-{recipe.digest()}"
    began, found = time.perf_counter(), []
    for number in range(seeds):
        seed = Seed(recipe, data, work / f"seed{number}", number, device, engine)
        seed.folder.mkdir(parents=True, exist_ok=True)
        for variant in VARIANTS:
            if not seed.path(variant, "json").is_file():
                make(seed, variant)
                print(f"{name}, seed {number}, {variant}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        found.append({variant: read(seed, variant) for variant in VARIANTS})
    timed = latencies(Seed(recipe, data, work / "seed0", 0, device, engine), threads=threads, seconds=seconds)
    size, sparsity, qat = recipe.data.image_size, cast(SparsitySpec, recipe.sparsity), cast(QATSpec, recipe.qat)
    return {
        "about": f"{recipe.model.name}, {name} at {size} px, {seeds} seed(s); {recipe.train.epochs} epochs of float, "
        f"{recipe.finetune.epochs} of fine-tuning at lr {recipe.finetune.lr:g}, {qat.epochs} of QAT; masks by "
        f"{sparsity.saliency}, {sparsity.schedule}; {sparsity.permute_seconds:g} s of permutation search",
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine().to_dict(),
        "device": device,
        "engine": engine,
        "seconds": sum(row["seconds"] for seed_rows in found for row in seed_rows.values()),
        "rows": [
            {"variant": variant, **timed[variant], "seeds": [rows[variant] for rows in found]} for variant in VARIANTS
        ],
    }


def write(out: Path, name: str, study: Row) -> str:
    """Add a study to the JSON, and write the tables and the figure of all that it holds."""
    path = out / "sparse_accuracy.json"
    report: Row = json.loads(path.read_text()) if path.is_file() else {}
    report = {key: value for key, value in {**report, name: study}.items() if value}
    write_json(path, report)
    about = (__doc__ or "").split("\n\n")[2]
    tables = [line for key in STUDIES if key in report for line in ("", *table(key, report[key]))]
    lines = ["# What taking weights away costs and brings", "", about, *tables, "", "![figure](sparse_accuracy.png)"]
    write_text(out / "sparse_accuracy.md", "\n".join(lines) + "\n")
    draw({key: report[key] for key in STUDIES if key in report}, out / "sparse_accuracy.png")
    return "\n".join(table(name, study))


def main() -> None:
    """Make what is missing, measure, write; the table comes last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=list(STUDIES), default="digits")
    parser.add_argument("--recipe", default="resnet50-sparse")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where to train: cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few small pictures, to see that it runs")
    parser.add_argument("--work", type=Path, default=Path("runs/sparse_accuracy"))
    parser.add_argument("--out", type=Path, default=Path("results/sparsity"))
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    recipe = compress.load_recipe(a.recipe, [*STUDIES[a.data], *(QUICK if a.quick else ()), *a.set])
    seconds = 0.3 if a.quick else 4.0
    found = run(a.data, recipe, work=a.work, seeds=a.seeds, device=a.device, threads=a.threads, seconds=seconds)
    print(write(a.out, a.data, found))


if __name__ == "__main__":
    main()
