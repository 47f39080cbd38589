# Two processes over gloo against one, with the same global batch: see tests/training/processes.py.

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from compress import CompressError
from compress.training.distributed import Processes, average_running_statistics, init_processes
from tests.training.test_checkpoint import run
from tests.training.toy import convnet

RUNS = ("1-0", "2-0", "2-1")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    return folder, *run(folder, "pair", "widened", "sharded", "dying")


@pytest.fixture(scope="module")
def pair(tasks):
    folder, ends, errors = tasks
    assert ends["pair"] == [0, 0, 0], errors
    return folder / "pair"


@pytest.fixture(scope="module")
def facts(pair):
    return {who: json.loads((pair / f"facts-{who}.json").read_text()) for who in RUNS}


@pytest.mark.parametrize("name", ["smooth", "resumed", "auxiliary", "shared"])
def test_two_processes_train_what_one_does(pair, name):
    alone, first, second = (load_file(pair / f"{name}-{who}.safetensors") for who in RUNS)
    torch.testing.assert_close(first, alone, rtol=1e-4 if name == "shared" else 0, atol=1e-05)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_recorded_steps_average_the_gradients_of_two_processes(facts):
    alone, first, second = (torch.tensor(facts[who]["recorded"]) for who in RUNS)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-6)
    assert torch.equal(first, second)


def test_gradients_exchanged_during_the_backward_pass(facts):
    for who in RUNS[1:]:
        found = facts[who]["exchanged"]
        assert found["far"] < 1e-6 and found["strides"] and found["unused"] and found["count"] > 10


def test_resumed_is_the_undisturbed_one(pair, facts):
    for who in RUNS:
        whole, resumed = load_file(pair / f"smooth-{who}.safetensors"), load_file(pair / f"resumed-{who}.safetensors")
        assert facts[who]["resumed_from"] == 4
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0 if who == "1-0" else 1e-06)


def test_other_numbers_of_processes_go_on_where_some_were_stopped(pair, tasks):
    folder, ends, errors = tasks
    assert ends["widened"] == [0, 0, 0], errors
    whole = load_file(pair / "smooth-1-0.safetensors")
    for file in ("pair/crossed", "widened/widened-0", "widened/widened-1"):
        torch.testing.assert_close(load_file(folder / f"{file}.safetensors"), whole, rtol=0, atol=1e-05)


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_two_processes_that_share_parameters_train_what_one_does(tasks, way):
    folder, ends, errors = tasks
    assert ends["sharded"] == [0, 0, 0], errors
    alone, first, second = (load_file(folder / "sharded" / f"{way}-{who}.safetensors") for who in RUNS)
    held = [int(one.pop("held")) for one in (alone, first, second)]
    assert held[1] + held[2] == held[0] == sum(value.numel() for value in alone.values())
    assert max(held[1:]) < 0.7 * held[0]
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-05)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_gradients_in_bfloat16_are_rounded_and_the_same_everywhere(pair):
    exact, first, second = (load_file(pair / f"{n}.safetensors") for n in ("smooth-2-0", "rounded-2-0", "rounded-2-1"))
    torch.testing.assert_close(first, exact, rtol=0, atol=0.005)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert any(not torch.equal(first[key], expected) for key, expected in exact.items())


def test_a_process_that_fails_ends_all_with_its_traceback(tasks):
    _, ends, errors = tasks
    ends = ends["dying"]
    assert "ValueError: the second process fails on purpose" in errors
    assert ends[1] > 0 and ends[3] == -signal.SIGKILL
    assert ends[0] > 0 and ends[2] > 0  # the other one ended by itself within 30 s


def test_figures_are_those_of_all_images(facts):
    alone, first, second = (facts[who] for who in RUNS)
    assert first["history"] == second["history"]
    assert torch.tensor(first["history"]).allclose(torch.tensor(alone["history"]), atol=1e-5)
    assert first["accuracy"]["images"] == alone["accuracy"]["images"] == 22
    assert first["accuracy"]["values"] == alone["accuracy"]["values"]
    assert first["shares"][0] == 4
    assert second["shares"][0] == 3


def test_batchnorm_statistics_are_averaged(pair):
    # The mean over equal shares is the mean over the batch; the layer is the first one, so weights do not matter.
    alone, first, second = (load_file(pair / f"normed-{who}.safetensors") for who in RUNS)
    assert torch.equal(first["0.running_mean"], second["0.running_mean"])
    torch.testing.assert_close(first["0.running_mean"], alone["0.running_mean"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first["0.running_var"], alone["0.running_var"], rtol=0.05, atol=0)


def test_synchronized_batchnorm_is_that_of_one_process(facts):
    assert torch.tensor(facts["2-0"]["shared"]).allclose(torch.tensor(facts["1-0"]["shared"]), atol=1e-4)
    assert all(facts[who]["restored"] for who in RUNS)


def test_files_are_written_once(pair):
    for count in (1, 2):
        names = sorted(path.name for path in (pair / f"files-{count}").iterdir())
        assert names == ["train.checkpoint.safetensors", "train.csv"]


def test_exchanges(facts):
    alone, *two = (facts[who]["exchange"] for who in RUNS)
    assert alone == {"sum": [0, 1], "object": {"from": 0}, "on_main": 0, "refused": True, "kept": True}
    assert two == [{**alone, "sum": [1, 2]}] * 2
    assert [facts[who]["is_main"] for who in RUNS] == [True, True, False]


GOOD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK: it is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE: it is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK: it is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: it is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT: 'x' is not a whole number"),
        ({"RANK": "2"}, "RANK: 2 is not at least 0 and below 2"),
        ({"RANK": "-1"}, "RANK: '-1' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: 0 is not at least 1"),
    ],
)
def test_bad_environment(change, message):
    environment = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(CompressError, match=f"{message}.*torchrun"):
        init_processes("cpu", environment=environment)


def test_no_process_group_for_one():
    for environment in ({}, {"RANK": "0", "WORLD_SIZE": "1"}):
        processes = init_processes("cpu", environment=environment)
        assert (processes.rank, processes.world_size, processes.device.type) == (0, 1, "cpu")
        processes.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_refuses_a_gpu_that_is_not_there():
    for device, words in (("cuda", "torch sees 0 GPUs"), ("gpu", "'gpu' is not one that torch knows")):
        with pytest.raises(CompressError, match=words):
            init_processes(device, environment={})


def test_one_process_keeps_its_statistics():
    model = convnet()
    model(torch.randn(4, 3, 6, 6))
    before = model[1].running_var.clone()
    average_running_statistics(model, Processes())
    assert torch.equal(model[1].running_var, before)
