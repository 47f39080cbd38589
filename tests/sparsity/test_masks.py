from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from compress import SparsitySpec, sparsify
from compress.errors import SparsityError
from compress.sparsity import SparsityRule, check_sparsity_spec, parse_pattern
from compress.sparsity.eligibility import eligibility
from compress.sparsity.parametrization import (
    kept_magnitude,
    nm_mask,
    partial_mask,
    pattern_mask,
    unstructured_mask,
    verify_nm,
)
from tests.networks import Net
from tests.sparsity.nets import batch, small

NM = st.sampled_from([(2, 4), (1, 4), (3, 4), (1, 2), (4, 8), (2, 6)])
FLOATS = st.floats(-4, 4, width=32)


@st.composite
def weights(draw, largest=3):
    n, m = draw(NM)
    shape = (draw(st.integers(1, largest)), m * draw(st.integers(1, 2)), *draw(st.sampled_from([(), (2,), (1, 2)])))
    return n, m, torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=FLOATS)))


@given(weights())
def test_nm_mask_is_the_best_of_all_patterns(drawn):
    n, m, weight = drawn
    mask = nm_mask(weight, n, m)
    groups = weight.abs().double().movedim(1, -1).reshape(-1, m)
    chosen = mask.movedim(1, -1).reshape(-1, m)
    assert (chosen.sum(1) == n).all()
    for values, keep in zip(groups, chosen, strict=True):
        best = max(values[list(pattern)].sum().item() for pattern in combinations(range(m), n))
        assert values[keep].sum().item() == pytest.approx(best)


@settings(max_examples=30)
@given(weights())
def test_nm_mask_follows_given_scores_and_breaks_ties_low(drawn):
    n, m, weight = drawn
    smallest = weight.abs().movedim(1, -1).reshape(-1, m).sort(1).values[:, :n]
    kept = weight.abs()[nm_mask(weight, n, m, scores=-weight.abs())]
    assert kept.double().sum().item() == pytest.approx(smallest.double().sum().item())
    ties = nm_mask(torch.ones_like(weight), n, m).movedim(1, -1).reshape(-1, m)
    assert (ties == (torch.arange(m) < n)).all()


@given(hnp.arrays(np.float32, st.integers(1, 30), elements=FLOATS), st.floats(0, 1))
def test_unstructured_mask_takes_the_smallest(values, ratio):
    mask = unstructured_mask(torch.from_numpy(values), ratio).numpy()
    assert (~mask).sum() == round(ratio * len(values))
    if 0 < mask.sum() < len(mask):
        assert np.abs(values[mask]).min() >= np.abs(values[~mask]).max()


def test_kept_magnitude_of_iid_weights_matches_the_literature():
    generator = torch.Generator().manual_seed(0)
    for draw, structured, unstructured in ((torch.rand, 0.700, 0.750), (torch.randn, 0.7445, 0.7965)):
        weight = draw(1024, 1024, generator=generator)
        assert kept_magnitude(weight, nm_mask(weight, 2, 4)) == pytest.approx(structured, abs=1e-3)
        assert kept_magnitude(weight, unstructured_mask(weight, 0.5)) == pytest.approx(unstructured, abs=1e-3)


def test_kept_magnitude_of_zeros_is_all():
    assert kept_magnitude(torch.zeros(2, 4), nm_mask(torch.zeros(2, 4), 2, 4)) == 1.0


@settings(max_examples=30)
@given(weights(), st.floats(0, 1))
def test_partial_masks_lead_from_all_to_the_mask_by_magnitude(drawn, level):
    n, m, weight = drawn
    final = nm_mask(weight, n, m)
    part = partial_mask(weight, final, level)
    assert torch.equal(partial_mask(weight, final, 0.0), torch.ones_like(final))
    assert torch.equal(partial_mask(weight, final, 1.0), final)
    assert (part | ~final).all()  # keeps all that the final mask keeps
    gone, spared = weight.abs()[~part], weight.abs()[part & ~final]
    assert len(gone) == round(level * int((~final).sum()))
    assert not len(gone) or not len(spared) or gone.max() <= spared.min()


