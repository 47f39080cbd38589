import pytest

from compress import SparsitySpec
from compress.errors import SparsityError
from compress.sparsity.spec import check_sparsity_spec, parse_pattern


@pytest.mark.parametrize(
    ("text", "kind", "ratio"),
    [
        ("2:4", "nm", 0.5),
        ("1:4", "nm", 0.75),
        ("4:8", "nm", 0.5),
        ("3:7", "nm", 4 / 7),
        ("unstructured:0.9", "unstructured", 0.9),
        ("channel:0.25", "channel", 0.25),
    ],
)
def test_patterns_are_read_and_written_back(text, kind, ratio):
    pattern = parse_pattern(text)
    assert (pattern.kind, pattern.ratio) == (kind, pytest.approx(ratio))
    assert str(pattern) == text


@pytest.mark.parametrize(
    "text",
    ["", "2", "2:", "4:4", "5:4", "0:4", "-1:4", "2:4:8", "unstructured:1", "unstructured:x", "channel:0", "nm:2"],
)
def test_other_patterns_are_refused(text):
    with pytest.raises(SparsityError, match="pattern"):
        parse_pattern(text)


def test_misspelt_pattern_gets_a_hint():
    with pytest.raises(SparsityError, match="did you mean 'unstructured'"):
        parse_pattern("unstructred:0.5")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"saliency": "hesian"}, "sparsity.saliency"),
        ({"schedule": "oneshot"}, "sparsity.schedule"),
        ({"kernels": "cuda"}, "sparsity.kernels"),
        ({"permute_seconds": 0.0}, "sparsity.permute_seconds"),
        ({"permute_seconds": float("nan")}, "sparsity.permute_seconds"),
        ({"begin": 1.0}, "sparsity.begin"),
        ({"begin": 0.5, "end": 0.5}, "sparsity.end"),
        ({"end": 1.5}, "sparsity.end"),
        ({"update_steps": 0}, "sparsity.update_steps"),
        ({"sr_ste_decay": -1.0}, "sparsity.sr_ste_decay"),
        ({"calibration_images": 0}, "sparsity.calibration_images"),
        ({"damping": 0.0}, "sparsity.damping"),
        ({"seed": -1}, "sparsity.seed"),
        ({"saliency": "hessian", "schedule": "gradual"}, "hessian"),
        ({"pattern": "unstructured:0.5", "permute": True}, "permute"),
        ({"pattern": "channel:0.5", "schedule": "gradual"}, "channel"),
        ({"pattern": "unstructured:0.5", "schedule": "gumbel"}, "gumbel"),
        ({"saliency": "hessian", "schedule": "gumbel"}, "hessian"),
    ],
)
def test_values_that_cannot_be_are_refused(change, key):
    with pytest.raises(SparsityError, match=key):
        check_sparsity_spec(SparsitySpec(**change))


def test_default_spec_is_acceptable():
    assert str(check_sparsity_spec(SparsitySpec())) == "2:4"
