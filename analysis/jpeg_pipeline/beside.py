"""Does nvJPEG decode beside other work of the GPU? One call of torchvision's decoder while matrix products are queued.

    python -m analysis.jpeg_pipeline.beside

The products are a CUDA graph of about 15 ms, replayed on the default stream or on another one; the decoder is called on
a stream of high priority. Prints and writes jpeg_beside.json.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from torch import Tensor

from analysis.common.qat_variants import DEVICE, machine
from analysis.common.study import Row, command_line, study_parser
from analysis.jpeg_pipeline.run import DIFFERENT, SIZES, picture
from compress.data.jpeg import decode_jpegs
from compress.files import write_json

PRODUCTS, SIDE = 12, 8192


def graph_of_products() -> torch.cuda.CUDAGraph:
    """Return a graph of matrix products in bf16."""
    one = torch.randn(SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(one)
    torch.mm(one, one, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PRODUCTS):
            torch.mm(one, one, out=out)
    return graph


def timed(files: list[Tensor], graph: torch.cuda.CUDAGraph, replays: int, stream: torch.cuda.Stream) -> Row:
    """Return milliseconds of a call beside `replays` of the graph, and whether they had ended when it returned."""
    side = torch.cuda.Stream(priority=-1)
    decoded, ended = [], []
    for _ in range(6):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(replays):
                graph.replay()
            last = stream.record_event()
        start = time.perf_counter()
        with torch.cuda.stream(side):
            decode_jpegs(files, DEVICE)
        decoded.append((time.perf_counter() - start) * 1e3)
        ended.append(last.query())
    return {"ms": round(statistics.median(decoded[1:]), 1), "work_had_ended": all(ended[1:])}


def main() -> None:
    """Measure one and four batches of files, idle and beside one and four graphs on two streams."""
    arguments = study_parser(__doc__, out="results/h200").parse_args()
    rng = np.random.default_rng(0)
    made = [bytearray(picture(rng, *SIZES["ImageNet's size"])) for _ in range(DIFFERENT)]
    pictures = [torch.frombuffer(one, dtype=torch.uint8).pin_memory() for one in made]
    graph, rows = graph_of_products(), []
    streams = {"default": torch.cuda.default_stream(), "another": torch.cuda.Stream()}
    for count in (128, 512):
        files = [pictures[i % len(pictures)] for i in range(count)]
        for replays in (0, 1, 4):
            for name, stream in streams.items():
                row = {"files": count, "graphs": replays, "stream": name, **timed(files, graph, replays, stream)}
                rows.append(row)
                print(row, flush=True)
    write_json(arguments.out / "jpeg_beside.json", {"command": command_line(), "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
