"""Makes EfficientNet-Lite0's file by a slow method on a GPU; `run --made FILE` measures it on any machine."""

import tempfile
import time
from pathlib import Path

import torch

from analysis.common.study import option, study_options
from analysis.real_accuracy.methods import METHODS
from analysis.real_accuracy.networks import Subject, efficientnet_lite0, pictures


def main() -> None:
    o = study_options(
        __doc__,
        option("method", choices=METHODS),
        option("--pictures", type=Path, required=True, help="folder of the pictures that calibrate"),
        option("--out", type=Path, required=True, help="the file"),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = False
    calibration = pictures(sorted(o.pictures.glob("*.jpg"))).to(device)
    subject = Subject(efficientnet_lite0().to(device), calibration, calibration[:0], torch.zeros(0))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = METHODS[o.method].make(subject, Path(folder), Path(folder))
        o.out.write_bytes(made.file.read_bytes())
    print(f"{o.method}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
