# SPDX-License-Identifier: Apache-2.0
"""Each promise of the original's document on fuse_optimizer, fuse_step and is_fused_optimizer.

A plain optimizer beside the fused one says what a step is: weights, gradients and state, to the bit.
"""

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from bagua.torch_api.contrib.fuse import fuse_optimizer, fuse_step, is_fused_optimizer
from torch import Tensor, nn, optim
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.any_device

# Sizes that fill a vector register, that do not, and that leave a rest; the fourth is in channels_last order.
SHAPES = ((7, 5), (5,), (64,), (3, 7, 2, 2), (1,), (33, 3), (1, 1))
# As the original's tests have them, and further ones.
CONFIGS: list[Any] = [
    *(partial(optim.Adam, weight_decay=w, amsgrad=a) for w in (1.0, 0.0) for a in (True, False)),
    partial(optim.AdamW, weight_decay=1.0, maximize=True),
    partial(optim.Adam, weight_decay=0.1, foreach=True),
    partial(optim.Adam, lr=torch.tensor(0.01)),
    partial(optim.SGD, lr=0.05),
    partial(optim.SGD, lr=0.2, momentum=1, dampening=0, weight_decay=1, nesterov=True),
    partial(optim.RMSprop, weight_decay=1, momentum=0.9, centered=True),
    partial(optim.RMSprop, weight_decay=0, momentum=0.9),
    partial(optim.Rprop, lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50)),
    partial(optim.ASGD, weight_decay=1, t0=3),
    partial(optim.Adamax, weight_decay=1),
    partial(optim.Adadelta, weight_decay=1),
    partial(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    partial(optim.NAdam, weight_decay=0.1),
    partial(optim.RAdam, weight_decay=0.1),
]
ADAM, SGD = CONFIGS[0], CONFIGS[8]


def _name(config: Any) -> str:
    return "-".join([config.func.__name__, *(f"{key}={value}" for key, value in config.keywords.items())])


def _parameters(shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator(device="cpu").manual_seed(1)
    device = torch.get_default_device()
    values = [torch.randn(tuple(s), generator=generator, device="cpu").to(device, dtype) for s in shapes]
    return [nn.Parameter(v.to(memory_format=torch.channels_last) if v.dim() == 4 else v) for v in values]


def _backward(parameters: Sequence[Tensor], step: int, without: Sequence[int] = ()) -> None:
    """Make gradients that differ from step to step; none for the parameters whose index is in `without`."""
    generator = torch.Generator(device="cpu").manual_seed(100 + step)
    loss = torch.zeros((), dtype=torch.float64)
    for i, p in enumerate(parameters):
        target = torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype)
        if i not in without and p.requires_grad:
            loss = loss + (p - target).square().sum().double()
    loss.backward()  # type: ignore[no-untyped-call]


Train = Callable[[Any, list[nn.Parameter]], None]


def _steps(count: int = 12, *, set_to_none: bool = True, fuses: Callable[[int], bool] = lambda step: True) -> Train:
    def train(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        for step in range(count):
            optimizer.zero_grad(set_to_none=set_to_none)
            _backward(parameters, step)
            _step(optimizer, fuses=fuses(step))

    return train


def _step(optimizer: Any, *, fuses: bool = True) -> Any:
    return optimizer.fuse_step() if fuses and is_fused_optimizer(optimizer) else optimizer.step()


def _assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            _assert_same(a, b, f"{where}[{i}]")
    else:
        assert one == other, where


def _compare(config: Any, train: Train, make: Callable[[], list[nn.Parameter]] = _parameters) -> Any:
    """Train the same in two groups with a plain and with a fused optimizer, and return the fused one."""
    both: list[tuple[Any, list[nn.Parameter]]] = []
    for fuse in (lambda optimizer: optimizer, fuse_optimizer):
        parameters = make()
        half = len(parameters) // 2 + 1
        optimizer = fuse(config([{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.02}]))
        train(optimizer, parameters)
        both.append((optimizer, parameters))
    (plain, expected), (fused, weights) = both
    assert all(p.isfinite().all() for p in expected), "a weight that is not finite would hide differences"
    _assert_same([p.detach() for p in weights], [p.detach() for p in expected], "weights")
    _assert_same([p.grad for p in weights], [p.grad for p in expected], "gradients")
    _assert_same(fused.state_dict(), plain.state_dict(), "state")
    return fused


def _sizes_of_runs(optimizer: Any) -> list[list[int]]:
    """How many parameters each run of the last fused step held, for each group."""
    return [[len(run.parameters) for run in runs] for runs in optimizer._bagua_fusion._runs]


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_a_fused_step_is_the_plain_step_to_the_bit_with_one_parameter_per_group(config: Any, set_to_none: bool) -> None:
    optimizer = _compare(config, _steps(set_to_none=set_to_none))
    assert _sizes_of_runs(optimizer) == [[4], [3]]


@pytest.mark.parametrize("mixture", ["plain first", "fused first", "in turns"])
@pytest.mark.parametrize("config", [ADAM, SGD, CONFIGS[12]], ids=_name)
def test_users_can_still_take_normal_steps(config: Any, mixture: str) -> None:
    fuses = {"plain first": lambda i: i > 5, "fused first": lambda i: i < 5, "in turns": lambda i: i % 2 == 0}[mixture]
    _compare(config, _steps(fuses=fuses))


def _operators(count: int, config: Any) -> int:
    parameters = _parameters([(3,)] * count)
    optimizer = fuse_optimizer(config(parameters))
    _steps(3, set_to_none=False)(optimizer, parameters)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.fuse_step()
    events = [event for event in profiled.events() or [] if event.name.startswith("aten::")]
    names = {event.name for event in events}
    return sum(event.cpu_parent is None or event.cpu_parent.name not in names for event in events)


@pytest.mark.parametrize("config", [ADAM, SGD, CONFIGS[14]], ids=_name)
def test_many_updates_are_fused_into_a_few(config: Any) -> None:
    assert _operators(40, config) == _operators(4, config)


def test_flattening_resets_data_pointers_and_keeps_all_else() -> None:
    parameters = _parameters()
    values = [p.detach().clone() for p in parameters]
    optimizer = fuse_optimizer(optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:]}], lr=0.1))
    for group in optimizer.param_groups:
        for one, next_one in zip(group["params"], group["params"][1:], strict=False):
            assert next_one.data_ptr() == one.data_ptr() + one.nbytes
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in parameters]
    _assert_same([p.detach() for p in parameters], values, "weights")
    addresses = [p.data_ptr() for p in parameters]
    _steps(3)(optimizer, parameters)
    assert [p.data_ptr() for p in parameters] == addresses, "fuse_step must not modify the storage"


