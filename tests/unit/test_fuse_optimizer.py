# SPDX-License-Identifier: Apache-2.0
"""Each promise of the original's document on fuse_optimizer, fuse_step and is_fused_optimizer.

A plain optimizer beside the fused one says what a step is: weights, gradients and state, to the bit.
"""

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from bagua.torch_api.contrib.fuse import fuse_optimizer, fuse_step, is_fused_optimizer
from fused_training import (
    ADAM,
    CONFIGS,
    SGD,
    assert_same,
    compare,
    name_of,
    new_parameters,
    run_backward,
    sizes_of_runs,
    some_steps,
    step_of,
)
from torch import Tensor, nn, optim
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_fused_step_is_the_plain_step_to_the_bit_with_one_parameter_per_group(config: Any, set_to_none: bool) -> None:
    optimizer = compare(config, some_steps(set_to_none=set_to_none))
    assert sizes_of_runs(optimizer) == [[4], [3]]


@pytest.mark.parametrize("begin", [0, 2], ids=["fused first", "plain first"])
@pytest.mark.parametrize("config", [ADAM, SGD, CONFIGS[12]], ids=name_of)
def test_users_can_still_take_normal_steps(config: Any, begin: int) -> None:
    compare(config, some_steps(fuses=lambda step: (step + begin) % 4 < 2))


def _operators(count: int, config: Any) -> int:
    parameters = new_parameters([(3,)] * count)
    optimizer = fuse_optimizer(config(parameters))
    some_steps(3, set_to_none=False)(optimizer, parameters)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.fuse_step()
    events = [event for event in profiled.events() or [] if event.name.startswith("aten::")]
    names = {event.name for event in events}
    return sum(event.cpu_parent is None or event.cpu_parent.name not in names for event in events)


@pytest.mark.parametrize("config", [ADAM, SGD, CONFIGS[14]], ids=name_of)
def test_many_updates_are_fused_into_a_few(config: Any) -> None:
    assert _operators(40, config) == _operators(4, config)


def test_flattening_resets_data_pointers_and_keeps_all_else() -> None:
    parameters = new_parameters()
    values = [p.detach().clone() for p in parameters]
    optimizer = fuse_optimizer(optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:]}], lr=0.1))
    for group in optimizer.param_groups:
        for one, next_one in zip(group["params"], group["params"][1:], strict=False):
            assert next_one.data_ptr() == one.data_ptr() + one.nbytes
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in parameters]
    assert_same([p.detach() for p in parameters], values, "weights")
    addresses = [p.data_ptr() for p in parameters]
    some_steps(3)(optimizer, parameters)
    assert [p.data_ptr() for p in parameters] == addresses, "fuse_step must not modify the storage"


def test_without_flattening_only_what_is_contiguous_is_fused_and_else_it_is_step() -> None:
    apart = new_parameters()
    whole = torch.randn(24)
    together = [nn.Parameter(piece) for piece in whole.split([5, 7, 12])]
    addresses = [p.data_ptr() for p in (*apart, *together)]
    optimizer = fuse_optimizer(optim.Adam([{"params": apart}, {"params": together}]), do_flatten=False)
    plain_parameters = copy.deepcopy([*apart, *together])
    some_steps(4)(optimizer, [*apart, *together])
    some_steps(4)(optim.Adam(plain_parameters), plain_parameters)
    assert sizes_of_runs(optimizer) == [[], [3]]
    assert [p.data_ptr() for p in (*apart, *together)] == addresses
    assert_same([p.detach() for p in (*apart, *together)], [p.detach() for p in plain_parameters], "weights")


def test_parameters_of_storages_that_meet_by_chance_are_not_one() -> None:
    # Two storages over neighbouring parts of the same bytes.
    block = bytearray(64)
    pieces = [torch.frombuffer(block, dtype=torch.float32, count=8, offset=offset) for offset in (0, 32)]
    parameters = [nn.Parameter(piece) for piece in pieces]
    assert parameters[0].data_ptr() + 32 == parameters[1].data_ptr()
    optimizer = fuse_optimizer(optim.SGD(parameters, lr=0.1), do_flatten=False)
    some_steps(1)(optimizer, parameters)
    assert sizes_of_runs(optimizer) == [[]]


@pytest.mark.parametrize("check_flatten", [True, False])
def test_weights_that_have_left_are_noticed_and_stepped_rightly(
    check_flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        some_steps(3)(optimizer, parameters)
        parameters[1].data = parameters[1].data.clone()
        some_steps(3)(optimizer, parameters)

    parameters, expected = new_parameters(), new_parameters()
    with caplog.at_level(logging.WARNING, "bagua"):
        optimizer = fuse_optimizer(ADAM(parameters), check_flatten=check_flatten)
        train(optimizer, parameters)
    train(ADAM(expected), expected)
    assert [record.message.partition(",")[0] for record in caplog.records] == (
        ["fuse_step: 7 parameters no longer lie in the memory they were flattened in"] if check_flatten else []
    )
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected], "weights")
    assert sizes_of_runs(optimizer) == [[5]]  # without the first, which has no neighbour any more


