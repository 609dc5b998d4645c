# SPDX-License-Identifier: Apache-2.0
"""The weights that a Trainer with our callback ends with."""

from pathlib import Path
from typing import Any

import pytest
from torchrun import output_of_ranks

# Exchanges of weights are under way at the end, when the Trainer loads the best ones again.
SCRIPT = """
import torch, torch.distributed as dist
from bagua.transformers import BaguaCallback
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}

def collated(rows):
    x, labels = zip(*rows)
    return {"x": torch.stack(x), "labels": torch.stack(labels)}

dist.init_process_group("bagua")
torch.manual_seed(0)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1))
trainer = Trainer(
    model=Line(),
    args=TrainingArguments(
        output_dir="FOLDER", use_cpu=True, per_device_train_batch_size=4, max_steps=14, learning_rate=0.5,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", lr_scheduler_type="constant", report_to="none", label_names=["labels"],
    ),
    data_collator=collated, train_dataset=data, eval_dataset=data,
)
trainer.add_callback(BaguaCallback(trainer, "diloco", sync_every=4, fragments=1, delay=3))
trainer.train()
best = load_file(trainer.state.best_model_checkpoint + "/model.safetensors")
assert trainer.state.best_global_step < 14, "the last weights are the best: nothing is shown"
for name, value in trainer.model.state_dict().items():
    assert torch.equal(value, best[name]), name
print("the best weights")
"""


RESUMED = (
    SCRIPT[: SCRIPT.index("trainer = Trainer(")]
    + """
import bagua, pathlib, types
from transformers import integrations
from transformers.trainer_utils import HPSearchBackend

# This is a trial of a search, as optuna makes it.
TRIAL = types.SimpleNamespace(number=7, params={})
integrations.hp_params = lambda trial: trial.params

def trained(algorithm, options, resume=None):
    torch.manual_seed(0)
    model, optimizer, trial = Line(), None, None
    if algorithm == "qadam":
        optimizer = bagua.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    trainer = Trainer(
        model=model, optimizers=(optimizer, None),
        args=TrainingArguments(
            output_dir=f"FOLDER/{algorithm}", use_cpu=True, per_device_train_batch_size=4, max_steps=13, save_steps=5,
            learning_rate=0.01, report_to="none", label_names=["labels"],
        ),
        data_collator=collated, train_dataset=data,
    )
    callback = BaguaCallback(trainer, algorithm, **options)
    trainer.add_callback(callback)
    if algorithm == "diloco":
        trial, trainer.hp_search_backend, trainer.hp_space = TRIAL, HPSearchBackend.OPTUNA, lambda trial: {}
    trainer.train(resume_from_checkpoint=resume, trial=trial)
    return [*(p.detach().clone() for p in trainer.model.parameters())], callback

for algorithm, options in (
    ("quantized_allreduce", {"codec": {"*": "2bit"}, "exact": (), "error_feedback": True, "hierarchical": False}),
    ("qadam", {"codec": "1bit", "error_feedback": True, "hierarchical": False}),
    ("diloco", {"sync_every": 4, "delay": 2}),
):
    whole, _ = trained(algorithm, options)
    run = "run-7" if algorithm == "diloco" else ""
    saved = pathlib.Path("FOLDER", algorithm, run, "checkpoint-5")
    assert {one.parent for one in pathlib.Path("FOLDER", algorithm).rglob("checkpoint-*")} == {saved.parent}
    continued, _ = trained(algorithm, options, str(saved))
    assert all(torch.equal(one, other) for one, other in zip(whole, continued)), algorithm
    fresh, _ = trained(algorithm, options | {"begins_anew": True}, str(saved))
    assert all(torch.equal(one, other) for one, other in zip(whole, fresh)), algorithm
    dist.barrier()
    if dist.get_rank() == 1:
        (saved / "bagua" / "rank-1-of-2.pt").unlink()
    dist.barrier()
    try:
        trained(algorithm, options, str(saved))
    except ValueError as error:
        assert "holds no state" in str(error) and "for rank 1 of 2" in str(error), error
    else:
        raise AssertionError("a rank's state is missing, and nobody says so")
    fresh, _ = trained(algorithm, options | {"begins_anew": True}, str(saved))
    assert not all(torch.equal(one, other) for one, other in zip(whole, fresh)), f"{algorithm}: its state is nothing"
print("the same bits")
"""
)


