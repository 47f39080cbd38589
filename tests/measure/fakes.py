"""An engine whose results are given: what is tested is the measuring, not the engine."""

from collections.abc import Callable

import numpy as np

from compress import Engine
from compress.engines import EngineInfo, TensorInfo


class GivenEngine(Engine):
    def __init__(
        self,
        function: Callable[[np.ndarray], np.ndarray],
        *,
        label: str = "given",
        shape: tuple[int, ...] = (-1, 4),
        dtype: str = "float32",
        metadata: dict[str, str] | None = None,
        calls: list[tuple[str, np.ndarray]] | None = None,
    ) -> None:
        self.function = function
        self.inputs = (TensorInfo(name="input", dtype=dtype, shape=shape),)
        self.outputs = (TensorInfo(name="logits", dtype="float32", shape=(shape[0], 5)),)
        self.metadata = metadata or {}
        self.info = EngineInfo(engine="given", label=label, version="1", device="CPU", float_precision="f32")
        self.calls = [] if calls is None else calls

    def run(self, inputs):
        self.calls.append((self.info.label, inputs["input"]))
        return {"logits": self.function(inputs["input"])}


class Listener:
    def __init__(self) -> None:
        self.total: int | None = None
        self.advanced = 0
        self.finished = False

    def start(self, task, total, *, done=0):
        self.total = total

    def advance(self, task, amount=1, **fields):
        self.advanced += amount

    def finish(self, task):
        self.finished = True
