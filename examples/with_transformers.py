# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face transformers; the lines marked `bagua` are the change.

torchrun --standalone --nproc-per-node 2 examples/with_transformers.py

With --rounds behind it: weights in rounds, not gradients in steps.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from bagua.transformers import BaguaCallback
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards, from another number each."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 50
        return {"input_ids": tokens, "labels": tokens}


dist.init_process_group(backend="bagua")  # bagua: transformers takes over the group that it finds

config = GPT2Config(vocab_size=50, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_find_unused_parameters=False,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Counting(),
    )
    # bagua: registers the algorithm once the Trainer has wrapped the model, and logs bytes and seconds beside the loss
    if "--rounds" in sys.argv:
        callback = BaguaCallback(trainer, "diloco", sync_every=10, fragments=2, delay=2)
    else:
        callback = BaguaCallback(trainer, "bytegrad")
    trainer.add_callback(callback)
    trainer.train()
    stats = callback.handle.stats()
    if trainer.is_world_process_zero():
        print(f"{stats['logical_bytes']:,} bytes of gradients, {stats['wire_bytes']:,} bytes sent")
dist.destroy_process_group()