@pytest.mark.parametrize("given", [("bytegrad",), (None, "bytegrad"), ("bytegrad", "trainer")], ids=str)
def test_a_callback_without_its_trainer_says_what_comes_first(given: Any) -> None:
    pytest.importorskip("transformers")
    from bagua.transformers import BaguaCallback

    with pytest.raises(
        TypeError, match=r"trainer must be the Trainer .* got .*: write .*BaguaCallback\(trainer, 'byteg"
    ):
        BaguaCallback(*given)


def test_a_training_from_the_beginning_looks_for_no_checkpoint_of_the_one_before_it() -> None:
    transformers = pytest.importorskip("transformers")
    from bagua.transformers import BaguaCallback

    trainer = transformers.Trainer.__new__(transformers.Trainer)
    trainer.train = lambda *args: None
    callback = BaguaCallback(trainer, "bytegrad")
    trainer.train("checkpoint-5")
    assert callback._resumed_from == Path("checkpoint-5")
    trainer.train()
    assert callback._resumed_from is None


def _output(folder: Path, script: str) -> str:
    path = folder / "script.py"
    path.write_text(script.replace("FOLDER", str(folder / "output")))
    return output_of_ranks(path, are_hosts=False)


@pytest.mark.long
def test_the_best_model_that_the_trainer_has_loaded_stays(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert _output(tmp_path, SCRIPT).count("the best weights") == 2


@pytest.mark.long
def test_a_resumed_training_has_the_bits_of_an_unbroken_one_or_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert _output(tmp_path, RESUMED).count("the same bits") == 2


ACCELERATE = """
import bagua, torch, torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("bagua")
accelerator = Accelerator(cpu=True)

def trained(algorithm, options, begin, end, load=None, whole=False):
    torch.manual_seed(0)
    network = nn.Linear(64, 32)
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    handle = bagua.register_comm_hook(model, algorithm, optimizer=optimizer, **options)
    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(handle if whole else handle.of_all_ranks())
    if load:
        accelerator.load_state(load)
    for step in range(begin, end):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    return network, model

for algorithm, options in (
    ("quantized_allreduce", {"codec": {"*": "2bit"}, "exact": (), "error_feedback": True, "hierarchical": False}),
    ("local_sgd", {"sync_every": 4}),
):
    accelerator.free_memory()
    whole, _ = trained(algorithm, options, 0, 13)
    accelerator.free_memory()
    half = trained(algorithm, options, 0, 6)
    accelerator.save_state(f"FOLDER/{algorithm}")
    dist.barrier()
    accelerator.free_memory()
    continued, _ = trained(algorithm, options, 6, 13, f"FOLDER/{algorithm}")
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), continued.parameters())), algorithm
accelerator.free_memory()
options = {"codec": {"*": "2bit"}, "exact": (), "error_feedback": True, "hierarchical": False}
half = trained("quantized_allreduce", options, 0, 3, whole=True)
accelerator.save_state("FOLDER/one")
dist.barrier()
accelerator.free_memory()
try:
    trained("quantized_allreduce", options, 3, 3, "FOLDER/one", whole=True)
except ValueError as error:
    assert dist.get_rank() == 1 and "of_all_ranks()" in str(error), error
else:
    assert dist.get_rank() == 0, "another rank's residuals were taken"
print("the same bits")
"""


@pytest.mark.long
def test_accelerates_checkpoints_hold_the_states_of_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert _output(tmp_path, ACCELERATE).count("the same bits") == 2