def test_without_flattening_only_what_is_contiguous_is_fused_and_else_it_is_step() -> None:
    apart = _parameters()
    whole = torch.randn(24)
    together = [nn.Parameter(piece) for piece in whole.split([5, 7, 12])]
    addresses = [p.data_ptr() for p in (*apart, *together)]
    optimizer = fuse_optimizer(optim.Adam([{"params": apart}, {"params": together}]), do_flatten=False)
    plain_parameters = copy.deepcopy([*apart, *together])
    _steps(4)(optimizer, [*apart, *together])
    _steps(4)(optim.Adam(plain_parameters), plain_parameters)
    assert _sizes_of_runs(optimizer) == [[], [3]]
    assert [p.data_ptr() for p in (*apart, *together)] == addresses
    _assert_same([p.detach() for p in (*apart, *together)], [p.detach() for p in plain_parameters], "weights")


def test_parameters_of_storages_that_meet_by_chance_are_not_one() -> None:
    # Two storages over neighbouring parts of the same bytes.
    block = bytearray(64)
    pieces = [torch.frombuffer(block, dtype=torch.float32, count=8, offset=offset) for offset in (0, 32)]
    parameters = [nn.Parameter(piece) for piece in pieces]
    assert parameters[0].data_ptr() + 32 == parameters[1].data_ptr()
    optimizer = fuse_optimizer(optim.SGD(parameters, lr=0.1), do_flatten=False)
    _steps(1)(optimizer, parameters)
    assert _sizes_of_runs(optimizer) == [[]]


