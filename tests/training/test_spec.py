import pytest

from compress import QATSpec, TrainSpec
from compress.errors import RecipeError
from compress.training.spec import check_train_spec, identity_of


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("weight_decay", -1e-4),
        ("warmup_epochs", -0.5),
        ("warmup_epochs", 9.0),
        ("label_smoothing", 1.0),
        ("clip_grad_norm", 0.0),
        ("grad_accumulation", 0),
        ("distill_weight", 1.5),
        ("distill_temperature", 0.0),
        ("seed", -1),
        ("checkpoint_steps", 0),
        ("evaluate_every", 0),
        ("optimizer", "adam"),
        ("schedule", "steps"),
        ("precision", "fp8"),
    ],
)
@pytest.mark.parametrize("section", ["train", "qat"])
def test_refuses_out_of_range_and_names_the_key(key, value, section):
    spec = {"train": TrainSpec, "qat": QATSpec}[section](**{key: value})
    with pytest.raises(RecipeError, match=rf"{section}\.{key} is {value}|{section}\.{key} is '{value}'"):
        check_train_spec(spec)


def test_says_what_is_near():
    with pytest.raises(RecipeError, match="did you mean 'cosine'"):
        check_train_spec(TrainSpec(schedule="cosin"))


@pytest.mark.parametrize(
    "spec", [TrainSpec(), QATSpec(), TrainSpec(epochs=0), TrainSpec(epochs=1), TrainSpec(momentum=0, clip_grad_norm=1)]
)
def test_accepts(spec):
    check_train_spec(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (QATSpec(cuda_graphs=True, damping=0.1), "qat.damping grows from step to step"),
    ],
)
def test_what_a_cuda_graph_cannot_hold(spec, words):
    with pytest.raises(RecipeError, match=words):
        check_train_spec(spec)


def test_a_training_is_the_same_with_another_speed_and_with_keys_of_later_versions_at_their_defaults():
    assert identity_of(TrainSpec(cuda_graphs=True)) == identity_of(TrainSpec())
    assert "damping" not in identity_of(QATSpec())
    assert identity_of(QATSpec(damping=0.1))["damping"] == 0.1
