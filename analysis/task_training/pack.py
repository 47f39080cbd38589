"""Packs run folders for a machine that returns a few files of limited size: `small.tar.gz`, and pieces of one tar.

The tar holds weights and ONNX files compressed with xz, one by one. A quantized network after QAT differs from the one
before by little, so that `qat.onnx` is stored as the difference of its bytes: `python -m analysis.task_training.pack
FOLDER OUT` undoes all of it.
"""

from __future__ import annotations

import argparse
import io
import lzma
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PIECE, FIRST, REST = int(15.5 * 2**20), 3, 4
"""Bytes of a piece, and how many a first and a second call return."""
SMALL = 2 * 2**20  # bytes of a file that goes into small.tar.gz
QUANTIZED = (("ptq.onnx", ""), ("qat.onnx", "ptq.onnx"), ("qat.onnx", ""))
"""Files, and those whose difference is stored where both have the same length."""
WEIGHTS = (
    ("float.safetensors", ""),
    ("ptq.safetensors", ""),
    ("qat.safetensors", ""),
    ("train.checkpoint.safetensors", ""),
    ("qat.checkpoint.safetensors", ""),
)

Row = tuple[Path, Path | None]


class Packer:
    """Packs run folders, each file compressed once.

    Args:
        runs: folder of run folders and logs.
        out: takes small.tar.gz and the first pieces.
        rest: takes the pieces after them; None = there are none.
    """

    def __init__(self, runs: Path, out: Path, rest: Path | None) -> None:
        self.runs, self.out, self.rest = runs, out, rest
        self._packed: dict[Row, bytes] = {}

    def small(self) -> None:
        """Write metrics, reports and logs of all networks."""
        self.out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(self.out / "small.tar.gz", "w:gz") as tar:
            for path in sorted(self.runs.rglob("*")):
                large = path.suffix in (".onnx", ".safetensors")
                if path.is_file() and not large and path.stat().st_size <= SMALL:
                    tar.add(path, str(path.relative_to(self.runs)))

    def weights(self, names: list[str]) -> None:
        """Write the pieces: quantized networks, smallest first, then weights of runs that go on, as many as fit."""
        rows = sorted(self._rows(names, QUANTIZED), key=lambda row: row[0].stat().st_size)
        rows += sorted(self._rows(names, WEIGHTS), key=lambda row: row[0].stat().st_size)
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(_compressed, [row for row in rows if row not in self._packed])
            self._packed |= dict(found)
        pieces, whole = FIRST + (0 if self.rest is None else REST), io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w") as tar:
            for path, base in rows:
                data = self._packed[path, base]
                name = f"{path.relative_to(self.runs)}{'' if base is None else '.difference'}.xz"
                if whole.tell() + len(data) + 20480 > PIECE * pieces:
                    print(f"left out: {name}, {len(data):,} bytes")
                    continue
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        self._write(whole.getvalue())

    def _rows(self, names: list[str], files: tuple[tuple[str, str], ...]) -> Iterator[Row]:
        """Yield each file that is there, with the one whose difference is stored."""
        for folder in (self.runs / name for name in names):
            seen: set[Path] = set()
            for file, base in files:
                path, other = folder / file, folder / base
                alike = bool(base) and other.is_file() and path.is_file()
                if path in seen or not path.is_file() or (base and not alike):
                    continue
                if alike and other.stat().st_size != path.stat().st_size:
                    continue
                seen.add(path)
                yield path, other if alike else None

    def _write(self, content: bytes) -> None:
        for number, first in enumerate(range(0, len(content), PIECE)):
            folder = self.out if number < FIRST or self.rest is None else self.rest
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"weights.{number}").write_bytes(content[first : first + PIECE])


def _compressed(row: Row) -> tuple[Row, bytes]:
    path, base = row
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if base is not None:
        data = data - np.frombuffer(base.read_bytes(), np.uint8)  # modulo 256
    return row, lzma.compress(data.tobytes(), preset=1)


def unpack(folder: Path, out: Path) -> list[Path]:
    """Join the pieces in a folder and write the files that they hold; return their paths."""
    pieces = sorted(folder.glob("weights.*"), key=lambda path: int(path.suffix[1:]))
    whole = io.BytesIO(b"".join(path.read_bytes() for path in pieces))
    found: dict[str, Path] = {}
    with tarfile.open(fileobj=whole) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            data = np.frombuffer(lzma.decompress(content.read()), np.uint8)
            name = member.name.removesuffix(".xz")
            if name.endswith(".difference"):
                name = name.removesuffix(".difference")
                data = data + np.frombuffer(found[str(Path(name).parent / "ptq.onnx")].read_bytes(), np.uint8)
            path = found[name] = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.tobytes())
    return list(found.values())


def main() -> None:
    """Unpack from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with weights.0, weights.1, ...")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    for path in unpack(arguments.folder, arguments.out):
        print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
