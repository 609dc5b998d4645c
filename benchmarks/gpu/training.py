# SPDX-License-Identifier: Apache-2.0
"""One rank: times training steps on one device under each way to communicate, in turns.

Started by bench_gpu.py: training.py DEVICE STOCK MODEL SECONDS WAY... Rank 0 prints a line of JSON about the model and
the line between the ranks, and one per way with all times in seconds.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
from contenders import MODELS, Model, measure

MOST_STEPS = 40
LINE_BYTES = 64 << 20
LINE_TURNS = 5


class _LanguageModel(nn.Module):
    """Returns the loss of predicting each next token, in mixed precision: parameters and gradients are float32."""

    def __init__(self, logits: Callable[[Tensor], Tensor], network: nn.Module, device_type: str) -> None:
        super().__init__()
        self._network = network
        self._logits = logits
        self._device_type = device_type

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self._device_type, torch.bfloat16):
            logits = self._logits(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class _OwnNetwork(nn.Module):
    """As GPT-2: the same widths, layers and tied embeddings."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def logits(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        return functional.linear(self.blocks(hidden, mask=mask, is_causal=True), self.tokens.weight)


def _gpt2(sizes: dict[str, int], batch: int, device_type: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    length, vocabulary = sizes["n_positions"], sizes["vocab_size"]
    logits: Callable[[Tensor], Tensor]
    if importlib.util.find_spec("transformers") is not None:
        from transformers import GPT2Config, GPT2LMHeadModel

        network: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
        logits = lambda tokens: network(tokens, use_cache=False).logits  # noqa: E731  either of two
    else:
        network = _OwnNetwork(vocabulary, length, sizes["n_layer"], sizes["n_embd"], sizes["n_head"])
        logits = network.logits
    model = _LanguageModel(logits, network, device_type)
    return model, lambda: torch.randint(vocabulary, (batch, length + 1))


SMALL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32, "vocab_size": 500}


def models(device_type: str) -> dict[str, Model]:
    """Return the models by name; "tiny" is to see that everything works."""
    return {
        "gpt2-small": lambda: _gpt2(SMALL, 8, device_type),
        "gpt2-small, short": lambda: _gpt2({**SMALL, "n_positions": 256}, 4, device_type),
        "tiny": lambda: _gpt2(TINY, 2, device_type),
        **MODELS,
    }


def _described(name: str, parameters: int) -> str:
    by = ""
    if name not in MODELS:
        missing = importlib.util.find_spec("transformers") is None
        by = " of our own, for want of transformers" if missing else " of transformers"
    return f"{name}{by}, {parameters / 1e6:.1f} million parameters"


def _bytes_per_second(stock: str, device: str) -> float | None:
    """Return how fast the stock backend reduces: bytes over seconds, as each rank sends them between two ranks."""
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend=stock)
    tensor = torch.zeros(LINE_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(1 + LINE_TURNS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return LINE_BYTES / statistics.median(seconds[1:])


def main() -> None:
    """Measure the ways named on the command line."""
    device, stock, model, seconds, *names = sys.argv[1:]
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("bagua")
    speed = _bytes_per_second(stock, device)
    made = models(torch.device(device).type)[model]
    contenders = measure(names, stock, made, float(seconds), MOST_STEPS, device)
    if dist.get_rank() == 0:
        about = {"model": _described(model, contenders[0].parameters), "bytes_per_second": speed}
        print(json.dumps(about), flush=True)
        for contender in contenders:
            print(json.dumps({"way": contender.name, "times": contender.times}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