@pytest.mark.parametrize("check_flatten", [True, False])
def test_weights_that_have_left_are_noticed_and_stepped_rightly(
    check_flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        _steps(3)(optimizer, parameters)
        parameters[1].data = parameters[1].data.clone()
        _steps(3)(optimizer, parameters)

    parameters, expected = _parameters(), _parameters()
    with caplog.at_level(logging.WARNING, "bagua"):
        optimizer = fuse_optimizer(ADAM(parameters), check_flatten=check_flatten)
        train(optimizer, parameters)
    train(ADAM(expected), expected)
    assert [record.message.partition(",")[0] for record in caplog.records] == (
        ["fuse_step: 7 parameters no longer lie in the memory they were flattened in"] if check_flatten else []
    )
    _assert_same([p.detach() for p in parameters], [p.detach() for p in expected], "weights")
    assert _sizes_of_runs(optimizer) == [[5]]  # without the first, which has no neighbour any more


def _some_gradients_missing(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    for step in range(8):
        optimizer.zero_grad()
        _backward(parameters, step, without=[step % 3, 5] if step % 2 else [])
        _step(optimizer)


def _one_joins(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    parameters[2].requires_grad_(False)
    _steps(3)(optimizer, parameters)
    parameters[2].requires_grad_(True)
    extra = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [extra]})
    _steps(3)(optimizer, [*parameters, extra])


def _state_is_loaded(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    _steps(3)(optimizer, parameters)
    state = copy.deepcopy(optimizer.state_dict())
    _steps(3)(optimizer, parameters)
    optimizer.load_state_dict(state)
    _steps(3)(optimizer, parameters)


def _state_is_cleared(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    _steps(3)(optimizer, parameters)
    optimizer.state.clear()
    _steps(3)(optimizer, parameters)


def _learning_rate_is_scheduled(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        optimizer.zero_grad()
        _backward(parameters, step)
        _step(optimizer)
        schedule.step()


def _gradients_are_scaled(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    if is_fused_optimizer(optimizer):
        optimizer.step = optimizer.fuse_step
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    for step in range(5):
        optimizer.zero_grad()
        loss = sum((p.square().sum() * (float("inf") if step == 2 else 1.0) for p in parameters), torch.zeros(()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    vars(optimizer).pop("step", None)


@pytest.mark.filterwarnings("error:.*lr_scheduler")
@pytest.mark.parametrize(
    "train",
    [
        _some_gradients_missing,
        _one_joins,
        _state_is_loaded,
        _state_is_cleared,
        _learning_rate_is_scheduled,
        _gradients_are_scaled,
    ],
)
@pytest.mark.parametrize("config", [ADAM, SGD], ids=_name)
def test_what_trainings_do_besides_acts_as_with_the_plain_optimizer(config: Any, train: Train) -> None:
    _compare(config, train)


def _of_two_types() -> list[nn.Parameter]:
    mixed = zip(_parameters(), _parameters(dtype=torch.float64), strict=True)
    return [p for same_shape in mixed for p in same_shape]


def _of_odd_kinds() -> list[nn.Parameter]:
    """0-dim, empty, transposed, tied to the memory of another, and plain ones."""
    base = torch.randn(6, 4, generator=torch.Generator(device=torch.get_default_device()).manual_seed(2))
    tied = torch.arange(12.0)
    return [
        nn.Parameter(torch.tensor(2.0)),
        nn.Parameter(torch.empty(0)),
        nn.Parameter(base.t()),
        nn.Parameter(tied[:8]),
        nn.Parameter(tied[4:]),
        *_parameters(),
    ]


@pytest.mark.parametrize("make", [_of_two_types, _of_odd_kinds])
@pytest.mark.parametrize("config", [ADAM, SGD], ids=_name)
def test_parameters_of_all_kinds_get_their_plain_steps(config: Any, make: Callable[[], list[nn.Parameter]]) -> None:
    optimizer = _compare(config, _steps(), make)
    assert any(_sizes_of_runs(optimizer))


def test_a_sparse_gradient_is_left_to_the_optimizer() -> None:
    weights: list[Tensor] = []
    for fuse in (lambda optimizer: optimizer, fuse_optimizer):
        torch.manual_seed(0)
        embedding, layer = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2)
        optimizer = fuse(optim.SGD([*embedding.parameters(), *layer.parameters()], lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            layer(embedding(torch.tensor([1, 2]))).sum().backward()
            _step(optimizer)
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
    parameters, expected = _parameters(), _parameters()
    with caplog.at_level(logging.WARNING, "bagua"):
        optimizer = fuse_optimizer(kind(parameters))
    assert len(caplog.records) == (1 if kind is ByNorm else 0)
    assert is_fused_optimizer(optimizer)
    _steps(3)(optimizer, parameters)
    _steps(3)(kind(expected), expected)
    _assert_same([p.detach() for p in parameters], [p.detach() for p in expected], "weights")
    assert _sizes_of_runs(optimizer) == ([] if kind is ByNorm else [[7]])
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
    parameters = _parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    calls: list[bool] = []

    def closure() -> str:
        calls.append(torch.is_grad_enabled())
        _backward(parameters, 1)
        return "loss"

    assert fuse_step(optimizer, closure) == "loss"
    assert calls == [True]
    assert fuse_step(optimizer) is None


def test_step_hooks_run_once_and_see_the_parameters_themselves() -> None:
    parameters = _parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    seen: list[bool] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda o, args, kwargs: seen.append(o.param_groups[0]["params"] == parameters))
    _steps(1)(optimizer, parameters)
    assert seen == [True, True]


def test_an_error_in_the_step_leaves_the_parameters_in_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = _parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    _steps(2)(optimizer, parameters)
    before = [p.detach().clone() for p in parameters]
    optimizer.param_groups[0]["betas"] = None
    _backward(parameters, 3)
    with pytest.raises(TypeError):
        optimizer.fuse_step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert set(optimizer.state) == set(parameters)
    _assert_same([p.detach() for p in parameters], before, "weights")


def test_autograd_notices_that_weights_have_changed() -> None:
    parameters = _parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    _backward(parameters, 0)
    loss = parameters[3].square().sum()
    optimizer.fuse_step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_which_optimizers_are_fused_ones() -> None:
    parameters = _parameters()
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
        fuse_step(ADAM(_parameters()))


def test_an_optimizer_goes_with_its_last_user() -> None:
    parameters = _parameters()
    optimizer = fuse_optimizer(ADAM(parameters))
    _steps(2)(optimizer, parameters)
    gone = [weakref.ref(optimizer), weakref.ref(parameters[0])]
    gc.disable()
    try:
        del optimizer, parameters
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
