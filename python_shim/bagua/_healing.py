# SPDX-License-Identifier: Apache-2.0
"""Gives ranks that have joined, or have missed a step, what a rank has that has come further: bit for bit."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import zlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bagua._attachment import trainable_parameters
from bagua._gradual_transfer import GradualTransfer, can_be_gradual, gradual_parameters, tensors_of
from bagua._handle import Handle
from bagua._native import _C
from bagua._progress import A_PART, Part, Progress, Stage, digest_of
from bagua._tensors_apart import gathered, with_tensors, without_tensors
from bagua._torch_private import barrier

# What travels at a time: a large tensor, whole, could take longer than an operation may.
_PIECE_BYTES = 16 << 20
# Of which sums are taken, so that what has the same bytes elsewhere differs.
_DIGEST_BYTES = 4096
_logger = logging.getLogger("bagua")
# In the place of a digest, with the rank, so that it equals no other: forwards with weights that were not there have
# changed the buffers.
_BUFFERS_ARE_DUE = "buffers are due on rank"


class _Said(NamedTuple):
    progress: Progress
    # The groups that it has been in since its last step. None of one that has taken no step with others.
    groups: frozenset[int]
    model: str
    weights: int
    others: str
    first_step: int
    part: Part | None
    # Digest of the list of those that could travel later.
    parameters: int
    # Whether weights can come while the training goes on, how many numbers can, how many of them in a first step, and
    # by how much longer a step may take.
    is_gradual: bool
    later_numbers: int
    step_numbers: int
    share: float


class TrainingState:
    """All that makes one rank go on where another is: model, optimizer, buckets, and whatever else has a state.

    Args:
        handle: of the algorithm at work on the model. What that remembers goes over by itself, at the next forward.
        others: have `state_dict` and `load_state_dict`: schedulers, scalers, data loaders.
    """

    def __init__(
        self, ddp: DistributedDataParallel, optimizer: Optimizer, handle: Handle | None, others: Sequence[Any]
    ) -> None:
        self._ddp = ddp
        self._optimizer = optimizer
        self._handle = handle
        self._others = others
        # Of buffers that are not saved, as they are before the training: a forward may make or enlarge a cache.
        saved = ddp.module.state_dict()
        self._unsaved = _shapes((name, buffer) for name, buffer in ddp.module.named_buffers() if name not in saved)
        # Always that of the weights that are there, also when a transfer has failed.
        self.progress = Progress(-1, Stage.DONE)
        # Forwards with weights that were not there have changed them.
        self._are_buffers_due = False
        # What is still to travel, on all ranks, after heal().
        self.transfer: GradualTransfer | None = None
        # What has come of a transfer that was interrupted.
        self.part: Part | None = None
        # The groups of the rank that the weights are of.
        self.groups: frozenset[int] = frozenset()

    def heal(
        self,
        progress: Progress,
        limit: timedelta,
        *,
        groups: frozenset[int] = frozenset(),
        first_step: int = 0,
        are_weights_equal: bool = False,
        step_bytes: int = 0,
        share: float = 0.0,
    ) -> Progress:
        """Give all ranks that are behind what the furthest one has, and return its progress. Collective.

        Args:
            progress: this rank's.
            limit: for all of it.
            groups: numbers of the groups that this rank has been in since its last step; the steps of ranks that share
                none with the furthest one are dropped, and a warning says so.
            first_step: which step its weights are of where no rank has taken any.
            are_weights_equal: whether ranks of the same progress have the same weights, to the bit; those that have not
                are healed, too, and a warning says so.
            step_bytes: how much of a newcomer's weights and optimizer state may travel in a training step, where that
                is possible, at first; 0 has all travel now.
            share: by what share of its time a step may become longer. The furthest rank's counts.

        Raises:
            ValueError: models of different shapes, on all ranks.
        """
        self.progress = progress
        self.transfer = None
        group = self._ddp.process_group
        self.groups = groups if progress.step >= 0 else frozenset()
        later = gradual_parameters(self._ddp, self._optimizer)
        numbers, size = self._size_of(later)
        own = _Said(
            progress=progress,
            groups=self.groups,
            model="\n".join(self.shapes()),
            weights=_digest(trainable_parameters(self._ddp)) if are_weights_equal else 0,
            others=f"{_BUFFERS_ARE_DUE} {group.rank()}" if self._are_buffers_due else self._digest_of_others(),
            first_step=first_step if progress.step < 0 else 0,
            part=self.part if progress == A_PART else None,
            parameters=digest_of(later),
            is_gradual=step_bytes > 0
            and can_be_gradual(self._ddp, self._optimizer)
            and not self._gives_buffers(progress),
            later_numbers=numbers,
            step_numbers=max(1, step_bytes * numbers // max(1, size)),
            share=share,
        )
        said = gathered(own, group)
        _refuse_other_models(said)
        source = max(range(len(said)), key=lambda rank: (*_rank_of(said[rank]), -rank))
        if said[source].progress.step < 0 and any(other.progress == A_PART for other in said):
            raise RuntimeError("all members that had all weights have died: start again from a checkpoint")
        if said[source].progress.stage is Stage.TORN:
            text = "a step of the optimizer has failed in the middle on all members, which go on from what rank %d has"
            _logger.warning(text, source)
        if said[source].others.startswith(_BUFFERS_ARE_DUE):
            _logger.warning(
                "buffers are those of rank %d, which has computed them from weights that were not whole", source
            )
        behind = [rank for rank, other in enumerate(said) if rank != source and _differs(rank, other, said[source])]
        odd = [rank for rank, other in enumerate(said) if rank not in behind and other.others != said[source].others]
        is_gradual = _can_be_gradual(said, source, behind)
        has = {rank: _numbers_of(said[rank], said[source]) if is_gradual else 0 for rank in behind}
        if group.rank() == source:
            self._send(behind, group, self._state(), later if is_gradual else [])
            self._send(odd, group, self._state_of_others(), [])
        elif group.rank() in behind:
            later = self._receive(source, group, said[source].progress, keeps=has[group.rank()] > 0)
            self.groups = said[source].groups
        elif group.rank() in odd:
            self._receive(source, group, progress)
        if behind or odd:
            # The others wait here, and not in their next step, which has less time.
            barrier(group, limit)
        step = said[source].progress.step if said[source].progress.step >= 0 else said[source].first_step
        whole = Progress(step, Stage.DONE)
        self.part = None
        self._are_buffers_due = is_gradual and group.rank() in behind
        self.progress = A_PART if self._are_buffers_due else whole
        if is_gradual:
            self.transfer = GradualTransfer(
                self._ddp,
                self._optimizer,
                source,
                dict(sorted(has.items(), key=lambda one: -one[1])),
                later if group.rank() in [source, *behind] else [],
                step_numbers=said[source].step_numbers,
                total_numbers=said[source].later_numbers,
                share=said[source].share,
                is_mean=self._handle is None or bool(self._handle.options.get("average", True)),
            )
        return whole

    def forget_step(self) -> None:
        """Drop what a step that has failed leaves: gradients, and what DDP and a GradScaler have noted of them."""
        self._ddp.zero_grad()
        _C.forget_backward(self._ddp.reducer)
        for other in self._others:
            if isinstance(other, torch.amp.GradScaler) and other.is_enabled():
                # It refuses before it has scaled anything, when there is nothing to forget.
                with contextlib.suppress(AssertionError):
                    other.update(other.get_scale())

    def check(self) -> None:
        """Raise what this rank's own state would raise when others needed it: it cannot be made, or not be pickled."""
        pickle.dumps(without_tensors(self._state(), []))

    def shapes(self) -> list[str]:
        """Return what has to be the same of all ranks, a sentence each."""
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        others = [type(other).__qualname__ for other in self._others]
        return [
            f"an optimizer {type(self._optimizer).__qualname__} of {groups} parameters",
            f"others {others}",
            *_shapes(self._ddp.module.state_dict().items()),
            *self._unsaved,
        ]

    def _digest_of_others(self) -> str:
        """Return a text by which states of `others` that differ are told apart."""
        tensors: list[Tensor] = []
        states = [other.state_dict() for other in self._others]
        skeleton = pickle.dumps(without_tensors(states, tensors))
        return f"{hashlib.sha256(skeleton).hexdigest()} {_digest(tensors)}"

    def _state(self) -> dict[str, Any]:
        return {
            "module": self._ddp.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "layout": [] if self._handle is None else self._handle.layout,
            **self._state_of_others(),
        }

    def _state_of_others(self) -> dict[str, Any]:
        return {
            "others": [other.state_dict() for other in self._others],
            "buffers": dict(self._ddp.module.named_buffers()),
        }

    def _gives_buffers(self, progress: Progress) -> bool:
        """Whether DDP gives this newcomer's buffers to all others, as it does with those of rank 0 in each forward."""
        has_buffers = any(True for _ in self._ddp.module.buffers())
        is_first = self._ddp.process_group.rank() == 0
        return progress.step < 0 and is_first and has_buffers and bool(self._ddp.broadcast_buffers)

    def _size_of(self, parameters: Sequence[int]) -> tuple[int, int]:
        """Return how many numbers parameters have, and how many bytes these are with their state."""
        trained = trainable_parameters(self._ddp)
        groups = [tensors_of(trained[index], self._optimizer) for index in parameters]
        return sum(group[0].numel() for group in groups), sum(tensor.nbytes for group in groups for tensor in group)

    def _send(
        self, behind: Sequence[int], group: dist.ProcessGroup, state: dict[str, Any], parameters: Sequence[int]
    ) -> None:
        """Send all of a state but these parameters, which travel later, and what the optimizer keeps of them."""
        if not behind:
            return
        trained = trainable_parameters(self._ddp)
        later = {t.data_ptr() for index in parameters for t in tensors_of(trained[index], self._optimizer)}
        tensors: list[Tensor] = []
        skeleton = without_tensors(state, tensors)
        kinds = [(tensor.shape, tensor.dtype, tensor.is_cpu, tensor.data_ptr() in later) for tensor in tensors]
        tensors = [tensor for tensor in tensors if tensor.data_ptr() not in later]
        for rank in behind:
            dist.send_object_list([(skeleton, kinds, parameters)], group=group, group_dst=rank)
        for tensor in tensors:
            for piece in _pieces(tensor.detach().contiguous()):
                works = [dist.isend(piece, group=group, group_dst=rank) for rank in behind]
                for work in works:
                    assert work is not None
                    work.wait()

    def _receive(self, source: int, group: dist.ProcessGroup, furthest: Progress, *, keeps: bool = False) -> list[int]:
        """Take what is sent, and return which parameters travel later.

        With `keeps` this rank has some of these already, and keeps what the optimizer has for them.
        """
        message: list[Any] = [None]
        dist.recv_object_list(message, group=group, group_src=source)
        skeleton, kinds, parameters = message[0]
        device = trainable_parameters(self._ddp)[0].device
        tensors = []
        for shape, dtype, is_cpu, is_later in kinds:
            tensors.append(torch.zeros(shape, dtype=dtype, device="cpu" if is_cpu else device))
            for piece in [] if is_later else _pieces(tensors[-1]):
                dist.recv(piece, group=group, group_src=source)
        # Only when all is here: what was received in part is dropped.
        state = with_tensors(skeleton, tensors)
        self.progress = A_PART
        if "module" in state:
            # Until a weight comes its own does less harm than a zero.
            late = {id(tensor) for tensor, (*_, is_later) in zip(tensors, kinds, strict=True) if is_later}
            own = self._ddp.module.state_dict()
            state["module"].update((name, own[name]) for name, t in state["module"].items() if id(t) in late)
            trained = [trainable_parameters(self._ddp)[index] for index in (parameters if keeps else [])]
            kept = [tensors_of(p, self._optimizer) for p in trained]
            self.part = None
            self._load(state)
            for p, tensors in zip(trained, kept, strict=True):
                for tensor, own_tensor in zip(tensors_of(p, self._optimizer), tensors, strict=True):
                    tensor.copy_(own_tensor)
        with torch.no_grad():
            for name, buffer in self._ddp.module.named_buffers():
                given = state["buffers"].get(name, buffer)
                if buffer.shape != given.shape:
                    buffer.data = torch.empty_like(given, dtype=buffer.dtype)
                buffer.copy_(given)
        for other, its_state in zip(self._others, state["others"], strict=True):
            other.load_state_dict(its_state)
        if not parameters:
            self.progress = Progress(furthest.step, Stage.DONE)
        return list(parameters)

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        module: nn.Module = self._ddp.module
        module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._restore_dtypes(state["optimizer"]["state"])
        if state["layout"] and self._handle is not None and state["layout"] != self._handle.layout:
            _C.lay_out_buckets(self._ddp.reducer, state["layout"], len(trainable_parameters(self._ddp)))

    def _restore_dtypes(self, states: dict[int, dict[str, Any]]) -> None:
        """Take what an optimizer keeps in another dtype than the weights, which torch converts to theirs."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, state in states.items():
            own = self._optimizer.state[parameters[index]]
            for key, value in state.items():
                if isinstance(value, Tensor) and own[key].dtype != value.dtype:
                    own[key] = value.to(own[key].device)


def _shapes(named: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"{name}: {value.dtype}{list(value.shape)}" for name, value in named if isinstance(value, Tensor)]


def _numbers_of(newcomer: _Said, source: _Said) -> int:
    """Return how many numbers a newcomer has that are those of the source: it took all of its steps since they came."""
    part = newcomer.part
    if part is None or part.step != source.progress.step or part.group not in source.groups:
        return 0
    return part.numbers if part.parameters == newcomer.parameters == source.parameters else 0


def _rank_of(said: _Said) -> tuple[bool, bool, Progress, int]:
    """Return what is the most of the rank from which the others take over.

    It has whole weights, and then right buffers, and of those that have both it is the furthest.
    """
    is_whole = said.progress.step >= 0 and said.progress.stage is not Stage.TORN
    return is_whole, not said.others.startswith(_BUFFERS_ARE_DUE), said.progress, said.first_step


def _refuse_other_models(said: Sequence[_Said]) -> None:
    different = [rank for rank, other in enumerate(said) if other.model != said[0].model]
    if different:
        raise ValueError(
            f"ranks 0 and {different[0]} cannot train together. Rank 0 has {said[0].model[:400]}; "
            f"rank {different[0]} has {said[different[0]].model[:400]}"
        )


def _differs(rank: int, own: _Said, furthest: _Said) -> bool:
    """Whether a rank needs what the furthest one has."""
    if own.groups and furthest.groups and own.groups.isdisjoint(furthest.groups):
        text = "of the %d steps that rank %d has behind it the last were taken in another group, and are dropped"
        _logger.warning(text, own.progress.step, rank)
        return True
    if own.progress != furthest.progress:
        return True
    if own.progress.step < 0 or own.progress.stage in (Stage.TORN, Stage.AFTER_STEP):
        return True
    if own.weights != furthest.weights:
        _logger.warning("weights of rank %d differ after %d steps, and are healed", rank, own.progress.step)
        return True
    return False


def _digest(tensors: Sequence[Tensor]) -> int:
    """Return a number by which tensors that differ are told apart, all but certainly, and fast."""
    found = 0
    for tensor in tensors:
        # A copy begins where words do.
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).clone() if tensor.numel() else tensor
        whole = flat.numel() // _DIGEST_BYTES * _DIGEST_BYTES
        sums = flat[:whole].view(torch.int64).view(-1, _DIGEST_BYTES // 8).sum(1) if whole else flat[:0]
        for part in (sums, flat[whole:]):
            found = zlib.crc32(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


def _can_be_gradual(said: Sequence[_Said], source: int, behind: Sequence[int]) -> bool:
    """Whether newcomers can train while weights are on their way: only they are behind, and it would take long."""
    are_new = all(said[rank].progress.step < 0 for rank in behind)
    has_trained = said[source].progress.step >= 0 and said[source].progress.stage is Stage.DONE
    is_much = said[source].later_numbers > said[source].step_numbers
    return bool(behind) and are_new and has_trained and is_much and all(one.is_gradual for one in said)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.view(-1).view(torch.uint8), _PIECE_BYTES) if tensor.numel() else []
