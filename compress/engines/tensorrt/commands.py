"""Writes the commands that build the same engine with NVIDIA's tools on another machine; nothing is run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.engines.onnx_file import OnnxFile
from compress.engines.tensorrt.options import PORTABLE_SMS, Profile, Shape, TensorRTOptions, profiles_of
from compress.export.names import is_sparse

_HARDWARE = {"ampere-plus": "ampere+", "same-compute-capability": "sameComputeCapability"}
_TARGETS = ("TensorRT 10", "TensorRT 11", "TensorRT-RTX")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line.

    Attributes:
        target: library that it is for: `TensorRT 10`, `TensorRT 11` or `TensorRT-RTX`.
        purpose: `build`, `time` or `compare`.
        words: of the command; environment variables come before the program.
    """

    target: str
    purpose: str
    words: tuple[str, ...]

    def text(self) -> str:
        """Return the command for a POSIX shell, one option on each line."""
        parts = [word if word.isidentifier() or _is_setting(word) else shlex.quote(word) for word in self.words]
        lines, line = [], ""
        for part in parts:
            if part.startswith("-") and line:
                lines.append(line)
                line = part
            else:
                line = f"{line} {part}".strip()
        return " \\\n    ".join([*lines, line])


def _is_setting(word: str) -> bool:
    return word.partition("=")[0].isupper() and "=" in word


def build_commands(file: OnnxFile, options: TensorRTOptions, *, engine: Path | None = None) -> tuple[Command, ...]:
    """Return commands that build and time the engine of an ONNX file, for TensorRT 10, 11 and TensorRT-RTX.

    - `engine`: file to write; None = `<model>.engine`.

    Raises:
        EngineError: no option closes an open dimension.
    """
    profiles = profiles_of(file.inputs, options, where=str(file.path))
    dynamic = {t.name: profiles[t.name] for t in file.inputs if -1 in t.shape}
    target = engine.name if engine else f"{file.path.stem}.engine"
    sparse = is_sparse(file.metadata) if options.sparse is None else options.sparse
    commands = []
    for name in _TARGETS:
        commands += [
            Command(target=name, purpose="build", words=_tool(name, file, target, dynamic, options, sparse)),
            Command(target=name, purpose="time", words=_timing(name, target, dynamic)),
            Command(target=name, purpose="build", words=_polygraphy(name, file, target, dynamic, options, sparse)),
            Command(target=name, purpose="compare", words=_compare(name, file, dynamic)),
        ]
    return tuple(commands)


def _program(target: str) -> str:
    return "tensorrt_rtx" if target == "TensorRT-RTX" else "trtexec"


def _tool(
    target: str,
    file: OnnxFile,
    engine: str,
    dynamic: Mapping[str, Profile],
    options: TensorRTOptions,
    sparse: bool,
) -> tuple[str, ...]:
    rtx = target == "TensorRT-RTX"
    words = [_program(target), f"--onnx={file.path.name}", f"--saveEngine={engine}"]
    words += ["--stronglyTyped"] if target == "TensorRT 10" else []
    words += [f"--{bound}Shapes={_by_x(shapes)}" for bound, shapes in _bounds(dynamic)]
    words += [f"--computeCapabilities={','.join(map(str, options.sms or PORTABLE_SMS))}"] if rtx else []
    words += [f"--memPoolSize=workspace:{options.workspace_mib}M"] if options.workspace_mib is not None else []
    words += ["--sparsity=enable"] if sparse else []
    words += [] if options.tf32 else ["--noTF32"]
    if options.optimization_level is not None:
        words.append(f"--builderOptimizationLevel={options.optimization_level}")
    words += ["--refit"] if options.refit else []
    if not rtx:
        words += ["--versionCompatible"] if options.version_compatible else []
        words += [f"--hardwareCompatibilityLevel={_HARDWARE[options.hardware]}"] if options.hardware != "none" else []
        words.append("--timingCacheFile=tensorrt.timing")
        words += ["--profilingVerbosity=detailed", f"--exportLayerInfo={engine}.layers.json"]
    return (*words, "--skipInference")


