import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compress
from compress.data import check_data_spec
from compress.errors import DataError, QuantizationError, RecipeError
from compress.measure import check_bench_spec
from compress.quantization import check_quant_spec
from compress.recipe.tree import parse_recipe
from compress.support.validation import parse
from compress.training import check_train_spec
from tests.networks import TinyResNet

HALF_OPEN = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, -0.0, 0.5])


def accepted(check, spec, error):
    try:
        check(spec)
    except error:
        return False
    return True


@given(st.integers(-3, 12), HALF_OPEN, HALF_OPEN, HALF_OPEN)
def test_ranges_are_those_that_the_reference_states(bits, percentile, momentum, lr):
    spec = compress.QuantSpec(weights=compress.WeightSpec(num_bits=bits, percentile=percentile))
    fits = 2 <= bits <= 8 and 0 < percentile <= 100
    assert accepted(check_quant_spec, spec, QuantizationError) == fits
    fits = 0 <= momentum < 1 and 0 < lr < math.inf
    assert accepted(check_train_spec, compress.TrainSpec(momentum=momentum, lr=lr), RecipeError) == fits


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (
            compress.QuantSpec(
                rules=(compress.Rule(match="a"), compress.Rule(match="b", weights=compress.WeightSpec(num_bits=9)))
            ),
            "quantization.rules.1.weights.num_bits is 9: it must be 2 to 8",
        ),
        (compress.QuantSpec(smooth=1.5), "quantization.smooth is 1.5: it must be 0 to 1, or auto, or null"),
        (
            compress.QuantSpec(smooth=math.nan),
            "quantization.smooth is nan: it must be a finite number, 0 to 1, or auto, or null",
        ),
        (
            compress.QuantSpec(adaround=compress.AdaRoundSpec(warm_start=1.0)),
            "quantization.adaround.warm_start is 1.0: it must be at least 0 and below 1",
        ),
        (
            compress.QuantSpec(bias_correction="analitic"),
            "quantization.bias_correction is 'analitic', did you mean 'analytic'? "
            "(one of: auto, analytic, empirical, or null)",
        ),
        (
            compress.QuantSpec(weights=compress.WeightSpec(axis=1)),
            "quantization.weights.axis is 1 (one of: 0, or null)",
        ),
        (
            compress.QuantSpec(calibration_images="8"),
            "quantization.calibration_images is '8': it must be a whole number, 1 to 1,000,000,000",
        ),
        (
            compress.QuantSpec(target="trt"),
            "quantization.target is 'trt', did you mean 'tensorrt'? (one of: tensorrt, openvino,"
            " onnxruntime, litert, dla, qnn, xnnpack, any, or a list of them)",
        ),
        (
            compress.QuantSpec(target=3),
            "quantization.target is 3 (one of: tensorrt, openvino, onnxruntime, litert, dla, qnn, xnnpack, any",
        ),
        (
            compress.QuantSpec(weights=3),
            "quantization.weights: got 3; expected a section with keys num_bits, axis, calibrator",
        ),
    ],
)
def test_a_refusal_names_the_key_the_value_and_the_range(spec, line):
    with pytest.raises(QuantizationError) as caught:
        check_quant_spec(spec)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_all_values_of_a_dataclass_are_named_at_once():
    with pytest.raises(RecipeError) as caught:
        check_train_spec(compress.TrainSpec(lr=0.0, epochs=-1, precision="fp8"))
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "train.epochs",
        "train.lr",
        "train.precision",
    ]


def test_lists_and_numbers_of_numpy_are_taken():
    check_bench_spec(
        compress.BenchSpec(engines=["openvino"], batch_sizes=[np.int64(1), 8], seconds=np.float32(0.5), runs=3)
    )


def test_another_object_is_refused():
    with pytest.raises(QuantizationError, match="quantization is 'openvino': it must be a compress.QuantSpec"):
        check_quant_spec("openvino")


def test_recipe_and_library_refuse_with_the_same_line():
    with pytest.raises(RecipeError) as from_yaml:
        parse_recipe({"data": {"crop_ratio": 0}})
    with pytest.raises(DataError) as from_python:
        check_data_spec(compress.DataSpec(crop_ratio=0))
    assert str(from_python.value) in str(from_yaml.value)


def test_a_dataclass_survives_the_way_through_its_tree():
    recipe = compress.Recipe(
        quantization=compress.QuantSpec(rules=(compress.Rule(match="fc", weights=compress.WeightSpec(axis=None)),))
    )
    assert parse(compress.Recipe, dataclasses.asdict(recipe)) == (recipe, [])


def test_on_and_off_of_yaml_are_words_where_words_are_asked_for():
    # YAML 1.1 makes true and false of the unquoted words; a key that takes true or false keeps them.
    recipe = parse_recipe({"qat": {"distill": True}, "data": {"augment": False}}, ["qat.fused=off"])
    assert (recipe.qat.fused, recipe.qat.distill, recipe.data.augment) == ("off", True, False)
    assert parse_recipe({}, ["qat.fused=on"]).qat.fused == "on"
    with pytest.raises(RecipeError, match="train.precision is True"):
        parse_recipe({}, ["train.precision=on"])


def test_half_of_a_character_is_named():
    # YAML's escapes can make one, and no file or process takes it.
    with pytest.raises(RecipeError, match=r"it holds '\\ud800', half of a character"):
        parse_recipe({"model": {"name": "a\ud800b"}})


def test_lists_are_taken_where_tuples_are_declared():
    x = torch.randn(4, 3, 16, 16)
    rules = [compress.Rule(match="conv1", enable=False)]
    model = TinyResNet().eval()
    of_list = compress.quantize(model, x, [x], spec=compress.QuantSpec(target=["openvino"], rules=rules))
    of_tuple = compress.quantize(model, x, [x], spec=compress.QuantSpec(target=("openvino",), rules=tuple(rules)))
    assert of_list.placement.decisions == of_tuple.placement.decisions
    assert torch.equal(of_list(x), of_tuple(x))
