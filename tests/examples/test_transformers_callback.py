# SPDX-License-Identifier: Apache-2.0
"""The weights that a Trainer with our callback ends with."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("given", [("bytegrad",), (None, "bytegrad"), ("bytegrad", "trainer")], ids=str)
def test_a_callback_without_its_trainer_says_what_comes_first(given: Any) -> None:
    pytest.importorskip("transformers")
    from bagua.transformers import BaguaCallback

    with pytest.raises(
        TypeError, match=r"trainer must be the Trainer .* got .*: write .*BaguaCallback\(trainer, 'byteg"
    ):
        BaguaCallback(*given)


@pytest.mark.long
def test_the_best_model_that_the_trainer_has_loaded_stays(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FOLDER", str(tmp_path / "output")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the best weights") == 2
