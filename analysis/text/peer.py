"""NNCF's file of a network, made by a Python that has NNCF: `python peer.py FLOAT.onnx IMAGES.npz OUT.xml KIND`."""

import sys

import numpy as np


def main() -> None:
    import nncf
    import openvino

    source, images, out, kind = sys.argv[1:]
    model = openvino.Core().read_model(source)
    name = model.inputs[0].any_name
    stored = np.load(images)
    items = [{name: stored[key]} for key in stored.files]
    data = nncf.Dataset(items)
    model_type = nncf.ModelType.TRANSFORMER if kind == "transformer" else None
    quantized = nncf.quantize(model, data, model_type=model_type, subset_size=len(items))
    openvino.save_model(quantized, out, compress_to_fp16=False)


if __name__ == "__main__":
    main()