def _timing(target: str, engine: str, dynamic: Mapping[str, Profile]) -> tuple[str, ...]:
    shapes = [f"--shapes={_by_x((name, p.opt) for name, p in dynamic.items())}"] if dynamic else []
    graph = [] if target == "TensorRT-RTX" else ["--useCudaGraph"]
    return (_program(target), f"--loadEngine={engine}", *shapes, *graph, "--noDataTransfers", "--useSpinWait")


def _polygraphy(
    target: str,
    file: OnnxFile,
    engine: str,
    dynamic: Mapping[str, Profile],
    options: TensorRTOptions,
    sparse: bool,
) -> tuple[str, ...]:
    rtx = target == "TensorRT-RTX"
    words = [*_polygraphy_head(target), "convert", file.path.name, "--convert-to", "trt", "--output", engine]
    words += ["--strongly-typed"] if target == "TensorRT 10" else []
    for bound, shapes in _bounds(dynamic):
        words += [f"--trt-{bound}-shapes", *_by_list(shapes)]
    words += ["--compute-capabilities", *map(_dotted, options.sms or PORTABLE_SMS)] if rtx else []
    words += ["--pool-limit", f"workspace:{options.workspace_mib}M"] if options.workspace_mib is not None else []
    words += ["--sparse-weights"] if sparse else []
    words += ["--tf32"] if options.tf32 else []
    if options.optimization_level is not None:
        words += ["--builder-optimization-level", str(options.optimization_level)]
    words += ["--refittable"] if options.refit else []
    if not rtx:
        words += ["--version-compatible"] if options.version_compatible else []
        if options.hardware != "none":
            words += ["--hardware-compatibility-level", options.hardware.replace("-", "_")]
        words += ["--load-timing-cache", "tensorrt.timing", "--save-timing-cache", "tensorrt.timing"]
    return tuple(words)


def _compare(target: str, file: OnnxFile, dynamic: Mapping[str, Profile]) -> tuple[str, ...]:
    shapes = ["--input-shapes", *_by_list((name, p.opt) for name, p in dynamic.items())] if dynamic else []
    strong = ["--strongly-typed"] if target == "TensorRT 10" else []
    return (*_polygraphy_head(target), "run", file.path.name, "--trt", "--onnxrt", *strong, *shapes)


def _polygraphy_head(target: str) -> tuple[str, ...]:
    return ("POLYGRAPHY_USE_TENSORRT_RTX=1", "polygraphy") if target == "TensorRT-RTX" else ("polygraphy",)


def _bounds(dynamic: Mapping[str, Profile]) -> Iterator[tuple[str, list[tuple[str, Shape]]]]:
    """Yield `min`, `opt` and `max` with the shapes of all open inputs; nothing if none is open."""
    for bound in ("min", "opt", "max") if dynamic else ():
        yield bound, [(name, getattr(profile, bound)) for name, profile in dynamic.items()]


def _by_x(shapes: Iterable[tuple[str, Shape]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes)


def _by_list(shapes: Iterable[tuple[str, Shape]]) -> list[str]:
    return [f"{name}:[{','.join(map(str, shape))}]" for name, shape in shapes]


def _dotted(sm: int) -> str:
    return f"{sm // 10}.{sm % 10}"


def commands_markdown(commands: Sequence[tuple[str, Sequence[Command]]]) -> str:
    """Write `build.md`: for each file, the commands for another machine.

    Args:
        commands: name of a file and its commands.
    """
    lines = [
        "# Build these engines elsewhere",
        "",
        "The types are those of the ONNX files. TensorRT 10 needs `--stronglyTyped` for that; TensorRT 11 has no "
        "other mode, no precision flags and no calibrators. "
        "TensorRT and its engines belong to one GPU: run these commands on the machine that will run the engine. "
        "TensorRT-RTX builds on any machine for the compute capabilities that are named.",
    ]
    for name, rows in commands:
        for target in dict.fromkeys(row.target for row in rows):
            lines += ["", f"## {name}, {target}", "", "```sh"]
            lines += [f"# {row.purpose}\n{row.text()}" for row in rows if row.target == target]
            lines.append("```")
    return "\n".join(lines) + "\n"
