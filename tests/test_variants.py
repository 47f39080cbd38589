"""The names and the properties that files and reports rely on."""

import pytest

from compress.variants import Variant


def test_names_are_those_of_the_files_that_older_runs_wrote():
    assert [str(v) for v in Variant] == ["float", "ptq", "qat", "sparse", "sparse-ptq", "sparse-qat"]
    assert Variant.SPARSE_QAT.weights_file == "sparse-qat.safetensors"
    assert Variant.FLOAT.onnx_file == "float.onnx"


@pytest.mark.parametrize(
    ("variant", "sparse", "quantized", "start"),
    [
        ("float", False, False, None),
        ("ptq", False, True, None),
        ("qat", False, True, "ptq"),
        ("sparse", True, False, None),
        ("sparse-ptq", True, True, None),
        ("sparse-qat", True, True, "sparse-ptq"),
    ],
)
def test_properties(variant, sparse, quantized, start):
    found = Variant(variant)
    assert (found.is_sparse, found.is_quantized, found.trained_from) == (sparse, quantized, start)


def test_a_foreign_name_is_no_variant():
    assert Variant.named("sparse_model") is None
    assert Variant.named("qat") is Variant.QAT
