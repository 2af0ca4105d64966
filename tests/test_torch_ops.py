"""torch.ops.cukern: the operators against the functions they stand for."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cukern
import cukern.torch_ops
from cukern import ops

DECLARED = {
    schema.split("(", 1)[0]: module
    for module in vars(ops).values()
    if isinstance(module, ModuleType)
    for schema in getattr(module, "TORCH_OPS", {})
}
FUNCTIONS = [
    name
    for module in vars(ops).values()
    if isinstance(module, ModuleType)
    for name in getattr(module, "__all__", [])
    if inspect.isfunction(getattr(module, name))
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def _random(*shape: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Made on the CPU, so that each device gets the same numbers.
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _outputs(tokens: int, topk: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned, so that what is not written shows."""
    weights = torch.full((tokens, topk), torch.nan, device=device)
    return weights, torch.full((tokens, topk), -7, dtype=torch.int32, device=device)


class Call(NamedTuple):
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)

    def operator(self, overload: str = "default") -> Any:
        return getattr(getattr(torch.ops.cukern, self.name), overload)

    @property
    def writes(self) -> bool:
        """Whether it writes its results into its first two arguments."""
        return self.name.startswith("topk_")

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the function gives, in tensors of its own."""
        args = (*_outputs(*self.args[0].shape, str(self.args[0].device)), *self.args[2:]) if self.writes else self.args
        return getattr(cukern, self.name)(*args, **self.options)


def _gate(device: str, tokens: int = 5, dtype: torch.dtype = torch.float32) -> Call:
    args = (_random(tokens, 256, device=device, dtype=dtype), _random(256, device=device, seed=1), 8, 4, 8)
    return Call("moe_fused_gate", args)


def _gate_with_all_options(device: str) -> Call:
    padding = torch.tensor([4], dtype=torch.int32, device=device)
    args = (_random(6, 60, device=device), _random(60, device=device, seed=1), 12, 5, 9, 1, 2.5, True)
    return Call(
        "moe_fused_gate", args, {"renormalize": False, "scoring_func": "softmax", "num_token_non_padded": padding}
    )


def _gate_of_strided_rows(device: str) -> Call:
    logits = _random(5, 300, device=device)[:, :256]
    return Call("moe_fused_gate", (logits, _random(256, device=device, seed=1), 8, 4, 8))


def _biased_grouped_topk(device: str) -> Call:
    logits, bias = _random(5, 128, device=device), _random(128, device=device, seed=1)
    return Call("biased_grouped_topk", (None, logits, bias, 6, True, 4, 2, 1, 2.5), {"scoring_func": "sqrtsoftplus"})


def _grouped_topk(device: str) -> Call:
    hidden_states = _random(5, 16, device=device, seed=1)
    return Call("grouped_topk", (hidden_states, _random(5, 160, device=device), 6, False, 8, 3))


def _topk_softmax(device: str) -> Call:
    return Call("topk_softmax", (*_outputs(5, 8, device), _random(5, 128, device=device)))


def _topk_softmax_with_all_options(device: str) -> Call:
    logits, bias = _random(5, 8, device=device, dtype=torch.float16), _random(8, device=device, seed=1)
    padding = torch.tensor(3, device=device)
    return Call("topk_softmax", (*_outputs(5, 2, device), logits, True, 30.0, bias), {"num_token_non_padded": padding})


def _topk_sigmoid(device: str) -> Call:
    logits, bias = _random(5, 384, device=device), _random(384, device=device, seed=1)
    return Call("topk_sigmoid", (*_outputs(5, 8, device), logits, True, bias))


CALLS = {
    "moe_fused_gate": _gate,
    "moe_fused_gate bfloat16": lambda device: _gate(device, dtype=torch.bfloat16),
    "moe_fused_gate no tokens": lambda device: _gate(device, tokens=0),
    "moe_fused_gate all options": _gate_with_all_options,
    "moe_fused_gate strided rows": _gate_of_strided_rows,
    "biased_grouped_topk": _biased_grouped_topk,
    "grouped_topk": _grouped_topk,
    "topk_softmax": _topk_softmax,
    "topk_softmax all options": _topk_softmax_with_all_options,
    "topk_sigmoid": _topk_sigmoid,
}
WITH_OUT = [name for name in CALLS if not name.startswith("topk_")]


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param](device)


@pytest.fixture(params=WITH_OUT)
def call_with_out(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param](device)


def _assert_same(got: Any, wanted: Any) -> None:
    """The same bits, in tensors of the same kind."""
    assert len(got) == len(wanted) == 2
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)


# --- what is registered -------------------------------------------------------------------------------


def test_each_function_has_an_operator_and_a_case_here() -> None:
    assert FUNCTIONS
    assert sorted(DECLARED) == sorted(FUNCTIONS) == sorted({name.split()[0] for name in CALLS})


@pytest.mark.parametrize("name", DECLARED)
def test_the_schema_has_the_arguments_of_the_function(name: str) -> None:
    parameters = dict(inspect.signature(getattr(cukern, name)).parameters)
    has_out = parameters.pop("out", None) is not None
    packet = getattr(torch.ops.cukern, name)
    assert packet.overloads() == (["default", "out"] if has_out else ["default"])
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        taken = arguments[: len(parameters)]
        assert [a.name for a in taken] == list(parameters)
        for argument, parameter in zip(taken, parameters.values(), strict=True):
            assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
            assert argument.has_default_value() == (parameter.default is not parameter.empty)
            if argument.has_default_value():
                # The dispatcher leaves out an argument that has its default.
                assert argument.default_value == parameter.default
        assert [a.name for a in arguments[len(parameters) :]] == (["weights", "ids"] if overload == "out" else [])


def test_importing_the_module_again_leaves_the_operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.ops.cukern.moe_fused_gate.default
    importlib.reload(cukern.torch_ops)
    monkeypatch.delitem(sys.modules, "cukern.torch_ops")
    again = importlib.import_module("cukern.torch_ops")
    monkeypatch.setattr(cukern, "torch_ops", again)
    assert torch.ops.cukern.moe_fused_gate.default is before
    call = _gate("cpu")
    _assert_same(before(*call.args), call.expected())


def test_a_new_ops_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def test_only_double(input: Any, factor: int = 2, *, out: Any = None) -> Any:
        return torch.mul(input, factor, out=out)

    module = SimpleNamespace(
        test_only_double=test_only_double,
        TORCH_OPS={
            "test_only_double(Tensor input, int factor=2) -> (Tensor doubled)": (
                lambda input, factor=2: [(input, input.shape, "float32")]
            )
        },
    )
    monkeypatch.setattr(ops, "test_only", module, raising=False)
    cukern.torch_ops._register_all()
    x, out = torch.ones(3), torch.zeros(3)
    assert torch.equal(torch.ops.cukern.test_only_double(x), 2 * x)
    assert torch.ops.cukern.test_only_double.out(x, 3, doubled=out) is None
    assert torch.equal(out, 3 * x)
    torch.library.opcheck(torch.ops.cukern.test_only_double.default, (x,))
    torch.library.opcheck(torch.ops.cukern.test_only_double.out, (x,), {"doubled": out})
    compiled = torch.compile(
        lambda x, out: (test_only_double(x), test_only_double(x, 5, out=out)), fullgraph=True, backend="aot_eager"
    )
    doubled, written = compiled(x, out)
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(written, 5 * x)
    assert torch.equal(out, 5 * x)


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, cukern; assert 'torch' not in sys.modules and 'cukern.torch_ops' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- eager --------------------------------------------------------------------------------------------


def test_an_operator_returns_what_its_function_returns(call: Call) -> None:
    returned = call.operator()(*call.args, **call.options)
    if call.writes:
        assert returned is None
        returned = call.args[:2]
    _assert_same(returned, call.expected())


def test_an_operator_takes_keywords(device: str) -> None:
    call = _gate(device)
    names = ("input", "bias", "num_expert_group", "topk_group", "topk")
    _assert_same(torch.ops.cukern.moe_fused_gate(**dict(zip(names, call.args, strict=True))), call.expected())
    call = _topk_softmax(device)
    names = ("topk_weights", "topk_ids", "gating_output")
    torch.ops.cukern.topk_softmax(**dict(zip(names, call.args, strict=True)))
    _assert_same(call.args[:2], call.expected())


def test_the_out_overload_writes_what_the_operator_returns(call_with_out: Call) -> None:
    call = call_with_out
    expected = call.expected()
    weights, ids = _outputs(*expected[0].shape, str(expected[0].device))
    assert call.operator("out")(*call.args, **call.options, weights=weights, ids=ids) is None
    _assert_same((weights, ids), expected)


def test_opcheck(call: Call) -> None:
    torch.library.opcheck(call.operator(), call.args, call.options)


def test_opcheck_of_the_out_overload(call_with_out: Call) -> None:
    call = call_with_out
    weights, ids = _outputs(*call.expected()[0].shape, str(call.args[1].device))
    torch.library.opcheck(call.operator("out"), call.args, {**call.options, "weights": weights, "ids": ids})


def test_meta_tensors_give_shapes() -> None:
    logits, bias = _random(9, 256, device="meta"), _random(256, device="meta")
    weights, ids = torch.ops.cukern.moe_fused_gate(logits, bias, 8, 4, 6)
    assert (weights.shape, weights.dtype, weights.device.type) == ((9, 6), torch.float32, "meta")
    assert (ids.shape, ids.dtype, ids.device.type) == ((9, 6), torch.int32, "meta")


def _bad_calls(device: str) -> dict[str, Call]:
    logits, bias, *sizes = _gate(device).args
    weights, ids = _outputs(5, 8, device)
    return {
        "dtype": Call("moe_fused_gate", (logits.double(), bias, *sizes)),
        "bias length": Call("moe_fused_gate", (logits, bias[:-1], *sizes)),
        "dimensions": Call("moe_fused_gate", (logits[0], bias, *sizes)),
        "groups that do not divide": Call("moe_fused_gate", (logits, bias, 7, 4, 8)),
        "topk too large": Call("moe_fused_gate", (logits, bias, 8, 1, 33)),
        "scoring": Call("moe_fused_gate", (logits, bias, *sizes), {"scoring_func": "tanh"}),
        "strides": Call("moe_fused_gate", (logits.t().contiguous().t(), bias, *sizes)),
        "padding dtype": Call("moe_fused_gate", (logits, bias, *sizes), {"num_token_non_padded": bias[:1]}),
        "hidden states": Call("grouped_topk", (logits[:3], logits, 8, True)),
        "ids dtype": Call("topk_softmax", (weights, ids.long(), logits)),
        "weights shape": Call("topk_sigmoid", (weights[:2], ids, logits)),
    }


@pytest.mark.parametrize("case", _bad_calls("cpu"))
def test_an_operator_raises_what_its_function_raises(case: str, device: str) -> None:
    call = _bad_calls(device)[case]
    with pytest.raises((ValueError, TypeError)) as wanted:
        getattr(cukern, call.name)(*call.args, **call.options)
    with pytest.raises(wanted.type) as got:
        call.operator()(*call.args, **call.options)
    assert str(got.value) == str(wanted.value)


def test_an_error_of_the_out_overload_comes_through(device: str) -> None:
    call = _gate(device)
    weights, ids = _outputs(5, 7, device)
    with pytest.raises(ValueError, match=r"out\[0\] must be of shape \[tokens, topk\] = \[5, 8\], got \[5, 7\]"):
        torch.ops.cukern.moe_fused_gate.out(*call.args, weights=weights, ids=ids)


def test_a_number_where_a_tensor_must_be_is_refused() -> None:
    call = _gate("cpu")
    with pytest.raises(RuntimeError, match=r"Tensor.*num_token_non_padded.*int"):
        torch.ops.cukern.moe_fused_gate(*call.args, num_token_non_padded=3)


# --- gradients ----------------------------------------------------------------------------------------

NO_GRADIENT = r" must be a tensor that does not require grad \(there is no backward"


def _with_gradient(call: Call, position: int) -> Call:
    args = list(call.args)
    args[position] = args[position].clone().requires_grad_()
    return call._replace(args=tuple(args))


@pytest.mark.parametrize(
    ("case", "position", "name"),
    [
        ("moe_fused_gate", 0, "input"),
        ("moe_fused_gate", 1, "bias"),
        ("biased_grouped_topk", 1, "gating_output"),
        ("topk_softmax", 2, "gating_output"),
        ("topk_softmax", 0, "topk_weights"),
    ],
)
def test_a_gradient_that_would_be_lost_is_refused(case: str, position: int, name: str, device: str) -> None:
    call = _with_gradient(CALLS[case](device), position)
    with pytest.raises(RuntimeError, match=name + NO_GRADIENT):
        call.operator()(*call.args, **call.options)
    with torch.no_grad():
        returned = call.operator()(*call.args, **call.options) or call.args[:2]
        _assert_same(returned, call.expected())
    assert call.writes or not any(result.requires_grad for result in returned)


def test_the_out_overload_refuses_gradients(device: str) -> None:
    call = _gate(device)
    weights, ids = _outputs(5, 8, device)
    with pytest.raises(RuntimeError, match="weights" + NO_GRADIENT):
        torch.ops.cukern.moe_fused_gate.out(*call.args, weights=weights.requires_grad_(), ids=ids)


def test_a_gradient_is_refused_when_it_is_traced(device: str) -> None:
    call = _with_gradient(_gate(device), 0)
    route = torch.compile(lambda *args: cukern.moe_fused_gate(*args), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        _assert_same(route(*call.args), call.expected())
    with pytest.raises(Exception, match="input" + NO_GRADIENT):
        route(*call.args)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_run_in_every_inference_mode(mode: Callable[[], Any], call: Call) -> None:
    with mode():
        returned = call.operator()(*call.args, **call.options) or call.args[:2]
        _assert_same(returned, call.expected())


def test_autograd_notices_that_a_saved_tensor_was_written(device: str) -> None:
    call = _topk_softmax(device)
    weights, ids = call.args[:2]
    factor = torch.ones(5, 8, device=device, requires_grad=True)
    product = factor * weights  # keeps weights for the backward
    call.operator()(*call.args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    product = factor * weights
    torch.ops.cukern.moe_fused_gate.out(*_gate(device).args, weights=weights, ids=ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# --- torch.compile ------------------------------------------------------------------------------------

BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_operators_return_the_same(backend: str, call: Call) -> None:
    operator = call.operator()

    def route(*args: Any) -> Any:
        return operator(*args, **call.options) or args[:2]

    _assert_same(torch.compile(route, fullgraph=True, backend=backend)(*call.args), call.expected())
    if call.writes:
        _assert_same(call.args[:2], call.expected())


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_functions_are_their_operators(backend: str, call: Call) -> None:
    function = getattr(cukern, call.name)
    compiled = torch.compile(lambda *args: function(*args, **call.options), fullgraph=True, backend=backend)
    _assert_same(compiled(*call.args), call.expected())


def _targets(graph: torch.fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _operators_in_graph_of(function: Callable[..., Any], *args: Any) -> list[str]:
    found = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.extend(str(target) for target in _targets(module.graph))
        return module.forward

    torch.compile(function, fullgraph=True, backend=backend)(*args)
    return [name for name in found if name.startswith("cukern.")]


def test_a_function_stays_in_the_graph_as_its_operator() -> None:
    def route(logits: Any, bias: Any, weights: Any, ids: Any) -> Any:
        cukern.moe_fused_gate(logits, bias, 8, 4, topk=8, out=(weights, ids))
        first = cukern.topk_softmax(weights, topk_ids=ids, gating_output=logits, renormalize=True)
        assert first[0] is weights and first[1] is ids
        return cukern.grouped_topk(None, logits, 8, renormalize=False)

    found = _operators_in_graph_of(route, *_gate("cpu").args[:2], *_outputs(5, 8, "cpu"))
    assert found == ["cukern.moe_fused_gate.out", "cukern.topk_softmax.default", "cukern.grouped_topk.default"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_in_a_graph_is_read_in_order(backend: str, device: str) -> None:
    def route(logits: torch.Tensor, kept: torch.Tensor, kept_ids: torch.Tensor) -> Any:
        weights = logits.new_empty(5, 8)
        ids = logits.new_empty(5, 8, dtype=torch.int32)
        torch.ops.cukern.topk_softmax(weights, ids, logits)
        # The weights are the logits here, once before and once after they are written again.
        torch.ops.cukern.topk_sigmoid(kept, kept_ids, weights)
        torch.ops.cukern.topk_sigmoid(weights, ids, logits)
        return cukern.grouped_topk(None, weights, 4, True)

    logits = _random(5, 128, device=device)
    wanted_kept, kept = _outputs(5, 8, device), _outputs(5, 8, device)
    wanted = route(logits, *wanted_kept)
    _assert_same(torch.compile(route, fullgraph=True, backend=backend)(logits, *kept), wanted)
    _assert_same(kept, wanted_kept)


def test_one_graph_serves_any_number_of_tokens(device: str) -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def route(logits: torch.Tensor, bias: torch.Tensor) -> Any:
        weights, ids = torch.ops.cukern.moe_fused_gate(logits, bias, 8, 4, 8)
        # In a later shape the number of tokens must still be a symbol.
        return weights.view(logits.shape[0] * 2, 4), ids

    for tokens in (3, 7, 40):
        logits, bias, *_ = _gate(device, tokens).args
        torch._dynamo.mark_dynamic(logits, 0)
        weights, ids = route(logits, bias)
        wanted = _gate(device, tokens).expected()
        assert weights.shape == (2 * tokens, 4)
        _assert_same((weights.view(tokens, 8), ids), wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_in_compiled_code_is_the_functions(backend: str, device: str) -> None:
    logits, bias, *_ = _gate(device).args
    route = torch.compile(lambda *args: torch.ops.cukern.moe_fused_gate(*args, 7, 4, 8), backend=backend)
    with pytest.raises(ValueError, match="num_expert_group must be a divisor of the 256 experts, got 7"):
        route(logits, bias)


# --- torch.export -------------------------------------------------------------------------------------


class Router(torch.nn.Module):
    """A router as models have it, with parameters that require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(_random(256, 16, device="cpu"))
        self.bias = torch.nn.Parameter(_random(256, device="cpu", seed=1))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        return torch.ops.cukern.moe_fused_gate(logits, self.bias, 8, 4, 8, renormalize=False)