@given(hnp.arrays(np.int8, (3, 8, 2), elements=st.integers(-2, 2)), st.sampled_from([(2, 4), (1, 2), (3, 8)]))
def test_verify_nm_counts_groups_one_by_one(weight, nm):
    n, m = nm
    expected = sum(
        np.count_nonzero(weight[k, g : g + m, r]) > n for k in range(3) for g in range(0, 8, m) for r in range(2)
    )
    assert verify_nm(weight, n, m) == expected
    assert verify_nm(np.moveaxis(weight, 1, 0), n, m, axis=0) == expected


def zoo():
    def run(net, x):
        x = net.depthwise(net.grouped(net.plain(net.stem(x))))
        x = net.deep(net.up(net.wide(net.narrow(net.odd(x))))).flatten(2).transpose(1, 2)
        return net.head(net.attention(x, x, x)[0].mean(1))

    return Net(
        run,
        unused=nn.Linear(32, 32),
        stem=nn.Conv2d(3, 32, 3),
        plain=nn.Conv2d(32, 32, 3),
        grouped=nn.Conv2d(32, 32, 3, groups=4),
        depthwise=nn.Conv2d(32, 32, 3, groups=32),
        odd=nn.Conv2d(32, 36, 1),
        narrow=nn.Conv2d(36, 30, 1),
        wide=nn.Conv2d(30, 256, 1),
        up=nn.ConvTranspose2d(256, 64, 1),
        deep=nn.Conv2d(64, 256, 3, padding=1),
        attention=nn.MultiheadAttention(256, 4, batch_first=True),
        head=nn.Linear(256, 16),
    )


def rows(spec=None, *, model=None, inputs=None):
    return {r.layer: r for r in eligibility(model or zoo(), spec or SparsitySpec(), example_inputs=inputs)}


def test_every_layer_has_a_verdict_and_a_reason():
    found = rows(inputs=torch.zeros(1, 3, 12, 12))
    assert [name for name, row in found.items() if row.eligible] == ["plain", "deep"]
    for name, words in {
        "unused": "does not run",
        "stem": "3 input channels, not a multiple of 4",
        "grouped": "4 groups",
        "depthwise": "1 input channels a group",
        "odd": "multiples of 8, and it has 32 and 36",
        "narrow": "multiples of 16",
        "wide": "30 input channels, not a multiple",
        "up": "transposed",
        "attention.out_proj": "part of attention",
        "head": "the last layer",
        "plain": "rarely faster below 256",
        "deep": "large enough to gain",
    }.items():
        assert words in found[name].reason, name
    assert found["plain"].shape == (32, 32, 3, 3)


def test_without_inputs_the_registered_order_counts():
    found = rows()
    assert "first layer" in found["unused"].reason and found["head"].reason.startswith("the last layer")


def test_rules_enable_and_disable_and_the_last_one_wins():
    spec = SparsitySpec(
        rules=(
            SparsityRule(match="*"),
            SparsityRule(match="deep", enable=False),
            SparsityRule(match="*ee*", enable=False),
            SparsityRule(match="dee?"),
        )
    )
    found = rows(spec)
    enabled = ["unused", "plain", "grouped", "odd", "narrow", "deep", "head"]
    assert [name for name, row in found.items() if row.eligible] == enabled
    found = rows(SparsitySpec(rules=(*spec.rules, SparsityRule(match="d*", enable=False))))
    assert found["deep"].reason == "a rule leaves it dense"


def test_kernels_any_asks_for_divisible_channels_only():
    found = rows(SparsitySpec(kernels="any"))
    assert found["odd"].eligible and found["narrow"].eligible
    assert not found["wide"].eligible
    assert not rows(SparsitySpec(pattern="2:8"))["narrow"].eligible
    assert rows(SparsitySpec(pattern="2:8"))["odd"].eligible  # TensorRT has no such kernels to ask for channels
    assert rows(SparsitySpec(pattern="unstructured:0.5"))["wide"].eligible