def test_a_sparse_gradient_is_left_to_the_optimizer() -> None:
    weights: list[Tensor] = []
    for fuse in (lambda optimizer: optimizer, fuse_optimizer):
        torch.manual_seed(0)
        embedding, layer = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2)
        optimizer = fuse(optim.SGD([*embedding.parameters(), *layer.parameters()], lr=0.1))
        for embedding.sparse in (False, True, False):
            optimizer.zero_grad()
            layer(embedding(torch.tensor([1, 2]))).sum().backward()
            step_of(optimizer)
        weights.append(torch.cat([p.detach().flatten() for p in (*embedding.parameters(), *layer.parameters())]))
    assert torch.equal(*weights)


class ByNorm(optim.SGD):
    """An optimizer that looks at a parameter as a whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm(), alpha=0.1)
        return "its own result" if closure is None else closure()


class Sign(ByNorm):
    """One that says of itself that it does not."""

    bagua_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign(), alpha=0.1)


@pytest.mark.parametrize("kind", [ByNorm, Sign])
def test_any_optimizer_is_taken_and_one_that_is_not_known_falls_back_to_step(
    kind: type[ByNorm], caplog: pytest.LogCaptureFixture
) -> None:
    parameters, expected = new_parameters(), new_parameters()
    with caplog.at_level(logging.WARNING, "bagua"):
        optimizer = fuse_optimizer(kind(parameters))
    assert len(caplog.records) == (1 if kind is ByNorm else 0)
    assert is_fused_optimizer(optimizer)
    some_steps(3)(optimizer, parameters)
    some_steps(3)(kind(expected), expected)
    assert_same([p.detach() for p in parameters], [p.detach() for p in expected], "weights")
    assert sizes_of_runs(optimizer) == ([] if kind is ByNorm else [[7]])
    assert optimizer.fuse_step() == ("its own result" if kind is ByNorm else None)
    assert optimizer.fuse_step(lambda: "loss") == "loss"


def test_lbfgs_takes_its_closure() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = fuse_optimizer(optim.LBFGS([weight]))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.fuse_step(closure).item() == 25.0
    assert weight.abs().max() < 1e-3


def test_the_closure_is_called_once_with_gradients_and_its_loss_returned() -> None:
    parameters = new_parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    calls: list[bool] = []

    def closure() -> str:
        calls.append(torch.is_grad_enabled())
        run_backward(parameters, 1)
        return "loss"

    assert fuse_step(optimizer, closure) == "loss"
    assert calls == [True]
    assert fuse_step(optimizer) is None


def test_step_hooks_run_once_and_see_the_parameters_themselves() -> None:
    parameters = new_parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    seen: list[bool] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda o, args, kwargs: seen.append(o.param_groups[0]["params"] == parameters))
    some_steps(1)(optimizer, parameters)
    assert seen == [True, True]


def test_an_error_in_the_step_leaves_the_parameters_in_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = new_parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    some_steps(2)(optimizer, parameters)
    before = [p.detach().clone() for p in parameters]
    optimizer.param_groups[0]["betas"] = None
    run_backward(parameters, 3)
    with pytest.raises(TypeError):
        optimizer.fuse_step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert set(optimizer.state) == set(parameters)
    assert_same([p.detach() for p in parameters], before, "weights")


class Counting(optim.SGD):
    """Counts in a number, and makes its momentum anew in every step."""

    bagua_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in [p for group in self.param_groups for p in group["params"]]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + p.grad
            p.sub_(state["momentum"] / state["step"], alpha=0.01)


@pytest.mark.parametrize("every", [1, 3])
def test_numbers_and_new_tensors_in_a_state_are_those_of_plain_steps(every: int) -> None:
    compare(Counting, some_steps(8, fuses=lambda step: every == 1 or step % every > 0))


def test_autograd_notices_that_weights_have_changed() -> None:
    parameters = new_parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    run_backward(parameters, 0)
    loss = parameters[3].square().sum()
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_which_optimizers_are_fused_ones() -> None:
    parameters = new_parameters()
    optimizer = ADAM(parameters)
    assert not is_fused_optimizer(optimizer)
    assert fuse_optimizer(optimizer) is optimizer
    assert is_fused_optimizer(optimizer)
    assert not is_fused_optimizer(copy.deepcopy(optimizer))
    with pytest.raises(RuntimeError, match="twice"):
        fuse_optimizer(optimizer)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got 'Adam'"):
        fuse_optimizer("Adam")
    with pytest.raises(RuntimeError, match=r"went through fuse_optimizer\(\)"):
        fuse_step(ADAM(new_parameters()))


def test_an_optimizer_goes_with_its_last_user() -> None:
    parameters = new_parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    some_steps(2)(optimizer, parameters)
    gone = [weakref.ref(optimizer), weakref.ref(parameters[0])]
    gc.disable()
    try:
        del optimizer, parameters
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
