"""compress: PyTorch vision models made small and fast, and measured on the engine.

    qmodel = compress.quantize(model, example_inputs, batches, spec=compress.QuantSpec(target="tensorrt"))
    compress.export_onnx(qmodel, example_inputs, "model.onnx")
    engine = compress.build_engine("model.onnx", "openvino")

The README shows each use; `__init__.pyi` lists every name, stable or experimental. A name is imported when it is first
used, so that `import compress` takes no time and `compress.QuantSpec` does not wait for matplotlib or an engine.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from compress.version import __version__ as __version__

_LISTED = re.findall(
    r"^from (\S+) import (\w+) as \2(  # experimental)?$",
    Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)
_HOMES = {name: home for home, name, _ in _LISTED if name != "__version__"}
"""Public name -> the module that defines it."""
_EXPERIMENTAL = frozenset(name for _, name, mark in _LISTED if mark)
"""Public names that may change in any version."""

__all__ = sorted([*_HOMES, "__version__"])


class _Package(ModuleType):
    """This package as a module that imports a public name when it is first used."""

    def __getattr__(self, name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        """Keep `compress.search` the function: importing the package of that name would put the package there."""
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
