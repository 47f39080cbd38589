import pytest

from compress.errors import RecipeError
from compress.training import QATSpec, TrainSpec, check_train_spec


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
