"""`fit` on DataLoaders, with a loss and a metric of one's own."""

import pytest
import timm
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import compress
from compress.errors import DataError, RecipeError

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(24, 3, 32, 40, generator=GENERATOR)  # rectangular
TARGETS = (IMAGES[:, 0].mean((1, 2)) > 0).long()
SPEC = compress.TrainSpec(epochs=2, lr=0.01)


class Mappings(Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return {"x": IMAGES[index], "labels": TARGETS[index]}


def network():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=2)


class Named(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def squared(outputs, targets):
    return (outputs.softmax(1) - torch.nn.functional.one_hot(targets, 2)).square().mean()


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def test_pairs_and_mappings_are_the_same_training():
    states = []
    for data in (TensorDataset(IMAGES, TARGETS), Mappings()):
        model = network()
        report = compress.fit(model, DataLoader(data, batch_size=8, shuffle=True), SPEC)
        states.append(model.state_dict())
        assert len(report.history) == 2
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(states[0].values(), network().state_dict().values(), strict=True))


def test_own_loss_and_metric_train_a_quantized_network():
    loader = DataLoader(Mappings(), batch_size=8)
    qmodel = compress.quantize(network().eval(), IMAGES[:2], loader)
    before = [parameter.clone() for parameter in qmodel.parameters()]
    report = compress.fit(qmodel, loader, SPEC, val=loader, loss=squared, metric=accuracy)
    with torch.no_grad():
        outputs = qmodel.eval()(IMAGES)
    assert not any(torch.equal(a, b) for a, b in zip(before, qmodel.parameters(), strict=True) if b.ndim > 1)
    assert report.final.loss == pytest.approx(squared(outputs, TARGETS).item())
    assert report.final.values["accuracy"] == pytest.approx(accuracy(outputs, TARGETS).item())
    found = compress.measure_metric(compress.TorchEngine(qmodel, (3, 32, 40)), loader, accuracy)
    assert found.values["accuracy"] == pytest.approx(accuracy(outputs, TARGETS).item())


def test_sensitivity_takes_a_loader_of_mappings_and_a_metric():
    loader = DataLoader(Mappings(), batch_size=12)
    model = Named(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    model(IMAGES)
    found = compress.sensitivity(model.eval(), IMAGES[:2], loader, loader, metric=accuracy)
    assert found.float_score == pytest.approx(accuracy(model(IMAGES), TARGETS).item())
    assert {row.layer for row in found.rows} == {"0", "3"}


def test_a_stopped_training_goes_on_with_the_same_bits(tmp_path):
    loader, whole, parts = DataLoader(Mappings(), batch_size=8, shuffle=True), network(), network()
    compress.fit(whole, loader, SPEC)

    class StoppedError(Exception):
        pass

    def stop(step, steps, optimizer):
        if step == 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        compress.fit(parts, loader, SPEC, folder=tmp_path, after_step=stop)
    again = network()
    compress.fit(again, loader, SPEC, folder=tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))


class Endless(IterableDataset):
    def __iter__(self):
        yield from ()


@pytest.mark.parametrize(
    "loader, error, words",
    [
        (DataLoader(Endless(), batch_size=2), DataError, "without a length"),
        (DataLoader(Mappings(), sampler=WeightedRandomSampler([1.0] * 24, 24)), DataError, "sampler of its own"),
        (DataLoader(TensorDataset(IMAGES), batch_size=2), DataError, "pairs"),
        (DataLoader(TensorDataset(IMAGES, IMAGES, TARGETS), batch_size=2), DataError, "one tensor of images"),
        (DataLoader(Mappings(), batch_size=None), RecipeError, "batch_size"),
    ],
)
def test_loaders_that_cannot_train_are_refused(loader, error, words):
    with pytest.raises(error, match=words):
        compress.fit(network(), loader, SPEC)
