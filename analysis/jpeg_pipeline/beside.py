"""Does nvJPEG decode beside other work of the GPU? One call of a decoder while matrix products are queued.

    python -m analysis.jpeg_pipeline.beside

The products are a CUDA graph of about 15 ms, of few long kernels or of many short ones, replayed on the default stream.
The decoders are torchvision's, on its own stream, ours, which calls the same library on a stream of high priority, and
NVIDIA's nvImageCodec where it is installed (nvidia-nvimgcodec-cu13, nvidia-nvjpeg), on the same stream as ours.
Prints and writes jpeg_beside.json.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from analysis.common.qat_variants import DEVICE, machine
from analysis.common.study import Row, command_line, study_parser
from analysis.jpeg_pipeline.run import BATCH, DIFFERENT, SIZES, picture
from compress.data.jpeg import decode_jpegs
from compress.files import write_json

PRODUCTS = {"long": (12, 8192), "short": (500, 2048)}
"""Matrix products of a graph, and their rows and columns."""


def graph_of_products(count: int, side: int) -> torch.cuda.CUDAGraph:
    """Return a graph of matrix products in bf16."""
    one = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(one)
    torch.mm(one, one, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            torch.mm(one, one, out=out)
    return graph


def timed(decode: Callable[[], object], graph: torch.cuda.CUDAGraph, replays: int) -> Row:
    """Return milliseconds of a call beside `replays` of the graph, and those that the graphs took."""
    side = torch.cuda.Stream(priority=-1)
    decoded, worked = [], []
    for _ in range(6):
        torch.cuda.synchronize()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(replays):
            graph.replay()
        ended.record()
        start = time.perf_counter()
        with torch.cuda.stream(side):
            decode()
        decoded.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        worked.append(begun.elapsed_time(ended))
    return {"ms": round(statistics.median(decoded[1:]), 1), "work_ms": round(statistics.median(worked[1:]), 1)}


def image_codec(files: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Return nvImageCodec's call under its name; nothing where it is not installed."""
    try:
        nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
    except ImportError:
        return {}
    decoder = nvimgcodec.Decoder(device_id=torch.cuda.current_device())
    arrays = [file.numpy() for file in files]

    def decode() -> None:
        stream = torch.cuda.current_stream()
        found = decoder.decode([nvimgcodec.CodeStream(array) for array in arrays], cuda_stream=stream.cuda_stream)
        stream.synchronize()
        if any(image is None for image in found):
            raise RuntimeError("nvImageCodec did not decode a file")

    return {"nvImageCodec": decode}


def main() -> None:
    """Measure one batch of files, idle and beside one and four graphs."""
    arguments = study_parser(__doc__, out="results/h200").parse_args()
    rng = np.random.default_rng(0)
    made = [bytearray(picture(rng, *SIZES["ImageNet's size"])) for _ in range(DIFFERENT)]
    files = [torch.frombuffer(made[i % DIFFERENT], dtype=torch.uint8).pin_memory() for i in range(BATCH)]
    decoders: dict[str, Callable[[], object]] = {
        "torchvision": lambda: decode_jpeg(files, mode=ImageReadMode.RGB, device=DEVICE),
        "ours": lambda: decode_jpegs(files, torch.device("cuda", torch.cuda.current_device())),
        **image_codec(files),
    }
    rows = []
    for products, (count, side) in PRODUCTS.items():
        graph = graph_of_products(count, side)
        for replays in (0, 1, 4):
            for name, decode in decoders.items():
                rows.append({"products": products, "graphs": replays, "decoder": name, **timed(decode, graph, replays)})
                print(rows[-1], flush=True)
    write_json(arguments.out / "jpeg_beside.json", {"command": command_line(), "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
