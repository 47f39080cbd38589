"""Float top-1 of EfficientNet-Lite0 by preprocessing and by the choice of pictures, on ONNX Runtime."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional
from torchvision.transforms.v2.functional import InterpolationMode

from analysis.common.study import Row, command_line, listed, software, study_parser
from analysis.real_accuracy.methods import exported, logits_of
from analysis.real_accuracy.networks import EVERY, efficientnet_lite0
from compress.files import write_text
from compress.measure.machine import describe_machine

BILINEAR, BICUBIC = InterpolationMode.BILINEAR, InterpolationMode.BICUBIC
SIDE, NAME = 224, "preprocessing"
# Random choices of four fifths of the pictures, for the deviation between them.
DRAWS = 10_000


@dataclass(frozen=True)
class Form:
    """A preprocessing: (pixel - mean) / std of the centre of a picture.

    Attributes:
        short: side that the shorter side is resized to before the crop; None squeezes the whole picture.
        mean, std: of each channel, in pixels.
    """

    short: int | None = 256
    interpolation: InterpolationMode = BILINEAR
    mean: tuple[float, ...] = (127.0,)
    std: tuple[float, ...] = (128.0,)

    def read(self, path: Path) -> Tensor:
        with Image.open(path) as file:
            image = file.convert("RGB")
        size = [SIDE, SIDE] if self.short is None else [self.short]
        image = functional.resize(image, size, interpolation=self.interpolation, antialias=True)
        pixels = functional.pil_to_tensor(functional.center_crop(image, [SIDE, SIDE])).float()
        return (pixels - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)


FORMS = {
    "short side 256, centre (the study's)": Form(),
    "short side 240, bilinear": Form(240),
    "short side 240, bicubic": Form(240, BICUBIC),
    "short side 224, bilinear": Form(224),
    "short side 224, bicubic": Form(224, BICUBIC),
    "short side 288, bicubic": Form(288, BICUBIC),
    "whole picture to 224 x 224, bicubic": Form(None, BICUBIC),
    "ImageNet's mean and deviation": Form(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375)),
}


def main() -> None:
    parser = study_parser(__doc__, out="results/real_accuracy")
    parser.add_argument("--pictures", type=Path, required=True, help="ImageNet pictures, one of each class")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    o = parser.parse_args()
    paths, model = sorted(o.pictures.glob("*.jpg")), efficientnet_lite0()
    targets = torch.arange(len(paths))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in o.forms:
            images = torch.stack([FORMS[name].read(path) for path in paths])
            file = Path(folder) / "float.onnx"
            if not file.exists():
                exported(model, images[:2], file)
            right = (logits_of(file, "onnxruntime", images, o.threads).argmax(1) == targets).double()
            rows.append({"form": name, **shares(right)})
            print(rows[-1], flush=True)
    about = {"command": command_line(["--pictures", "DIR"]), "machine": describe_machine().to_dict()["cpu"]}
    data = {**about, "pictures": len(paths), "software": software("torch", "torchvision", "onnxruntime"), "rows": rows}
    write_text(o.out / f"{NAME}.json", json.dumps(data, indent=1) + "\n")
    print(page(o.out, data))


def shares(right: Tensor) -> Row:
    """Return the top-1 in percent of all pictures and of choices of four fifths, and the deviation of random ones."""
    count, at = len(right), torch.arange(len(right))
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [right[torch.randperm(count, generator=generator)[: count * 4 // 5]].mean() for _ in range(DRAWS)]
    )
    chosen = {
        "all": right,
        "study": right[at % EVERY != 0],
        "first": right[: count * 4 // 5],
        "last": right[count // 5 :],
    }
    found = {name: round(100 * values.mean().item(), 2) for name, values in chosen.items()}
    return found | {"deviation": round(100 * draws.std().item(), 2), "most": round(100 * draws.max().item(), 2)}


def page(folder: Path, data: Row) -> str:
    lines = [
        "# Float top-1 of EfficientNet-Lite0 by preprocessing and by the choice of pictures",
        "",
        f"The {data['pictures']} pictures have a short side of 256 pixels already: at 256 nothing is resized. The "
        "study evaluates four of five; the others are the first and the last four fifths, the deviation of random "
        f"ones, and the most that one of {DRAWS:,} random ones has.",
        "",
        "| preprocessing | all | the study's | first | last | deviation | most |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(str(value) for value in row.values())} |" for row in data["rows"]]
    lines += ["", f"`{data['command']}` on {data['machine']}; {listed(data['software'])}."]
    return write_text(folder / f"{NAME}.md", "\n".join(lines) + "\n").read_text()


if __name__ == "__main__":
    main()
