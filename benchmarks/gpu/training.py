# SPDX-License-Identifier: Apache-2.0
"""Times training steps on one device under each way to communicate, in turns.

Started by bench_gpu.py: training.py DEVICE MODEL SECONDS WAY..., of which the first is DDP on the stock backend.
Prints a line of JSON about the model, and one per way with all times in seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from contenders import measure

MOST_STEPS = 40


class LanguageModel(nn.Module):
    """As GPT-2: the same widths, layers and tied embeddings.

    Returns the loss of predicting each next token, in mixed precision: parameters and gradients are float32.
    """

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self._tokens = nn.Embedding(vocabulary, width)
        self._places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self._blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = self._logits(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _logits(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self._tokens(tokens) + self._places(torch.arange(length, device=tokens.device))
        return functional.linear(self._blocks(hidden, mask=mask, is_causal=True), self._tokens.weight)


# Vocabulary, length, layers, width and heads, and a batch; "tiny" is to see that everything works.
MODELS = {"gpt2-small": ((50257, 1024, 12, 768, 12), 8), "tiny": ((500, 32, 2, 64, 2), 2)}


def main() -> None:
    device, model, seconds, *names = sys.argv[1:]
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("bagua")
    sizes, batch = MODELS[model]
    vocabulary, length, *_ = sizes

    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        return LanguageModel(*sizes), lambda: torch.randint(vocabulary, (batch, length + 1))

    contenders = measure(names, names[0], make, float(seconds), MOST_STEPS, device)
    print(json.dumps({"model": f"{model}, {contenders[0].parameters / 1e6:.1f} million parameters"}), flush=True)
    for contender in contenders:
        print(json.dumps({"way": contender.name, "times": contender.times}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
