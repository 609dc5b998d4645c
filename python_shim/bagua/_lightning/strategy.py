# SPDX-License-Identifier: Apache-2.0
"""The strategy's part that is the same for both of Lightning's packages."""

from __future__ import annotations

import warnings
from copy import deepcopy
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua._argument_checks import by_name, check_algorithm, shown
from bagua._handle import Handle
from bagua._hooks import register_comm_hook
from bagua._lightning.checkpoint import add_states_of_all_ranks, of_this_rank, why_not_exact
from bagua._native import _C
from bagua._optimizers import QAdamOptimizer
from bagua._registry import available_algorithms, describe
from bagua._tensors_apart import to_cpu

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

_OPS_BY_WORD = {
    None: ReduceOp.AVG,
    "mean": ReduceOp.AVG,
    "avg": ReduceOp.AVG,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}
_CALL = "BaguaStrategy("
# Backends that know ReduceOp.AVG.
_AVERAGING_BACKENDS = ("bagua", "nccl")
# What the strategy itself says to DDP, and what would be a second hook.
_NOT_FOR_DDP = {"self", "module", "device_ids", "output_device", "dim"}
_HOOKS_OF_TORCH = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}


class StrategyParts(_Base):
    """Lightning's DDPStrategy with one of our algorithms as its communication hook, on CPU and on CUDA devices.

    In the registry as "bagua" and "bagua_<algorithm>", with the default options.

    A checkpoint of the whole training state holds the algorithm's state, of every rank, and a run that continues from
    it with the same algorithm, options and number of ranks gives the bits that it would have given without the break
    (async: the rounds aside). Where ranks hold different weights ("decentralized", "low_precision_decentralized",
    "async", "local_sgd", "diloco") that takes the weights and optimizers of all ranks: the file grows with their
    number. With `save_every_rank=False` it holds those of rank 0 only; all ranks then continue from these and the
    algorithm starts afresh. It does so too, with a warning, from a checkpoint of another algorithm, other options or
    another number of ranks, and from one that lacks what the algorithm keeps. In all cases the checkpoint's
    `state_dict` is the model of rank 0.

    With "async", background averaging pauses during validation and ends with training: all ranks then hold the same
    weights. With "local_sgd" and "diloco" all ranks hold the same weights at the end of training, too; validation takes
    each rank's own.

    Args:
        algorithm: one of `bagua.available_algorithms()`.
        flatten: whether gradients are views into DDP's buckets (DDP's `gradient_as_bucket_view`). A bare bool in the
            second place is this, and no option of the algorithm: those are given by name.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in DDPStrategy.
        **bagua_kwargs: the algorithm's options, `save_every_rank` (True), and what DDPStrategy and
            DistributedDataParallel take by name, such as `process_group_backend` ("bagua"), `timeout`, `start_method`,
            `find_unused_parameters` and `bucket_cap_mb`.

    Raises:
        ValueError: an unknown algorithm or option (the message lists the valid ones), or a value out of range.
        TypeError: an option of a wrong type, or something else than a bool in the place of `flatten`.
        MisconfigurationException: a communication hook of torch was given; when training starts, optimizers that the
            algorithm cannot work with.
    """

    _Misconfiguration: type[Exception]

    def __init__(
        self,
        algorithm: str = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **bagua_kwargs: Any,
    ) -> None:
        check_algorithm(algorithm)
        if not isinstance(flatten, bool):
            raise TypeError(f"flatten must be a bool, got {shown(flatten)}. {by_name(_CALL, algorithm, flatten)}")
        hooks = sorted(_HOOKS_OF_TORCH & bagua_kwargs.keys())
        if hooks:
            raise self._Misconfiguration(
                f"DistributedDataParallel takes one communication hook, the algorithm's: leave out {', '.join(hooks)}"
            )
        self._saves_every_rank = bool(bagua_kwargs.pop("save_every_rank", True))
        of_base: dict[str, Any] = {"process_group_backend": "bagua", "gradient_as_bucket_view": flatten}
        of_base |= {name: bagua_kwargs.pop(name) for name in self._names_of_the_base() & bagua_kwargs.keys()}
        self._options = bagua_kwargs
        self._algorithm = algorithm
        self._info = describe(algorithm)
        self._weights_differ = self._info["optimizer"] == "Optimizer"
        self._saves_state = self._saves_every_rank or not self._weights_differ
        _C.check_options(algorithm, self._options, [*self._names_of_the_base(), "save_every_rank"])
        self._handle: Handle | None = None
        # Whether a checkpoint without the algorithm's state lacks something.
        self._needs_state = False
        # They are of a training that has ended, for checkpoints that are saved afterwards.
        self._last_state: dict[str, Any] | None = None
        self._last_module: Any = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            **of_base,
        )

    @classmethod
    def _names_of_the_base(cls) -> set[str]:
        ddp_strategy = next(base for base in cls.__mro__ if base.__name__ == "DDPStrategy")
        names = signature(ddp_strategy).parameters.keys() | signature(DistributedDataParallel).parameters.keys()
        return names - _NOT_FOR_DDP - {"kwargs"}

    @property
    def algorithm(self) -> str:
        return self._algorithm

    @property
    def handle(self) -> Handle | None:
        """The algorithm at work, for its `stats()`; None while nothing is trained."""
        return self._handle

    # --- Training -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """As DDPStrategy; when training, the algorithm is registered once model and optimizers are there."""
        self._handle = None
        if trainer.state.fn == "fit" or self.lightning_module is not self._last_module:
            self._last_state = self._last_module = None
        elif self._last_state is not None and self._weights_differ and not self.is_global_zero:
            # Where nothing is trained, Lightning gives all ranks the weights of rank 0. What was kept before stays.
            own = deepcopy(to_cpu(self.lightning_module_state_dict()))
            self._last_state = {"state_dict": own, **self._last_state}
        super().setup(trainer)
        if trainer.state.fn == "fit":
            assert isinstance(self.model, DistributedDataParallel)
            self._handle = register_comm_hook(self.model, self._algorithm, self._optimizer(), **self._options)
            self._needs_state = self._saves_state and self._handle.needs_state
            scaler = getattr(self.precision_plugin, "scaler", None)
            if scaler is not None and self._handle.keeps_residuals:
                self._handle.follow(scaler)

    def _register_ddp_hooks(self) -> None:
        # Called before there are optimizers; on CPU devices Lightning's own would do nothing at all.
        pass

    def _optimizer(self) -> Optimizer | None:
        """Return the optimizer that the algorithm needs, or may choose by."""
        expected = self._info["optimizer"]
        if not expected:
            return self.optimizers[0] if self._trains_all_with_one() else None
        if expected == "QAdamOptimizer":
            is_qadam = len(self.optimizers) == 1 and isinstance(self.optimizers[0], QAdamOptimizer)
            if not is_qadam or len(self.lr_scheduler_configs) > 1:
                raise self._Misconfiguration("Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler.")
        if len(self.optimizers) != 1:
            raise self._Misconfiguration(
                f"algorithm {self._algorithm!r} acts on what the optimizer does and takes one optimizer for all "
                f"parameters, but configure_optimizers() returned {len(self.optimizers)}"
            )
        return self.optimizers[0]

    def _trains_all_with_one(self) -> bool:
        assert self.model is not None
        known = {p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        return len(self.optimizers) == 1 and all(p in known for p in self.model.parameters() if p.requires_grad)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Validation puts DDP's wrapper into evaluation mode, and afterwards Lightning takes only the module out of it.
        if isinstance(self.model, DistributedDataParallel):
            self.model.training = True
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Pause background communication, so that all ranks validate, and then save, the same weights.

        Not where that would end a round, and change what is trained.
        """
        super().on_validation_start()
        if self._handle is not None and self._info["steps_may_differ"]:
            self._handle.abort()

    def on_validation_end(self) -> None:
        """Let background communication go on."""
        super().on_validation_end()
        if self._handle is not None and self._info["steps_may_differ"]:
            self._handle.resume()

    def on_train_end(self) -> None:
        """End background communication and keep the algorithm's state for a checkpoint saved later."""
        super().on_train_end()
        if self._handle is None:
            return
        if self._info["runs_in_background"]:
            self._handle.abort()
        if self._saves_state:
            self._last_state = to_cpu(self._handle.state_dict())
            self._last_module = self.lightning_module

    def teardown(self) -> None:
        """As DDPStrategy; the algorithm is let go. Not collective: after an error other ranks may never come here."""
        if self._handle is not None:
            self._handle._let_go()
        self._handle = None
        super().teardown()

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As DDPStrategy, with the states of all ranks. Collective, as `Trainer.save_checkpoint` is."""
        if "optimizer_states" in checkpoint and self._saves_state:
            state = self._last_state if self._handle is None else self._handle.state_dict()
            if state is not None:
                add_states_of_all_ranks(checkpoint, state, with_weights=self._weights_differ)
            elif self._needs_state and self.is_global_zero:
                warnings.warn(
                    f"the checkpoint holds no state of algorithm {self._algorithm!r}: other weights have been loaded "
                    "since the training, or it has not come to its end",
                    stacklevel=2,
                )
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_model_state_dict(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        """As DDPStrategy; what an algorithm that acts on weights has kept does not fit others."""
        if self._weights_differ:
            self._last_state = None
        super().load_model_state_dict(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """As DDPStrategy, of this rank; with its weights, which differ from those of rank 0, and the algorithm's state.

        The model is wrapped by now, so that DDP has no more reason to make the ranks' weights the same.
        """
        if self._handle is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        reason = why_not_exact(checkpoint, self._handle)
        if reason:
            super().load_optimizer_state_dict(checkpoint)
            if self.is_global_zero and ("bagua" in checkpoint or self._needs_state):
                warnings.warn(
                    f"the checkpoint {reason}: all ranks continue from the weights of its rank 0, and algorithm "
                    f"{self._algorithm!r} starts afresh",
                    stacklevel=2,
                )
            return
        checkpoint, state = of_this_rank(checkpoint)
        # Lightning has loaded it in the same way before: of some modules a checkpoint lacks what is frozen.
        lenient = {} if getattr(self.lightning_module, "strict_loading", True) else {"strict": False}
        super().load_model_state_dict(checkpoint, **lenient)
        super().load_optimizer_state_dict(checkpoint)
        self._handle.load_state_dict(state)

    # --- Collectives --------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all processes, or those of a group, in place.

        Args:
            tensor: what to reduce; anything else than a tensor is returned as it is.
            group: a torch process group; None for all processes. A process that is not in it gets the tensor as it is.
            reduce_op: None, "mean" or "avg" (mean; of integers, rounded towards zero), "sum", "min", "max",
                or a `torch.distributed.ReduceOp`.

        Returns:
            The tensor.

        Raises:
            ValueError: another operation.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        op = _reduce_op(reduce_op)
        if not dist.is_initialized() or dist.get_rank(group) < 0:
            return tensor
        if op != ReduceOp.AVG or dist.get_backend(group) in _AVERAGING_BACKENDS:
            dist.all_reduce(tensor, op, group)
            return tensor
        dist.all_reduce(tensor, group=group)
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        return tensor.div_(dist.get_world_size(group), rounding_mode="trunc" if is_whole else None)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Enter "bagua", and "bagua_" with each algorithm's name, into Lightning's registry."""
        strategy_registry.register("bagua", cls, description="DDP with an algorithm of bagua", override=True)
        for algorithm in available_algorithms():
            strategy_registry.register(
                f"bagua_{algorithm}",
                cls,
                description=f"DDP with bagua's algorithm {algorithm!r}",
                override=True,
                algorithm=algorithm,
            )


def _reduce_op(reduce_op: Any) -> Any:
    if isinstance(reduce_op, (ReduceOp, ReduceOp.RedOpType)) and reduce_op != ReduceOp.PREMUL_SUM:
        return reduce_op
    if reduce_op is None or (isinstance(reduce_op, str) and reduce_op in _OPS_BY_WORD):
        return _OPS_BY_WORD[reduce_op]
    raise ValueError(f"Unrecognized `reduce_op` for `BaguaStrategy`: {reduce_op}")
