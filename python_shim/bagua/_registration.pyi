# SPDX-License-Identifier: Apache-2.0
# Written by scripts/typed_options.py.
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua._handle import Handle, OptionArgument
from bagua._hooks import HookState
from bagua._managed import Manager
from bagua._optimizers import QAdamOptimizer

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["gradient_allreduce"],
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    manager: Manager | None = None,
    *,
    hierarchical: bool = False,
    average: bool = True,
) -> Handle:
    """Mean of the gradients in full precision.

    Args:
        hierarchical: Accepted for compatibility: a full-precision sum is the same either way.
        average: Mean over the ranks; False: sum.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["bytegrad"],
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    manager: Manager | None = None,
    *,
    hierarchical: bool = True,
    average: bool = True,
    codec: str = "int8",
    start_step: int = 0,
    guard: str | None = "warn",
) -> Handle:
    """Mean of the gradients with 8-bit messages.

    Args:
        hierarchical: Full precision inside a host, 8 bits between hosts (on a single host nothing is
            compressed); False: 8 bits between all ranks.
        average: Mean over the ranks; False: sum.
        codec: One of bagua.available_codecs().
        start_step: Full precision before this step.
        guard: 'warn' logs where coding loses too much, 'adapt' also codes that finer; None: looks at nothing.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["decentralized"],
    optimizer: Optimizer,
    process_group: dist.ProcessGroup | None = None,
    *,
    hierarchical: bool = True,
    peer_selection_mode: str = "all",
    communication_interval: int = 1,
) -> Handle:
    """Average of the weights, exchanged during forward and backward; gradients stay local.

    Args:
        hierarchical: Hosts are the participants, after an average inside each; False: every rank is one.
        peer_selection_mode: 'all': average of all participants; 'shift_one': of two, another pair in every
            exchange.
        communication_interval: Exchange in every n-th step.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["low_precision_decentralized"],
    optimizer: Optimizer,
    process_group: dist.ProcessGroup | None = None,
    *,
    hierarchical: bool = True,
    communication_interval: int = 1,
    codec: str = "int8",
    guard: str | None = "warn",
) -> Handle:
    """Weights of neighbours in a ring drawn together by 8-bit differences after every step.

    Args:
        hierarchical: A ring of hosts, after an average inside each (on a single host: that average alone);
            False: a ring of ranks.
        communication_interval: Exchange after every n-th step.
        codec: Of the differences: one of bagua.available_codecs().
        guard: 'warn' logs where coding loses too much; None: looks at nothing.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["qadam"],
    optimizer: QAdamOptimizer,
    process_group: dist.ProcessGroup | None = None,
    *,
    hierarchical: bool = True,
    codec: str = "int8",
    error_feedback: bool = False,
    guard: str | None = "warn",
) -> Handle:
    """Adam whose momentum travels with 8 bits once its variance is frozen.

    Args:
        hierarchical: After warm-up: full precision inside a host, 8 bits between hosts (on a single host
            nothing is compressed); False: 8 bits between all ranks.
        codec: One of bagua.available_codecs(). With '1bit' and error_feedback it is 1-bit Adam.
        error_feedback: Whether what coding leaves behind is added to the next step's momentum.
        guard: 'warn' logs where coding loses too much, 'adapt' also codes that finer; None: looks at nothing.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["async"],
    optimizer: Optimizer,
    process_group: dist.ProcessGroup | None = None,
    *,
    peer_selection_mode: str = "all",
    sync_interval_ms: int = 500,
    warmup_steps: int = 0,
) -> Handle:
    """Weights averaged in the background, at most every sync_interval_ms; no rank waits for another.

    Args:
        peer_selection_mode: 'all': average over all ranks.
        sync_interval_ms: Milliseconds between the end of a round and the next.
        warmup_steps: Steps that average gradients before that.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["powersgd"],
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    manager: Manager | None = None,
    *,
    rank: int = 4,
    start_step: int = 1000,
    error_feedback: bool = True,
    warm_start: bool = True,
    min_compression: float = 2.0,
    hierarchical: bool = False,
    codec: str | None = None,
    seed: int = 0,
    guard: str | None = "warn",
) -> Handle:
    """Mean of the gradients, whose matrices travel as products of two thin factors.

    Args:
        rank: Columns of the factors, and so the rank of what arrives.
        start_step: Full precision before this step.
        error_feedback: What the factors leave out is added to the next step's gradient.
        warm_start: Each step starts from the factor of the last one; False: from a random one.
        min_compression: A gradient has to be more than this many times larger than its factors, or travels as
            it is.
        hierarchical: True: on a single host nothing is compressed. Between hosts there is no difference: sums
            of factors are what factors of sums are, and each byte leaves a host once.
        codec: One of available_codecs(), for the factors; None: full precision.
        seed: Of the random factors.
        guard: 'warn' logs where coding loses too much, 'adapt' also codes that finer; None: looks at nothing.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["quantized_allreduce"],
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    manager: Manager | None = None,
    *,
    codec: str | Mapping[str, str] = "4bit",
    error_feedback: bool | str = "auto",
    start_step: int = 0,
    guard: str | None = "warn",
    residuals: str = "float32",
    exact: str | Sequence[str] = "small",
    rounding: str = "nearest",
    hierarchical: bool = True,
    average: bool = True,
) -> Handle:
    """Mean of the gradients with 4 bits or fewer, and error feedback.

    Args:
        codec: One of bagua.available_codecs(), with int8 for embeddings, the head and what has one dimension
            where it has fewer bits; or a mapping to codecs from 'embedding', 'head' (the last linear layer),
            '1d' (biases, norms), 'small' (below 1024 elements, or a shard below 128) and patterns of
            parameters' names, of which the first that fits counts; the last is '*'.
        error_feedback: Whether what coding leaves behind is added to the next step's gradients, at the sender
            and at the owner of a chunk. 'auto': with 4 bits, and with 2 where the optimizer is given and is
            SGD.
        start_step: Full precision before this step.
        guard: 'warn' logs where coding loses too much, 'adapt' also codes that finer; None: looks at nothing.
        residuals: How error feedback keeps what is left behind: 'float32', or '8bit', a moving average in a
            quarter of the memory.
        exact: What travels uncoded in the same messages: words and patterns as in codec.
        rounding: 'nearest' or 'stochastic' (unbiased, with a larger error).
        hierarchical: Full precision inside a host, coded between hosts (on a single host nothing is coded);
            False: coded between all ranks.
        average: Mean over the ranks; False: sum.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["local_sgd"],
    optimizer: Optimizer,
    process_group: dist.ProcessGroup | None = None,
    *,
    sync_every: int = 8,
    hierarchical: bool = False,
    average_buffers: bool = False,
) -> Handle:
    """Weights averaged every sync_every steps; ranks train on their own in between.

    Args:
        sync_every: Steps of the optimizer between two averages.
        hierarchical: Gradients averaged in every step inside a host, weights between hosts; False: every rank
            by itself.
        average_buffers: Floating-point buffers (running statistics) are averaged with the weights.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: Literal["diloco"],
    optimizer: Optimizer,
    process_group: dist.ProcessGroup | None = None,
    *,
    sync_every: int | str = "auto",
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    nesterov: bool = True,
    fragments: int | str = "auto",
    fragment_pattern: str = "consecutive",
    delay: int | str = "auto",
    mixing: float = 0.0,
    codec: str | None = None,
    error_feedback: bool = True,
    guard: str | None = "warn",
    hierarchical: bool = False,
    average_buffers: bool = False,
) -> Handle:
    """An outer optimizer on what the ranks' weights have moved in sync_every steps, in the background.

    Args:
        sync_every: Steps of the inner optimizer between two synchronisations of a fragment; 'auto': as few as
            the line can carry, by a measurement in the first steps, and 30 or more.
        outer_lr: Learning rate of the outer optimizer, SGD.
        outer_momentum: Its momentum; 0: none. With several hundred rounds 0.9, as published.
        nesterov: Whether its momentum is Nesterov's.
        fragments: The model is cut into so many, synchronised one after another; sync_every is a multiple.
            'auto': up to 4, as many as there are layers.
        fragment_pattern: 'consecutive': neighbouring layers make a fragment; 'strided': every so many layers.
        delay: Steps between the beginning of a fragment's exchange and its use, less than sync_every /
            fragments; 'auto': as many as the exchange takes, by a measurement in the first steps.
        mixing: What a rank keeps of its own weights when a fragment is synchronised, 0 to 1.
        codec: How differences are coded, one of available_codecs(); None: in full precision.
        error_feedback: What a codec leaves of a difference is added to the next.
        guard: 'warn' logs where coding loses too much; None: looks at nothing.
        hierarchical: Gradients averaged in every step inside a host, rounds between hosts; False: every rank by
            itself.
        average_buffers: Floating-point buffers (running statistics) are averaged with the last fragment of a
            round.
    """

@overload
def register_comm_hook(
    ddp: DistributedDataParallel,
    algorithm: str,
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    manager: Manager | None = None,
    **options: OptionArgument,
) -> Handle: ...
@overload
def comm_hook(
    algorithm: Literal["gradient_allreduce"],
    process_group: dist.ProcessGroup | None = None,
    *,
    hierarchical: bool = False,
    average: bool = True,
) -> tuple[HookState, Any]:
    """Mean of the gradients in full precision.

    Args:
        hierarchical: Accepted for compatibility: a full-precision sum is the same either way.
        average: Mean over the ranks; False: sum.
    """

@overload
def comm_hook(
    algorithm: Literal["bytegrad"],
    process_group: dist.ProcessGroup | None = None,
    *,
    hierarchical: bool = True,
    average: bool = True,
    codec: str = "int8",
    start_step: int = 0,
    guard: str | None = "warn",
) -> tuple[HookState, Any]:
    """Mean of the gradients with 8-bit messages.

    Args:
        hierarchical: Full precision inside a host, 8 bits between hosts (on a single host nothing is
            compressed); False: 8 bits between all ranks.
        average: Mean over the ranks; False: sum.
        codec: One of bagua.available_codecs().
        start_step: Full precision before this step.
        guard: 'warn' logs where coding loses too much, 'adapt' also codes that finer; None: looks at nothing.
    """

@overload
def comm_hook(
    algorithm: Literal["powersgd"],
    process_group: dist.ProcessGroup | None = None,
    *,
    rank: int = 4,
    start_step: int = 1000,
    error_feedback: bool = True,
    warm_start: bool = True,
    min_compression: float = 2.0,
    hierarchical: bool = False,
    codec: str | None = None,
    seed: int = 0,
    guard: str | None = "warn",
) -> tuple[HookState, Any]:
    """Mean of the gradients, whose matrices travel as products of two thin factors.

    Args:
        rank: Columns of the factors, and so the rank of what arrives.
        start_step: Full precision before this step.
        error_feedback: What the factors leave out is added to the next step's gradient.
        warm_start: Each step starts from the factor of the last one; False: from a random one.
        min_compression: A gradient has to be more than this many times larger than its factors, or travels as
            it is.
        hierarchical: True: on a single host nothing is compressed. Between hosts there is no difference: sums
            of factors are what factors of sums are, and each byte leaves a host once.
        codec: One of available_codecs(), for the factors; None: full precision.
        seed: Of the random factors.
        guard: 'warn' logs where coding loses too much, 'adapt' also codes that finer; None: looks at nothing.
    """

@overload
def comm_hook(
    algorithm: Literal["quantized_allreduce"],
    process_group: dist.ProcessGroup | None = None,
    *,
    codec: str | Mapping[str, str] = "4bit",
    error_feedback: bool | str = "auto",
    start_step: int = 0,
    guard: str | None = "warn",
    residuals: str = "float32",
    exact: str | Sequence[str] = "small",
    rounding: str = "nearest",
    hierarchical: bool = True,
    average: bool = True,
) -> tuple[HookState, Any]:
    """Mean of the gradients with 4 bits or fewer, and error feedback.

    Args:
        codec: One of bagua.available_codecs(), with int8 for embeddings, the head and what has one dimension
            where it has fewer bits; or a mapping to codecs from 'embedding', 'head' (the last linear layer),
            '1d' (biases, norms), 'small' (below 1024 elements, or a shard below 128) and patterns of
            parameters' names, of which the first that fits counts; the last is '*'.
        error_feedback: Whether what coding leaves behind is added to the next step's gradients, at the sender
            and at the owner of a chunk. 'auto': with 4 bits, and with 2 where the optimizer is given and is
            SGD.
        start_step: Full precision before this step.
        guard: 'warn' logs where coding loses too much, 'adapt' also codes that finer; None: looks at nothing.
        residuals: How error feedback keeps what is left behind: 'float32', or '8bit', a moving average in a
            quarter of the memory.
        exact: What travels uncoded in the same messages: words and patterns as in codec.
        rounding: 'nearest' or 'stochastic' (unbiased, with a larger error).
        hierarchical: Full precision inside a host, coded between hosts (on a single host nothing is coded);
            False: coded between all ranks.
        average: Mean over the ranks; False: sum.
    """

@overload
def comm_hook(
    algorithm: str,
    process_group: dist.ProcessGroup | None = None,
    **options: OptionArgument,
) -> tuple[HookState, Any]: ...
