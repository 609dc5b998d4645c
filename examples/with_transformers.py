# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face transformers; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_transformers.py

With --rounds behind it: weights in rounds, not gradients in steps.
"""

import sys
import tempfile
from typing import Any

import bagua
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards, from another number each."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 50
        return {"input_ids": tokens, "labels": tokens}


class Compression(TrainerCallback):
    """bagua: registers the algorithm once the Trainer has wrapped the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = trainer.model_wrapped
        if "--rounds" in sys.argv:
            options = {"sync_every": 10, "fragments": 2, "delay": 2}
            self.handle = bagua.register_comm_hook(model, "diloco", optimizer=kwargs["optimizer"], **options)
        else:
            self.handle = bagua.register_comm_hook(model, "bytegrad", hierarchical=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.handle.synchronize()  # after rounds all ranks hold the same weights
        stats = self.handle.stats()
        if state.is_world_process_zero:
            print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")


dist.init_process_group(backend="bagua")  # bagua: transformers takes over the group that it finds

config = GPT2Config(vocab_size=50, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Counting(),
        callbacks=[Compression()],  # bagua
    )
    trainer.train()
dist.destroy_process_group()
