# SPDX-License-Identifier: Apache-2.0
"""Every short example, as its first lines say that it is started, with two ranks; what the demo says of its steps."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_images import write_made_up_images
from script_ranks import run_script
from torchrun import check_training, losses_of, output_of_ranks
from two_hosts import hosts_over

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))
demo = importlib.import_module("demo")
COMPRESSED = ["ddp", "with_accelerate", "with_compile"]
SHARDED = ["with_fsdp", "with_fsdp --lora", "with_accelerate_fsdp", "lightning_fsdp"]


def _output(name: str, *arguments: str) -> str:
    for package in ("accelerate", "transformers", "lightning"):
        if package in name and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")
    return output_of_ranks(FOLDER / f"{name}.py", *arguments)


def _output_of_forked_ranks(name: str, folder: Path, *arguments: str) -> str:
    """That of rank 0, for which no rank has imported torch for itself."""
    script = "import os, runpy; os.environ['BAGUA_HOST_ID'] = os.environ['RANK']; "
    script += f"runpy.run_path({str(FOLDER / name)!r} + '.py', run_name='__main__')"
    return run_script(script, 2, folder, *arguments)[0].output


@pytest.mark.parametrize("name", ["", *(pytest.param(name, marks=pytest.mark.long) for name in COMPRESSED)])
def test_training_with_compressed_gradients(name: str, tmp_path: Path) -> None:
    text = _output(name) if name else _output_of_forked_ranks(COMPRESSED[0], tmp_path)
    # Two ranks: a byte for every parameter of four, and a few for the ranges.
    check_training(text, (0.25, 0.27))


def test_a_training_goes_on_from_what_every_rank_has_saved(tmp_path: Path) -> None:
    first, second = (_output_of_forked_ranks("resume", tmp_path, str(tmp_path)) for _ in range(2))
    assert "step 50: loss" in first
    assert "step 100: loss" in second
    assert losses_of(second)[-1] < losses_of(first)[-1], first + second
    assert {file.name for file in tmp_path.glob("rank-*")} == {"rank-0-of-2.pt", "rank-1-of-2.pt"}


def test_ranks_evaluate_the_same_weights_between_rounds(tmp_path: Path) -> None:
    text = _output_of_forked_ranks("rounds", tmp_path)
    pairs = re.findall(r"held-out loss (\S+) and (\S+)", text)
    assert len(pairs) == 3
    assert all(first == second for first, second in pairs), text
    assert float(pairs[-1][0]) < float(pairs[0][0]), text


@pytest.mark.long
@pytest.mark.parametrize("name", ["with_accelerate", "with_transformers"])
def test_training_in_rounds(name: str) -> None:
    text = _output(name, "--rounds")
    check_training(text)
    assert re.search(r"bytes of gradients, [\d,]+ bytes sent", text), text


@pytest.mark.long
@pytest.mark.parametrize("name", SHARDED)
def test_training_of_sharded_models(name: str) -> None:
    # Half of them go to the other rank, a byte for four. What is thin stays exact.
    check_training(_output(*name.split()), (0.125, 0.17))


@pytest.mark.long
def test_a_checkpoint_of_dcp_holds_the_states_of_all_ranks(tmp_path: Path) -> None:
    assert "resumed with the same bits: True" in _output("with_dcp", str(tmp_path))


@pytest.mark.long
def test_tensor_parallelism_over_a_device_mesh() -> None:
    text = _output("with_device_mesh")
    difference = re.search(r"network on one rank: (\S+)", text)
    assert difference is not None, text
    # Sums of 512 numbers near 0.1 in another order.
    assert float(difference.group(1)) < 1e-5
    assert "holds 16,384 of 32,768 weights" in text


@pytest.mark.long
def test_a_training_that_is_no_terminals_prints_a_line_for_each_epoch(tmp_path: Path) -> None:
    write_made_up_images(tmp_path)
    text = _output("fashion_mnist", "--data", str(tmp_path), "--batch", "4", "--epochs", "2")
    lines = [line for line in text.splitlines() if line.startswith("bytegrad: ")]
    assert [line.partition(": loss")[0] for line in lines[:2]] == [f"bytegrad: epoch {i} of 2" for i in (1, 2)]
    assert len(lines) == 3
    assert "step/s" not in text


# The full-precision gradients of the demo's network.
PLAIN_BYTES = 1.25e6


def test_the_demo_says_what_was_gained() -> None:
    steps = {"gradient_allreduce": 0.120, "bytegrad": 0.040, demo.ALONE: 0.010}
    assert demo.gain(steps, PLAIN_BYTES) == (
        "At 100 Mbit/s a step took 120 ms with gradient_allreduce and 40 ms with bytegrad: 3.0x as fast."
    )


def test_the_demo_says_that_nothing_was_gained_and_why() -> None:
    steps = {"gradient_allreduce": 0.279, "bytegrad": 0.278, demo.ALONE: 0.270}
    sentence = demo.gain(steps, PLAIN_BYTES)
    assert sentence.startswith("Nothing was gained at 100 Mbit/s: a step took 279 ms")
    assert "too busy" in sentence
    assert "computing alone took 270 ms" in sentence
    assert "100 ms for the gradients" in sentence
    assert "as fast" not in sentence


@pytest.mark.long
def test_the_demo_gains_time_between_hosts_also_where_others_compute(tmp_path: Path) -> None:
    with hosts_over():
        pass
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        steps = demo.compare_between_hosts(tmp_path)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert steps.keys() == {"gradient_allreduce", "bytegrad", demo.ALONE}
    # Full precision takes the time of its bytes at least, however fast the processor is.
    assert steps["gradient_allreduce"] > 0.9 * 8 * PLAIN_BYTES / 100e6
    assert steps["gradient_allreduce"] > demo.GAIN * steps["bytegrad"]
    assert "as fast" in demo.gain(steps, PLAIN_BYTES)


def test_every_example_is_tested() -> None:
    # `elastic` in tests/faults.
    elsewhere = {"demo", "demo_steps", "elastic", "fashion_mnist", "lightning_fashion_mnist"}
    # In tests/engines.
    engines = {"with_fabric", "with_ray", "with_torchft", "with_deepspeed", "with_transformers"}
    sharded = {name.split()[0] for name in SHARDED}
    own = {*COMPRESSED, *sharded, "resume", "rounds", "with_dcp", "with_device_mesh"}
    assert {path.stem for path in FOLDER.glob("*.py")} == own | elsewhere | engines