def test_a_model_compiled_in_place_shows_its_order():
    model, plain = zoo(), zoo()
    model.compile(backend="eager")
    model(torch.zeros(1, 3, 12, 12))
    wanted = [row.eligible for row in rows(model=plain, inputs=torch.zeros(1, 3, 12, 12)).values()]
    assert [row.eligible for row in rows(model=model, inputs=torch.zeros(1, 3, 12, 12)).values()] == wanted


def test_tied_weights_stay_dense():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    model[2].weight, model[3].bias = model[1].weight, model[1].bias
    found = rows(SparsitySpec(rules=(SparsityRule(match="*"),)), model=model)
    assert [name for name, row in found.items() if row.eligible] == ["0", "3", "4"]
    assert "weight is that of 2 too" in found["1"].reason and "weight is that of 1 too" in found["2"].reason
    sparsify(model, SparsitySpec())
    assert [name for name, row in rows(model=model).items() if row.eligible] == ["3"]


def test_the_model_is_left_as_it_was():
    model = zoo().train()
    model.deep.eval()
    modes = {name: m.training for name, m in model.named_modules()}
    rows(model=model, inputs=torch.zeros(1, 3, 12, 12))
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert not any(m._forward_hooks for m in model.modules())


def test_a_layer_under_weight_norm_is_told_of():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), weight_norm(nn.Conv2d(16, 16, 3)), nn.Conv2d(16, 16, 3), nn.Flatten())
    assert len(rows(model=model, inputs=torch.zeros(1, 3, 12, 12))) == 3
    with pytest.raises(SparsityError, match="layer 1 is parametrized by something else"):
        sparsify(model, SparsitySpec(), example_inputs=torch.zeros(1, 3, 12, 12))


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
    assert (pattern.kind, pattern.ratio, str(pattern)) == (kind, pytest.approx(ratio), text)


WRONG = ("", "2", "2:", "4:4", "5:4", "0:4", "-1:4", "2:4:8", "unstructured:1", "unstructured:x", "channel:0", "nm:2")
SPECS = [
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
]
WEIGHTS = [
    (torch.ones(4, 6), 2, "multiple of 4"),
    (torch.ones(8), 2, "multiple of 4"),
    (torch.ones(4, 8), 4, "below m"),
    (torch.ones(4, 8), 0, "below m"),
    (torch.full((4, 8), float("nan")), 2, "NaN"),
    (torch.full((4, 8), float("inf")), 2, "infinite"),
]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((partial(nm_mask, weight, n, 4), words) for weight, n, words in WEIGHTS),
        (lambda: nm_mask(torch.ones(4, 8), 2, 4, scores=torch.ones(8, 4)), "scores"),
        (lambda: unstructured_mask(torch.ones(4), 1.5), "between 0 and 1"),
        (lambda: pattern_mask(torch.ones(4, 4), parse_pattern("channel:0.5")), "prune_channels"),
        (lambda: verify_nm(np.ones((4, 6)), 2, 4), "axis 1"),
        (lambda: verify_nm(np.ones((4, 8)), 2, 4, axis=2), "axis 2"),
        (
            lambda: rows(SparsitySpec(rules=(SparsityRule(match="plian"),))),
            "matches no layer, did you mean 'plain'",
        ),
        (
            lambda: rows(SparsitySpec(rules=(SparsityRule(match="stem"),))),
            "a rule enables stem, but it has 3 input channels",
        ),
        (
            lambda: eligibility(small(), SparsitySpec(), example_inputs=batch()[:, :2]),
            "fails on the example inputs",
        ),
        *((partial(parse_pattern, text), "pattern") for text in WRONG),
        (lambda: parse_pattern("unstructred:0.5"), "did you mean 'unstructured'"),
        *((partial(check_sparsity_spec, SparsitySpec(**change)), key) for change, key in SPECS),
    ],
)
def test_refusals(call, words):
    with pytest.raises(SparsityError, match=words):
        call()
