"""Packs run folders for a machine that returns a few files of limited size: `small.tar.gz`, and pieces of one tar.

The tar holds the weights of the float network and of that after QAT. A quantized weight is stored as its INT8 codes,
which is the same network, every other matrix as float16: the float network is rounded, and everything that is measured
afterwards is measured on the rounded one. `python -m analysis.task_training.pack FOLDER OUT` makes run folders of it,
in which PTQ, which needs neither a GPU nor long, is still to be done.
"""

from __future__ import annotations

import argparse
import io
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from compress.files import write_text
from compress.pipeline.state import STATE_FILE, read_state_file
from compress.recipe import load_recipe
from compress.training.tensor_file import read_tensors, write_tensors
from compress.variants import Variant

PIECE, FIRST, REST = 15 * 2**20 + 2**19, 4, 8
"""Bytes of a piece, and how many a first call returns, and two later ones: with small.tar.gz less than 64 MiB each."""
SMALL = 2 * 2**20  # bytes of a file that goes into small.tar.gz
WEIGHTS = (Variant.QAT.weights_file, Variant.FLOAT.weights_file)
LARGEST_CODE = 127
RECIPE_FILE = "recipe.yaml"


class Packer:
    """Packs run folders, each file compressed once.

    Args:
        runs: folder of run folders and logs.
        out: takes small.tar.gz and the first pieces.
        rest: takes the pieces after them; None = there are none.
        weights: names of the files of weights.
    """

    def __init__(self, runs: Path, out: Path, rest: Path | None, *, weights: Sequence[str] = WEIGHTS) -> None:
        self.runs, self.out, self.rest, self.names = runs, out, rest, weights
        self._packed: dict[Path, bytes] = {}

    def small(self) -> None:
        """Write metrics, reports and logs of all networks."""
        self.out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(self.out / "small.tar.gz", "w:gz") as tar:
            for path in sorted(self.runs.rglob("*")):
                large = path.suffix in (".onnx", ".safetensors")
                if path.is_file() and not large and path.stat().st_size <= SMALL:
                    tar.add(path, str(path.relative_to(self.runs)))

    def weights(self, names: list[str]) -> None:
        """Write the pieces: the networks' weights, smallest first, as many as fit."""
        files = [self.runs / name / file for name in names for file in self.names]
        new = [path for path in files if path.is_file() and path not in self._packed]
        with ThreadPoolExecutor(8) as pool:
            self._packed |= dict(zip(new, pool.map(_compressed, new), strict=True))
        pieces, whole = FIRST + (0 if self.rest is None else REST), io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w") as tar:
            for path, data in sorted(self._packed.items(), key=lambda row: len(row[1])):
                name = f"{path.relative_to(self.runs)}.xz"
                if whole.tell() + len(data) + 20480 > PIECE * pieces:
                    print(f"left out: {name}, {len(data):,} bytes")
                    continue
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        self._write(whole.getvalue())

    def _write(self, content: bytes) -> None:
        for number, first in enumerate(range(0, len(content), PIECE)):
            folder = self.out if number < FIRST or self.rest is None else self.rest
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"weights.{number}").write_bytes(content[first : first + PIECE])


def _compressed(path: Path) -> bytes:
    found = read_tensors(path, "model")
    with TemporaryDirectory() as folder:
        file = write_tensors(Path(folder) / path.name, "model", narrowed(found.tensors), found.data)
        return lzma.compress(file.read_bytes(), preset=1)


def narrowed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the INT8 codes of quantized weights, float16 of other matrices, and the rest as it is."""
    return {name: _narrow(tensor, weight_scale(tensors, name, tensor)) for name, tensor in tensors.items()}


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 of the tensors that `narrowed` made narrow."""
    return {name: _wide(tensor, weight_scale(tensors, name, tensor)) for name, tensor in tensors.items()}


def weight_scale(tensors: Mapping[str, Tensor], name: str, weight: Tensor) -> Tensor | None:
    """Return the scale of a quantized weight, shaped to be multiplied with it; None = it is not quantized."""
    amax = tensors.get(f"{name}_quantizer.amax")
    if amax is None or amax.dim() > 1 or (amax.dim() == 1 and len(amax) != len(weight)):
        return None
    return (amax / LARGEST_CODE).view(-1, *[1] * (weight.dim() - 1))


def _narrow(tensor: Tensor, scale: Tensor | None) -> Tensor:
    if scale is not None:
        return (tensor / scale).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    return tensor.half() if tensor.dtype == torch.float32 and tensor.dim() > 1 else tensor


def _wide(tensor: Tensor, scale: Tensor | None) -> Tensor:
    if tensor.dtype == torch.int8 and scale is not None:
        return tensor.float() * scale
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def unpack(folder: Path, out: Path, targets: Sequence[str] = ()) -> list[Path]:
    """Make run folders of the files in a folder, and return the paths of their weights.

    Args:
        folder: with small.tar.gz and the pieces.
        out: takes the run folders.
        targets: that PTQ, which is done anew, makes files for, the one that QAT followed first; none = as trained.
    """
    with tarfile.open(folder / "small.tar.gz") as tar:
        tar.extractall(out, filter="data")
    pieces = sorted(folder.glob("weights.*"), key=lambda path: int(path.suffix[1:]))
    whole, found = io.BytesIO(b"".join(path.read_bytes() for path in pieces)), []
    with tarfile.open(fileobj=whole) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            path = out / member.name.removesuffix(".xz")
            path.write_bytes(lzma.decompress(content.read()))
            packed = read_tensors(path, "model")
            found.append(write_tensors(path, "model", widened(packed.tensors), packed.data))
    for state in out.rglob(STATE_FILE):
        _trained_alone(state.parent)
        if targets and (state.parent / RECIPE_FILE).is_file():
            _retarget(state.parent, targets)
    return found


def _trained_alone(folder: Path) -> None:
    """Let PTQ and the networks of further targets be made anew in a run folder: their weights did not come back."""
    state = read_state_file(folder)
    steps = {name: facts for name, facts in state.steps.items() if name in (Variant.FLOAT.step, Variant.QAT.step)}
    replace(state, steps=steps).write(folder)


def _retarget(folder: Path, targets: Sequence[str]) -> None:
    """Let a run folder go on for further targets than the one that its network was trained for."""
    recipe = load_recipe(folder / RECIPE_FILE, [f"quantization.target=[{','.join(targets)}]"])
    write_text(folder / RECIPE_FILE, recipe.to_yaml())
    replace(read_state_file(folder), recipe=recipe.digest()).write(folder)


def main() -> None:
    """Unpack from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with small.tar.gz, weights.0, weights.1, ...")
    parser.add_argument("out", type=Path)
    parser.add_argument("--targets", nargs="*", default=[], help="of the files, the trained one first: openvino ...")
    arguments = parser.parse_args()
    for path in unpack(arguments.folder, arguments.out, arguments.targets):
        print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
