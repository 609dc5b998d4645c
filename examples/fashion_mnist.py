# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training of a small residual network on Fashion-MNIST, its gradients carried by bagua.

torchrun --nproc-per-node 2 examples/fashion_mnist.py --algorithm bytegrad --options '{"hierarchical": false}'
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from pathlib import Path

import bagua
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

DATA = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts it
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def residual_network(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        ResidualBlock(width, width, stride=1),
        ResidualBlock(width, 2 * width, stride=2),
        ResidualBlock(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def find_data(folder: Path) -> list[Path]:
    """The four files, packed or not, or the end of the program with a sentence that says how to get them."""
    paths = [next((p for p in (folder / f"{n}.gz", folder / n) if p.is_file()), None) for n in FILES]
    found = [path for path in paths if path is not None]
    if len(found) < len(FILES):
        sys.exit(
            f"Fashion-MNIST is not in {folder}: type 'apt-get install dataset-fashion-mnist' (Debian, Ubuntu; as root) "
            "or name the folder that holds its four idx files with --data DIR."
        )
    return found


def read_idx(path: Path) -> Tensor:
    """Reads bytes in idx format: two zeros, type, number of dimensions, each size as big-endian int32, the bytes."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    sizes = np.frombuffer(raw, dtype=">i4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * raw[3]).reshape(sizes).copy())


def load(folder: Path, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; images are [n, 1, 28, 28] of mean 0 and deviation 1."""
    train_x, train_y, test_x, test_y = (read_idx(path).to(device) for path in find_data(folder))
    train_x, test_x = (((x.float() / 255 - 0.286) / 0.353).unsqueeze(1) for x in (train_x, test_x))
    return train_x, train_y.long(), test_x, test_y.long()


def mirror_half(images: Tensor) -> Tensor:
    return torch.where(torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5, images.flip(-1), images)


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers over all images; each rank looks at its part of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    model.eval()
    # Ten batches on every rank, whatever their sizes: DDP broadcasts the running statistics before each.
    for x, y in zip(images[rank::ranks].tensor_split(10), labels[rank::ranks].tensor_split(10), strict=True):
        right += (model(x).argmax(1) == y).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(images)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    if args.algorithm == "qadam":  # which is half optimizer, half communication
        return bagua.QAdamOptimizer(model.parameters(), lr=args.lr or 0.006, warmup_steps=100)
    return torch.optim.SGD(model.parameters(), lr=args.lr or 0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    args: argparse.Namespace,
) -> tuple[list[float], list[float]]:
    """Returns the loss of every step, the mean over the ranks, and the test accuracy after every epoch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = data
    shuffle = torch.Generator().manual_seed(args.seed)  # one order on all ranks, shared out among them
    torch.manual_seed(args.seed * ranks + rank)  # while each rank mirrors other images

    steps = len(images) // args.batch
    highest_lr, cycle_momentum = optimizer.defaults["lr"], "momentum" in optimizer.defaults
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest_lr, total_steps=args.epochs * steps, pct_start=0.25, cycle_momentum=cycle_momentum
    )
    losses: list[Tensor] = []
    accuracies: list[float] = []
    # In a file or another program's window, where a bar would leave hundreds of lines, a line an epoch.
    is_terminal = sys.stderr.isatty()
    hidden = rank != 0 or not is_terminal
    start = time.perf_counter()
    with tqdm(total=args.epochs * steps, desc=args.algorithm, unit="step", disable=hidden, mininterval=0.5) as bar:
        for epoch in range(args.epochs):
            order = torch.randperm(len(images), generator=shuffle)[rank::ranks].to(images.device)
            for chosen in order.split(args.batch // ranks)[:steps]:
                loss = cross_entropy(model(mirror_half(images[chosen])), labels[chosen], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
                bar.update()
            accuracies.append(evaluate(model, test_images, test_labels))
            last = {"loss": f"{losses[-1].item():.3f}", "test_accuracy": f"{accuracies[-1]:.4f}"}
            bar.set_postfix(last)
            if rank == 0 and not is_terminal:
                seconds = time.perf_counter() - start
                figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in last.items())
                print(f"{args.algorithm}: epoch {epoch + 1} of {args.epochs}: {figures}, {seconds:.0f} s", flush=True)
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    return (mean_losses / ranks).tolist(), accuracies


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="bytegrad", help="one of bagua.available_algorithms()")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the algorithm, as JSON")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the four files of Fashion-MNIST")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256, help="images a step, over all ranks")
    parser.add_argument("--lr", type=float, help="the highest learning rate of the schedule (0.2; qadam: 0.006)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where rank 0 writes the result as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    data = load(args.data, device)
    torch.manual_seed(args.seed)
    network = residual_network().to(device)

    # ------- bagua: two lines -----------------------------------------------------------------
    dist.init_process_group(backend="bagua")
    model = DistributedDataParallel(network)
    optimizer = make_optimizer(model, args)
    handle = bagua.register_comm_hook(model, args.algorithm, optimizer=optimizer, **args.options)
    # ------- everything else is as in any DistributedDataParallel script -------------------------

    start = time.perf_counter()
    losses, accuracies = train(model, optimizer, data, args)
    if args.algorithm == "async":
        handle.abort()  # all ranks hold the same weights from here on
    seconds = time.perf_counter() - start
    stats = handle.stats()
    if dist.get_rank() == 0:
        sent = stats["wire_bytes"] / stats["steps"]
        print(f"{args.algorithm}: test accuracy {accuracies[-1]:.4f}, {seconds:.0f} s, {sent:,.0f} bytes sent per step")
        result = {"test_accuracy": accuracies[-1], "seconds": seconds, "bytes_per_step": sent, "stats": stats}
        result |= {"losses": losses, "accuracies": accuracies, "ranks": dist.get_world_size(), "seed": args.seed}
        if args.output:
            args.output.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