def test_an_exported_router_takes_any_number_of_tokens(device: str) -> None:
    router = Router().to(device)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(router, (_random(6, 16, device=device),), dynamic_shapes=({0: tokens},))
        assert torch.ops.cukern.moe_fused_gate.default in _targets(program.graph)
        for count in (1, 6, 33):
            hidden_states = _random(count, 16, device=device, seed=count)
            _assert_same(program.module()(hidden_states), router(hidden_states))


def test_an_export_keeps_what_is_written(device: str) -> None:
    class Route(torch.nn.Module):
        def forward(self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
            torch.ops.cukern.topk_softmax(weights, ids, logits)
            return weights.sum(dim=1)

    call = _topk_softmax(device)
    wanted = call.expected()
    program = torch.export.export(Route(), (call.args[2], *_outputs(5, 8, device))).run_decompositions()
    weights, ids = _outputs(5, 8, device)
    total = program.module()(call.args[2], weights, ids)
    _assert_same((weights, ids), wanted)
    assert torch.equal(total, wanted[0].sum(dim=1))


def test_an_export_refuses_a_gradient() -> None:
    with pytest.raises(Exception, match="input" + NO_GRADIENT):
        torch.export.export(Router(), (_random(6, 16, device="cpu"),))


# --- streams and graphs -------------------------------------------------------------------------------


def _operator_into(call: Call, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run the overload that writes."""
    if call.writes:
        call.operator()(*outputs, *call.args[2:], **call.options)
    else:
        call.operator("out")(*call.args, **call.options, weights=outputs[0], ids=outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["moe_fused_gate", "moe_fused_gate all options", "grouped_topk", "topk_softmax"])
def test_operators_replay_in_a_cuda_graph(case: str) -> None:
    call = CALLS[case]("cuda")
    logits = call.args[{"moe_fused_gate": 0, "grouped_topk": 1, "topk_softmax": 2}[call.name]]
    shape = call.expected()[0].shape  # which loads the kernel, as a capture cannot
    written = _outputs(*shape, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = None if call.writes else call.operator()(*call.args, **call.options)
        _operator_into(call, written)
    for seed in (5, 6):
        logits.copy_(_random(*logits.shape, device="cuda", seed=seed))
        for tensor in (*written, *(returned or ())):
            tensor.fill_(-7)
        graph.replay()
        wanted = call.expected()
        _assert_same(written, wanted)
        if returned is not None:
            _assert_same(returned, wanted)


@pytest.mark.gpu
def test_operators_run_on_the_current_stream() -> None:
    call = _gate("cuda")
    logits = call.args[0]
    wanted = call.expected()
    values = logits.clone()
    written = _outputs(5, 8, "cuda")
    logits.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The logits are there only after a while: a kernel on another stream would see the zeros.
        torch.cuda._sleep(100_000_000)
        logits.copy_(values)
        returned = call.operator()(*call.args)
        _operator_into(call, written)
    stream.synchronize()
    _assert_same(returned, wanted)
    _assert_same(written, wanted)


@pytest.mark.gpu
def test_compiled_code_replays_in_a_cuda_graph() -> None:
    # mode="reduce-overhead" records what inductor made in CUDA graphs of its own.
    route = torch.compile(
        lambda logits, bias: cukern.moe_fused_gate(logits * 2, bias, 8, 4, 8), fullgraph=True, mode="reduce-overhead"
    )
    bias = _gate("cuda").args[1]
    for seed in range(4):  # warm-up, recording, replays
        logits = _random(5, 256, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        _assert_same(route(logits, bias), cukern.moe_fused_gate(logits * 2, bias, 8, 4, 8))
