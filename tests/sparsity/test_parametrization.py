import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from compress import SparsitySpec, sparsify, squash_masks, trace
from compress.errors import SparsityError
from compress.graph.modules import bake
from compress.sparsity.parametrization import NMMask, apply_masks, masked_layers, masks_of, nm_mask, verify_nm
from tests.sparsity.nets import batch, small

SPEC = SparsitySpec()
PATHS = ["3", "6"]


def sparse():
    model = small()
    sparsify(model, SPEC)
    return model


def test_masked_weight_is_the_original_times_the_mask_and_the_parameter_stays():
    model = small()
    parameter, values = model[3].weight, model[3].weight.detach().clone()
    sparsify(model, SPEC)
    assert model[3].parametrizations.weight.original is parameter
    assert torch.equal(parameter, values)
    assert torch.equal(model[3].weight, values * nm_mask(values, 2, 4))
    assert isinstance(model[3], nn.Conv2d)


def test_gradient_reaches_kept_elements_only():
    model = sparse()
    model(batch()).square().sum().backward()
    layer = masked_layers(model)["3"]
    gradient = layer.original.grad
    assert (gradient[~layer.mask] == 0).all()
    assert (gradient[layer.mask] != 0).any()


def test_straight_through_gives_the_dense_gradient_of_the_masked_weight():
    model, reference = small(), small()
    sparsify(model, SparsitySpec(schedule="sr-ste"))
    with torch.no_grad():
        for path, mask in masks_of(model).items():
            reference.get_submodule(path).weight.mul_(mask)
    for net in (model, reference):
        net(batch()).square().sum().backward()
    torch.testing.assert_close(model(batch()), reference(batch()))
    for path, layer in masked_layers(model).items():
        torch.testing.assert_close(layer.original.grad, reference.get_submodule(path).weight.grad)


def test_infinite_masked_weights_do_no_harm():
    model = small()
    masks = {"3": nm_mask(model[3].weight, 2, 4)}
    with torch.no_grad():
        model[3].weight[~masks["3"]] = float("inf")
    apply_masks(model, masks)
    assert model(batch()).isfinite().all()


def test_squash_leaves_a_plain_model_that_computes_the_same():
    model = sparse()
    expected, parameter = model(batch()), masked_layers(model)["6"].original
    masks = squash_masks(model)
    assert sorted(masks) == PATHS
    assert type(model[6]) is nn.Conv2d and model[6].weight is parameter
    assert torch.equal(model(batch()), expected)
    assert set(model.state_dict()) == set(small().state_dict())
    assert all(verify_nm(model.get_submodule(p).weight.detach().numpy(), 2, 4) == 0 for p in PATHS)
    apply_masks(model, masks)  # and held again, as between pruning and quantization
    assert all(torch.equal(masks_of(model)[p], masks[p]) for p in PATHS)


def test_deepcopy_is_independent():
    model = sparse()
    twin = copy.deepcopy(model)
    expected = twin(batch())
    with torch.no_grad():
        masked_layers(model)["3"].original.fill_(0)
        masked_layers(model)["3"].mask.fill_(False)
    assert torch.equal(twin(batch()), expected)


def test_squashing_a_copy_leaves_the_other_masked():
    model = small()
    sparsify(model, SparsitySpec(kernels="any"))
    twin, images = copy.deepcopy(model), batch()
    expected = model(images)
    squash_masks(twin)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=0)
    torch.testing.assert_close(twin(images), expected, rtol=0, atol=0)
    assert masked_layers(model) and not masked_layers(twin)


def test_one_of_two_parametrizations_is_baked_and_copies_keep_both():
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    layer = nn.Linear(3, 2)
    weight = layer.weight
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, Double())
    twin = copy.deepcopy(layer)
    expected = layer(torch.ones(1, 3))
    bake(layer, "weight")
    assert layer.weight is weight and not parametrize.is_parametrized(layer, "weight")
    assert parametrize.is_parametrized(layer, "bias") and parametrize.is_parametrized(twin, "weight")
    for one in (layer, twin):
        torch.testing.assert_close(one(torch.ones(1, 3)), expected)
    bake(layer, "bias")
    assert type(layer) is nn.Linear and set(layer.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("how", ["pickle", "torch.save", "traced"])
def test_pickled_models_compute_and_mask_as_before(how):
    model = sparse()
    if how == "traced":
        model = trace(model, batch())
    expected = model(batch())
    if how == "torch.save":
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(batch()), expected)
    twin.train()(batch()).sum().backward()
    for path, layer in masked_layers(twin).items():
        assert torch.equal(layer.mask, masked_layers(model)[path].mask)
        assert (layer.original.grad[~layer.mask] == 0).all()
    assert sorted(squash_masks(copy.deepcopy(twin))) == PATHS  # a copy of what was unpickled, too


def test_pickle_keeps_the_optimizer_bound_to_its_parameters():
    model = sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch()).sum().backward()
    optimizer.step()
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    held = {id(p) for group in other.param_groups for p in group["params"]}
    assert held == {id(p) for p in twin.parameters()}


def test_state_dict_round_trip_carries_the_masks():
    model, other = sparse(), small()
    with torch.no_grad():
        for layer in (other[3], other[6]):
            layer.weight.copy_(torch.randn_like(layer.weight))
    sparsify(other, SPEC)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch()), model(batch()))


def test_dense_checkpoint_into_a_sparse_model_is_refused():
    model, state = sparse(), small().state_dict()
    with pytest.raises(SparsityError, match="load it before sparsify"):
        model.load_state_dict(state)


def test_checkpoint_with_masks_of_another_shape_is_refused():
    state = sparse().state_dict()
    state["3.parametrizations.weight.0.mask"] = torch.ones(32, 8, 3, 3, dtype=torch.bool)
    with pytest.raises(SparsityError, match=r"3\.weight: the checkpoint's mask is \(32, 8, 3, 3\)"):
        sparse().load_state_dict(state)


def test_misuse_is_refused_and_changes_nothing():
    model = small()
    good = nm_mask(model[3].weight, 2, 4)
    for masks, match in [
        ({"3": good, "9": good}, "has no parameter"),
        ({"3": good, "30": good}, "no layer '30'"),
        ({"3": good[:, :8]}, r"needed, got torch.bool of \(32, 8, 3, 3\)"),
        ({"3": good.float()}, r"got torch.float32"),
    ]:
        with pytest.raises(SparsityError, match=match):
            apply_masks(model, masks)
        assert not masked_layers(model)
    with pytest.raises(SparsityError, match="boolean"):
        NMMask(torch.ones(4, 4))
    with pytest.raises(SparsityError, match="no layer of the model is masked"):
        squash_masks(model)
    apply_masks(model, {"3": good})
    with pytest.raises(SparsityError, match="masked already"):
        apply_masks(model, {"3": good})
    parametrize.register_parametrization(model[6], "weight", nn.Identity())
    with pytest.raises(SparsityError, match="parametrized by something else"):
        apply_masks(model, {"6": torch.ones_like(model[6].weight, dtype=torch.bool)})


def test_assigning_a_weight_keeps_the_mask():
    model = sparse()
    model[3].weight = torch.ones_like(model[3].weight)
    assert torch.equal(model[3].weight, masked_layers(model)["3"].mask.float())
