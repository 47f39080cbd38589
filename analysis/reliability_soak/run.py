"""QAT for as long as one likes, killed with SIGKILL at random moments and resumed; see README.md."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from analysis.common.study import command_line, study_parser
from analysis.reliability_faults.inject import digests
from analysis.reliability_soak.child import NOTES
from compress.files import write_json, write_text
from compress.recipe import parse_recipe

LEAST_S = 1.0
"""No session is killed earlier."""

WARM_SHARE = 0.2
"""Share of the undisturbed run that counts as its beginning: allocators and caches fill there."""

MEASURES = ("host_bytes", "gpu_bytes", "gpu_reserved_bytes", "files", "threads")


def tree_of(epochs: int, images: int, network: str) -> dict[str, Any]:
    """Return the recipe of the run."""
    return {
        "model": {"name": network},
        "data": {"name": "shapes", "num_classes": 4, "image_size": 16, "batch_size": 32, "train_images": images,
                 "val_images": 64},
        "train": {"epochs": 1, "warmup_epochs": 0},
        "quantization": {"target": "openvino", "calibration_images": 64},
        "qat": {"epochs": epochs, "ema_decay": 0.99, "augment": ["mixup"]},
        "bench": {"engines": [], "batch_sizes": []},
    }  # fmt: skip


def begun(recipe: Path, out: Path, session: str, device: str) -> subprocess.Popen[bytes]:
    """Start a session in a process group of its own."""
    words = [sys.executable, "-W", "ignore", "-m", "analysis.reliability_soak.child", str(recipe), str(out)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with out.with_name(f"{out.name}.log").open("ab") as log:
        return subprocess.Popen(
            [*words, "--session", session, "--device", device],
            start_new_session=True,
            stdout=log,
            stderr=log,
            env=environment,
        )


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Return the notes of all sessions of a run; the last line may have been cut off by a kill."""
    path = out.with_name(f"{out.name}.{NOTES}")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def undisturbed(recipe: Path, out: Path, device: str) -> float:
    """Run to the end, and return the seconds it took."""
    began = time.monotonic()
    if begun(recipe, out, "0", device).wait():
        raise SystemExit(f"the undisturbed run failed:\n{_log(out)}")
    return time.monotonic() - began


def disturbed(recipe: Path, out: Path, device: str, mean_s: float, end: float, draw: random.Random) -> list[float]:
    """Kill and resume until the run has ended; return the seconds that each killed session lived.

    Args:
        recipe: file of the recipe.
        out: run folder.
        device: that trains.
        mean_s: mean time to a kill; the times are exponentially distributed.
        end: of `time.monotonic`; later sessions are left alone.
        draw: random numbers.
    """
    lived: list[float] = []
    while True:
        session = begun(recipe, out, str(len(lived)), device)
        wait = LEAST_S + draw.expovariate(1 / mean_s)
        try:
            status = session.wait(None if time.monotonic() > end else wait)
        except subprocess.TimeoutExpired:
            os.killpg(session.pid, signal.SIGKILL)
            session.wait()
            lived.append(wait)
            continue
        if status:
            raise SystemExit(f"session {len(lived)} ended with status {status}:\n{_log(out)}")
        return lived


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return of each measure its median early and late in the undisturbed run, and the largest value."""
    settled = rows[int(WARM_SHARE * len(rows)) :]
    part = max(1, len(settled) // 4)
    return {
        name: {
            "early": statistics.median(row[name] for row in settled[:part]),
            "late": statistics.median(row[name] for row in settled[-part:]),
            "most": max(row[name] for row in rows),
        }
        for name in MEASURES
    }


def page(found: dict[str, Any]) -> str:
    """Return soak.md."""
    equal = "the same bits" if found["same"] else "OTHER BITS"
    lines = [
        "# Soak",
        "",
        f"`{found['command']}` on {found['device']}, torch {found['torch']}: QAT of {found['steps']:,} steps.",
        "",
        f"{found['hours']:.2f} hours in all: {found['undisturbed_s']:,.0f} s undisturbed, "
        f"{found['disturbed_s']:,.0f} s with {found['kills']} kills, {found['kills_in_qat']} of them in sessions that "
        f"had trained. The weights of both runs have {equal}: {', '.join(found['files'])}.",
        "",
        "Of the undisturbed run, noted each second; early and late are medians of the first and the last quarter after "
        f"the first {WARM_SHARE:.0%}:",
        "",
        "| | early | late | most |",
        "|---|---|---|---|",
    ]
    for name, row in found["growth"].items():
        cells = [f"{row[key] / 2**20:,.1f} MiB" if "bytes" in name else f"{row[key]:,.0f}" for key in row]
        lines.append(f"| {name.removesuffix('_bytes').replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _log(out: Path) -> str:
    return out.with_name(f"{out.name}.log").read_text(encoding="utf-8", errors="replace")[-2000:]


def main() -> None:
    """Run undisturbed, then disturbed, compare, and write soak.json and soak.md."""
    parser = study_parser(__doc__, out="results/reliability")
    parser.add_argument("--epochs", type=int, default=100, help="of QAT")
    parser.add_argument("--images", type=int, default=256, help="of an epoch")
    parser.add_argument("--network", default="analysis.reliability_soak.network:small", help="of the recipe")
    parser.add_argument("--kill-every", type=float, default=20.0, help="mean seconds to a kill")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="kill no more after so many seconds of the second run"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    recipe = parse_recipe(tree_of(options.epochs, options.images, options.network))
    with TemporaryDirectory() as scratch:
        whole, killed, file = (Path(scratch) / name for name in ("whole", "killed", "soak.yaml"))
        write_text(file, recipe.to_yaml())
        began = time.monotonic()
        undisturbed_s = undisturbed(file, whole, options.device)
        end = time.monotonic() + options.seconds
        lived = disturbed(file, killed, options.device, options.kill_every, end, random.Random(options.seed))
        total = time.monotonic() - began
        rows = rows_of(killed)
        found = {
            "command": command_line(),
            "device": torch.cuda.get_device_name() if options.device != "cpu" else "CPU",
            "torch": torch.__version__,
            "steps": max((row["step"] for row in rows), default=0),
            "hours": total / 3600,
            "undisturbed_s": undisturbed_s,
            "disturbed_s": total - undisturbed_s,
            "kills": len(lived),
            "kills_in_qat": len({row["session"] for row in rows} & {str(i) for i in range(len(lived))}),
            "same": digests(whole) == digests(killed),
            "files": sorted(digests(whole)),
            "growth": growth(rows_of(whole)),
        }
    write_json(options.out / "soak.json", found)
    write_text(options.out / "soak.md", page(found))
    print(page(found))
    if not found["same"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
