"""torch.ops.cukern: the operators against the functions they stand for."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cukern
import cukern.torch_ops
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.describe import Result
from cukern.runtime.op import OPERATORS, operator
from cukern.runtime.schema import schemas
from tests.spec import Call, floats, outputs
from tests.specs import ALL, CALLS, WITH_OUT, calls_of, parameters

pytestmark = pytest.mark.usefixtures("fresh_compiler")

DECLARED = {name: own for name, own in OPERATORS.items() if name in cukern.__all__}


def _kind(call: Call) -> tuple[str, ...]:
    """What an operator writes and returns."""
    schema = call.operator()._schema
    written = [str(a.type) for a in schema.arguments if a.alias_info is not None]
    given = [str(call.given.get(name) is not None) for name in call.written]
    return (*written, *given, *(str(result.type) for result in schema.returns))


#: What each backend of torch.compile is tried on: one call of each kind.
THOROUGH = {_kind(CALLS[key]): key for key in reversed(CALLS)}.values()


def gate(tokens: int = 5) -> Call:
    return Call("moe_fused_gate", (floats(tokens, 256), floats(256, seed=1), 8, 4, 8))


@pytest.fixture(params=parameters(CALLS))
def call(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param].on(device)


@pytest.fixture(params=parameters(WITH_OUT))
def call_with_out(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param].on(device)


@pytest.fixture(params=parameters(THOROUGH))
def thorough_call(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param].on(device)


def _assert_same(got: Any, wanted: Any) -> None:
    """The same bits, in tensors of the same kind, the same numbers, and None for None."""
    assert len(got) == len(wanted) > 0
    for one, other in zip(got, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.device) == (other.dtype, other.device)
            assert torch.equal(one, other)
        else:
            assert type(one) is type(other) in (int, type(None))
            assert one == other


# --- what is registered -------------------------------------------------------------------------------


def test_each_function_that_can_be_called_by_itself_has_an_operator() -> None:
    assert {*DECLARED} == {ALL[key].name for key in calls_of("call")}


@pytest.mark.parametrize("name", DECLARED)
def test_the_schema_has_the_arguments_of_the_function(name: str) -> None:
    parameters = dict(inspect.signature(getattr(cukern, name)).parameters)
    # Where vLLM's functions have `out`, it is an argument like the others.
    has_out = "out" in parameters and parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY
    if has_out:
        del parameters["out"]
    flags = [x.overload for x in schemas(DECLARED[name].function, DECLARED[name].names) if x.overload]
    packet = getattr(torch.ops.cukern, name)
    written = [a for a in packet.default._schema.arguments if a.alias_info is not None]
    functional = bool(written) and all(isinstance(a.type, torch.OptionalType) for a in written)
    of_flags = [overload for flag in flags for overload in (flag, *[f"{flag}_out"] * has_out)]
    assert packet.overloads() == ["default", *["out"] * has_out, *["functional"] * functional, *of_flags]
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        returning = getattr(packet, "default" if overload == "out" else overload.removesuffix("_out"))
        added = [result.name for result in returning._schema.returns] if overload.endswith("out") else []
        assert [a.name for a in arguments[len(arguments) - len(added) :]] == added
        taken = {a.name: a for a in arguments[: len(arguments) - len(added)]}
        # An operator may leave out what changes how many results there are.
        left_out = [p for p in parameters if p not in taken]
        without = [a.name for a in written] if overload == "functional" else []
        assert all(p in without or (p.startswith("return_") and parameters[p].default is False) for p in left_out)
        assert list(taken) == [p for p in parameters if p not in left_out]
        for argument in taken.values():
            parameter = parameters[argument.name]
            assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
            assert argument.has_default_value() == (parameter.default is not parameter.empty)
            if argument.has_default_value() and not _stands_for_a_number(argument, parameter):
                # The dispatcher leaves out an argument that has its default.
                assert argument.default_value == parameter.default
        # What is written may not be taken for the same memory.
        # A list keeps its letter elsewhere.
        aliases = [set(a.alias_info.before_set) or {a.name} for a in arguments if a.alias_info is not None]
        assert len(set().union(*aliases)) == len(aliases) >= len(added)


def _stands_for_a_number(argument: Any, parameter: inspect.Parameter) -> bool:
    """Whether an optional tensor has None for the default of a function that also takes a number."""
    optional = isinstance(argument.type, torch.OptionalType) and argument.default_value is None
    return optional and isinstance(parameter.default, (int, float))


def test_importing_the_module_again_leaves_the_operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.ops.cukern.moe_fused_gate.default
    importlib.reload(cukern.torch_ops)
    monkeypatch.delitem(sys.modules, "cukern.torch_ops")
    again = importlib.import_module("cukern.torch_ops")
    monkeypatch.setattr(cukern, "torch_ops", again)
    assert torch.ops.cukern.moe_fused_gate.default is before
    call = gate()
    _assert_same(before(*call.args), call.expected())


def test_a_new_operator_is_found() -> None:
    @operator("doubled", lambda input, factor=2: Result(input.shape, "float32"))
    def test_only_double(input: AnyArray, factor: int = 2, *, out: AnyArray | None = None) -> AnyArray:
        return torch.mul(input, factor, out=out)

    cukern.torch_ops._register_all()
    del OPERATORS["test_only_double"]
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


def test_operators_that_write_and_return() -> None:
    @operator("doubled", lambda input, *_: Result(input.shape, "float32"))
    def test_only_add(
        input: AnyArray, total: WrittenArray, count: WrittenArray | None = None, *, out: AnyArray | None = None
    ) -> AnyArray:
        total += input
        if count is not None:
            count += 1
        return torch.mul(input, 2, out=out)

    cukern.torch_ops._register_all()
    del OPERATORS["test_only_add"]
    packet = torch.ops.cukern.test_only_add
    assert packet.overloads() == ["default", "out"]  # one argument is always written

    def run(x: Any, total: Any, count: Any, out: Any) -> Any:
        doubled = test_only_add(x, total, count) + total
        assert test_only_add(x, total, count=count, out=out) is out
        return doubled, out + total

    for count in (None, 0):
        for backend in ("none", "aot_eager", "inductor"):
            counts = () if count is None else (torch.zeros(1),)
            x, total, out = torch.ones(3), torch.full((3,), 5.0), torch.zeros(3)
            compiled = _compiled(run, backend) if backend != "none" else run
            first, second = compiled(x, total, *(counts or (None,)), out)
            assert first.tolist() == [8] * 3 and second.tolist() == [9] * 3 and total.tolist() == [7] * 3
            assert all(c == 2 for c in counts)
        torch.library.opcheck(packet.default, (x, total, *counts))
        torch.library.opcheck(packet.out, (x, total, *counts), {"doubled": out})


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, cukern; assert 'torch' not in sys.modules and 'cukern.torch_ops' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("first", ["cukern.torch_ops", "torch._dynamo"])
def test_the_compiler_is_imported_when_it_is_used(first: str) -> None:
    code = f"""
import sys, torch, {first}
import cukern.torch_ops
assert ("torch._dynamo" in sys.modules) == ({first!r} == "torch._dynamo")
logits, bias = torch.zeros(3, 8), torch.arange(8.0)
route = torch.compile(lambda *args: cukern.moe_fused_gate(*args, 2, 1, 2), fullgraph=True, backend="eager")
assert route(logits, bias)[1].tolist() == [[7, 6]] * 3
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("gone", ["torch._functorch.compile_utils", "torch._dynamo"])
def test_operators_work_where_a_name_of_torch_s_own_is_gone(gone: str) -> None:
    code = f"""
import sys, warnings, torch
sys.modules[{gone!r}] = None
import cukern.torch_ops
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cukern.torch_ops._keep_draws_apart([])
assert bool(caught) == ({gone!r} != "torch._dynamo"), caught
assert torch.ops.cukern.silu_and_mul(torch.zeros(2, 8)).shape == (2, 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- eager --------------------------------------------------------------------------------------------


def test_an_operator_returns_and_writes_what_its_function_does(call: Call) -> None:
    _assert_same(call.outcome(call.operator()), call.expected())
    if not call.results:
        assert call.operator()(*call.args, **call.options) is None


def test_an_operator_takes_keywords(device: str) -> None:
    call = gate().on(device)
    names = ("input", "bias", "num_expert_group", "topk_group", "topk")
    _assert_same(torch.ops.cukern.moe_fused_gate(**dict(zip(names, call.args, strict=True))), call.expected())
    call = CALLS["topk_softmax"].on(device)
    names = ("topk_weights", "topk_ids", "gating_output")
    torch.ops.cukern.topk_softmax(**dict(zip(names, call.args, strict=True)))
    _assert_same(call.args[:2], call.expected())


def test_the_out_overload_writes_what_the_operator_returns(call_with_out: Call) -> None:
    results = call_with_out.poisoned_results()

    def into_results(*args: Any, **options: Any) -> list[torch.Tensor]:
        assert call_with_out.operator("out")(*args, **options, **results) is None
        return list(results.values())

    _assert_same(call_with_out.outcome(into_results), call_with_out.expected())


def test_opcheck(call: Call) -> None:
    torch.library.opcheck(call.operator(), call.args, call.options)


@pytest.mark.parametrize("key", parameters(key for key in THOROUGH if key in WITH_OUT))
def test_opcheck_of_the_out_overload(key: str, device: str) -> None:
    call = CALLS[key].on(device)
    torch.library.opcheck(call.operator("out"), call.args, {**call.options, **call.poisoned_results()})


def test_meta_tensors_give_shapes() -> None:
    logits, bias = torch.empty(9, 256, device="meta"), torch.empty(256, device="meta")
    weights, ids = torch.ops.cukern.moe_fused_gate(logits, bias, 8, 4, 6)
    assert (weights.shape, weights.dtype, weights.device.type) == ((9, 6), torch.float32, "meta")
    assert (ids.shape, ids.dtype, ids.device.type) == ((9, 6), torch.int32, "meta")


def _bad_calls(device: str) -> dict[str, Call]:
    logits, bias, *sizes = gate().on(device).args
    weights, ids = outputs(5, 8, device)
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
    call = gate().on(device)
    weights, ids = outputs(5, 7, device)
    with pytest.raises(ValueError, match=r"out\[0\] must be of shape \[tokens, topk\] = \[5, 8\], got \[5, 7\]"):
        torch.ops.cukern.moe_fused_gate.out(*call.args, weights=weights, ids=ids)


def test_a_number_where_a_tensor_must_be_is_refused() -> None:
    call = gate()
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
        ("biased_grouped_topk scoring_func", 1, "gating_output"),
        ("topk_softmax", 2, "gating_output"),
        ("topk_softmax", 0, "topk_weights"),
    ],
)
def test_a_gradient_that_would_be_lost_is_refused(case: str, position: int, name: str, device: str) -> None:
    call = _with_gradient(CALLS[case].on(device), position)
    with pytest.raises(RuntimeError, match=name + NO_GRADIENT):
        call.operator()(*call.args, **call.options)
    with torch.no_grad():
        returned = call.operator()(*call.args, **call.options) or call.args[:2]
        _assert_same(returned, call.expected())
    assert not call.results or not any(result.requires_grad for result in returned)


def _float_arguments(call: Call) -> list[str]:
    """The arguments that are tensors of numbers which may require gradients."""
    given = call.given.items()
    return [name for name, x in given if isinstance(x, torch.Tensor) and x.is_floating_point() and x.itemsize > 1]


def _training(call: Call, name: str) -> Call:
    return call.changed(lambda own, x: x.clone().requires_grad_() if own == name else x.clone())


@pytest.mark.parametrize("key", [key for key, call in CALLS.items() if _float_arguments(call)])
def test_functions_refuse_gradients(key: str, device: str) -> None:
    call = CALLS[key].on(device)
    for name in _float_arguments(call):
        training = _training(call, name)
        with pytest.raises(RuntimeError, match=NO_GRADIENT):
            training.function(*training.args, **training.options)
        with torch.no_grad():
            returned = training.run()
        assert not any(x.requires_grad for x in returned if x is not None and x is not training.given[name])


def test_the_out_overload_refuses_gradients(device: str) -> None:
    call = gate().on(device)
    weights, ids = outputs(5, 8, device)
    with pytest.raises(RuntimeError, match="weights" + NO_GRADIENT):
        torch.ops.cukern.moe_fused_gate.out(*call.args, weights=weights.requires_grad_(), ids=ids)


def test_a_gradient_is_refused_when_it_is_traced(device: str) -> None:
    call = _with_gradient(gate().on(device), 0)
    route = torch.compile(lambda *args: cukern.moe_fused_gate(*args), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        _assert_same(route(*call.args), call.expected())
    with pytest.raises(Exception, match="input" + NO_GRADIENT):
        route(*call.args)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_run_in_every_inference_mode(mode: Callable[[], Any], call: Call) -> None:
    with mode():
        _assert_same(call.outcome(call.operator()), call.expected())


def test_autograd_notices_that_a_saved_tensor_was_written(device: str) -> None:
    call = CALLS["topk_softmax"].on(device)
    weights, ids = call.args[:2]
    factor = torch.ones(5, 8, device=device, requires_grad=True)
    product = factor * weights  # keeps weights for the backward
    call.operator()(*call.args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    product = factor * weights
    torch.ops.cukern.moe_fused_gate.out(*gate().on(device).args, weights=weights, ids=ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("key", ["masked_attention scale", "sample seed offset finished end_id", "update_finished"])
def test_a_write_counts_as_a_new_version(key: str, device: str) -> None:
    call = CALLS[key].on(device)
    versions: list[tuple[torch.Tensor, int]] = []

    def observe(*args: Any, **options: Any) -> Any:
        versions.extend((x, x._version) for x in (*args, *options.values()) if isinstance(x, torch.Tensor))
        return call.operator()(*args, **options)

    call.outcome(observe)
    arguments = call.operator()._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None]
    names = [a.name for a in arguments][: len(call.args)] + list(call.options)
    tensors = [name for name, x in zip(names, (*call.args, *call.options.values()), strict=True)
               if isinstance(x, torch.Tensor)]  # fmt: skip
    grown = [name for name, (x, before) in zip(tensors, versions, strict=True) if x._version > before]
    assert grown == [name for name in tensors if name in written] != []


# --- torch.compile ------------------------------------------------------------------------------------

BACKENDS = ["eager", "aot_eager", "inductor"]


def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    # A function of its own: dynamo would look at the one that the operator stands for.
    return torch.compile(lambda *args, **options: function(*args, **options), fullgraph=True, backend=backend)


def _writes_nothing_though_it_could(call: Call) -> bool:
    operator = getattr(torch.ops.cukern, call.name)
    return "functional" in operator.overloads() and len(call.expected()) == len(call.results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_operators_return_the_same(backend: str, thorough_call: Call) -> None:
    call = thorough_call
    operator = call.operator("functional" if _writes_nothing_though_it_could(call) else "default")
    _assert_same(call.outcome(_compiled(operator, backend)), call.expected())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_functions_are_their_operators(backend: str, thorough_call: Call) -> None:
    call = thorough_call
    _assert_same(call.outcome(_compiled(getattr(cukern, call.name), backend)), call.expected())


def test_each_function_can_be_compiled(call: Call) -> None:
    found: list[str] = []
    backend = _backend_that_lists_operators(found, aot_eager=True)
    _assert_same(call.outcome(_compiled(getattr(cukern, call.name), backend)), call.expected())
    overload = "functional" if _writes_nothing_though_it_could(call) else call.late or "default"
    assert found == [f"cukern.{call.name}.{overload}"]


def _targets(graph: torch.fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _backend_that_lists_operators(found: list[str], aot_eager: bool = False) -> Any:
    """A backend of torch.compile that adds the operators of cukern in its graph to `found`."""

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.extend(name for name in map(str, _targets(module.graph)) if name.startswith("cukern."))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs) if aot_eager else module.forward

    return backend


def _operators_in_graph_of(function: Callable[..., Any], *args: Any) -> list[str]:
    found: list[str] = []
    torch.compile(function, fullgraph=True, backend=_backend_that_lists_operators(found))(*args)
    return found


def test_a_function_stays_in_the_graph_as_its_operator() -> None:
    def route(logits: Any, bias: Any, weights: Any, ids: Any) -> Any:
        cukern.moe_fused_gate(logits, bias, 8, 4, topk=8, out=(weights, ids))
        first = cukern.topk_softmax(weights, topk_ids=ids, gating_output=logits, renormalize=True)
        assert first[0] is weights and first[1] is ids
        return cukern.grouped_topk(None, logits, 8, renormalize=False)

    found = _operators_in_graph_of(route, *gate().args[:2], *outputs(5, 8))
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

    logits = floats(5, 128).to(device)
    wanted_kept, kept = outputs(5, 8, device), outputs(5, 8, device)
    wanted = route(logits, *wanted_kept)
    _assert_same(torch.compile(route, fullgraph=True, backend=backend)(logits, *kept), wanted)
    _assert_same(kept, wanted_kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoding_step_is_one_graph(backend: str, device: str) -> None:
    # What a step writes, the next one reads: the caches, the ends and the lengths.
    def step(q: Any, caches: Any, step: int, weight: Any, seed: Any, finished: Any, sequence_length: Any) -> Any:
        attended = cukern.masked_attention(q, q + 1, q * 2, None, None, None, *caches, step)
        entered = caches[0][step - 1].clone()
        ids = cukern.sample(attended @ weight, seed=seed, finished=finished, end_id=3, sequence_length=sequence_length)
        return attended, entered, ids, finished | (ids == 0), sequence_length + 1

    def run(function: Callable[..., Any]) -> list[Any]:
        caches = tuple(torch.zeros(4, 5, 2, 16, device=device) for _ in range(2))
        finished = torch.tensor([False, True, False, False, False], device=device)
        sequence_length = torch.full((5,), 7, dtype=torch.int32, device=device)
        weight = floats(32, 6, seed=1).to(device)
        returned = []
        for i in (1, 2):
            q = floats(5, 32, seed=i).to(device)
            returned += function(q, caches, i, weight, torch.tensor(i, device=device), finished, sequence_length)
        return [*returned, *caches, finished, sequence_length]

    _assert_same(run(_compiled(step, backend)), run(step))


#: The operators of the functions that draw.
DRAWING = [x for x in DECLARED if "generator" in inspect.signature(getattr(cukern, x)).parameters]


def test_what_draws_is_no_common_subexpression() -> None:
    assert len(DRAWING) == 9
    for name in DECLARED:
        packet = getattr(torch.ops.cukern, name)
        for overload in packet.overloads():
            tags = getattr(packet, overload).tags
            assert (torch.Tag.nondeterministic_seeded in tags) == (name in DRAWING), f"{name}.{overload}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trained", [False, True])
def test_two_draws_of_one_graph_differ(trained: bool, backend: str, device: str) -> None:
    weight = torch.ones(64, device=device, requires_grad=trained)

    # Both are used in the graph: what it returns is not compared with anything.
    def draw(logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first, second = cukern.sample(logits * 2), cukern.sample(logits * 2)
        third, fourth = (torch.ops.cukern.sample.functional(logits * 2) for _ in range(2))
        return torch.stack([(first - second) * weight, (third - fourth) * weight, (first - third) * weight])

    logits = torch.zeros(64, 3000, device=device)
    compiled = _compiled(draw, backend)
    with torch._inductor.config.patch(force_disable_caches=True):
        got = compiled(logits, weight).detach()
    assert (got != 0).float().mean(dim=1).min() > 0.9
    assert (compiled(logits, weight) != got).float().mean() > 0.9
    # The same draws again; inductor may have its own order of draws that need nothing of each other.
    found = []
    for function in (compiled, compiled if backend == "inductor" else draw):
        torch.manual_seed(3)
        found.append(function(logits, weight).detach())
    _assert_same(*found)


def test_a_generator_stays_out_of_the_graph(device: str) -> None:
    logits, generator = torch.zeros(64, 3000, device=device), torch.Generator(device)
    wanted = cukern.sample(logits, generator=generator.manual_seed(3))
    _assert_same(torch.ops.cukern.sample(logits, generator=generator.manual_seed(3)), wanted)
    compiled = torch.compile(lambda x: cukern.sample(x, generator=generator), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Generator"):
        compiled(logits)
    eager = torch.compiler.disable(cukern.sample)
    compiled = torch.compile(lambda x: eager(x * 1, generator=generator) + 1, backend="eager")
    generator.manual_seed(3)
    _assert_same(compiled(logits) - 1, wanted)


@pytest.mark.gpu
def test_compiled_draws_differ_at_each_replay() -> None:
    draw = torch.compile(lambda x: cukern.sample(x * 2), fullgraph=True, mode="reduce-overhead")
    logits, found = torch.zeros(64, 3000, device="cuda"), []
    for _ in range(6):  # warm-up, recording, replays
        torch.compiler.cudagraph_mark_step_begin()
        found.append(tuple(draw(logits).tolist()))
    assert len(set(found)) == 6 and all(len({*ids}) > 32 for ids in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_any_number_of_words(backend: str, device: str) -> None:
    # How many words there are is only known when the graph runs.
    def through(padded: torch.Tensor, lengths: torch.Tensor) -> Any:
        offsets, cu_seqlens, words = cukern.build_sequence_length_padding_offset(lengths, padded.shape[1])
        packed = cukern.remove_sequence_length_padding(padded, offsets) * 2
        rebuilt = cukern.rebuild_sequence_length_padding(packed, offsets, *padded.shape[:2])
        return rebuilt, cu_seqlens, words, words + 1

    torch._dynamo.mark_dynamic(padded := floats(3, 4, 6).to(device), 0)
    compiled = torch.compile(through, fullgraph=True, backend=backend)
    for lengths in ([4, 2, 1], [1, 1, 4], [0, 0, 0]):
        given = torch.tensor(lengths, dtype=torch.int32, device=device)
        got = compiled(padded, given)
        _assert_same(got, through(padded, given))
        assert got[2:] == (sum(lengths), sum(lengths) + 1)


def test_out_in_a_graph_of_an_operator_that_also_writes(device: str) -> None:
    call = CALLS["masked_attention scale"].on(device)
    out = torch.full_like(call.args[0], torch.nan)

    def attend(*args: Any) -> Any:
        assert cukern.masked_attention(*args, scale=0.25, out=out) is out
        return out * 2

    doubled, *written = call.outcome(lambda *args, **_: torch.compile(attend, fullgraph=True)(*args))
    attended, *wanted = call.expected()
    _assert_same([out, doubled, *written], [attended, attended * 2, *wanted])


def test_one_graph_serves_any_number_of_tokens(device: str) -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def route(logits: torch.Tensor, bias: torch.Tensor) -> Any:
        weights, ids = torch.ops.cukern.moe_fused_gate(logits, bias, 8, 4, 8)
        # In a later shape the number of tokens must still be a symbol.
        return weights.view(logits.shape[0] * 2, 4), ids

    for tokens in (3, 7, 40):
        logits, bias, *_ = gate(tokens).on(device).args
        torch._dynamo.mark_dynamic(logits, 0)
        weights, ids = route(logits, bias)
        wanted = gate(tokens).on(device).expected()
        assert weights.shape == (2 * tokens, 4)
        _assert_same((weights.view(tokens, 8), ids), wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_in_compiled_code_is_the_functions(backend: str, device: str) -> None:
    logits, bias, *_ = gate().on(device).args
    route = torch.compile(lambda *args: torch.ops.cukern.moe_fused_gate(*args, 7, 4, 8), backend=backend)
    with pytest.raises(ValueError, match="num_expert_group must be a divisor of the 256 experts, got 7"):
        route(logits, bias)


# --- torch.export -------------------------------------------------------------------------------------


class Router(torch.nn.Module):
    """A router as models have it, with parameters that require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(floats(256, 16))
        self.bias = torch.nn.Parameter(floats(256, seed=1))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        return torch.ops.cukern.moe_fused_gate(logits, self.bias, 8, 4, 8, renormalize=False)


def test_an_exported_router_takes_any_number_of_tokens(device: str) -> None:
    router = Router().to(device)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(router, (floats(6, 16).to(device),), dynamic_shapes=({0: tokens},))
        assert torch.ops.cukern.moe_fused_gate.default in _targets(program.graph)
        for count in (1, 6, 33):
            hidden_states = floats(count, 16, seed=count).to(device)
            _assert_same(program.module()(hidden_states), router(hidden_states))


def test_an_export_keeps_what_is_written(device: str) -> None:
    class Route(torch.nn.Module):
        def forward(self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
            torch.ops.cukern.topk_softmax(weights, ids, logits)
            return weights.sum(dim=1)

    call = CALLS["topk_softmax"].on(device)
    wanted = call.expected()
    program = torch.export.export(Route(), (call.args[2], *outputs(5, 8, device))).run_decompositions()
    weights, ids = outputs(5, 8, device)
    total = program.module()(call.args[2], weights, ids)
    _assert_same((weights, ids), wanted)
    assert torch.equal(total, wanted[0].sum(dim=1))


def test_an_export_refuses_a_gradient() -> None:
    with pytest.raises(Exception, match="input" + NO_GRADIENT):
        torch.export.export(Router(), (floats(6, 16),))


# --- streams and graphs -------------------------------------------------------------------------------


def _operator_into(call: Call, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run the overload that writes."""
    if not call.results:
        call.operator()(*outputs, *call.args[2:], **call.options)
    else:
        call.operator("out")(*call.args, **call.options, weights=outputs[0], ids=outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["moe_fused_gate", "moe_fused_gate all options", "grouped_topk", "topk_softmax"])
def test_operators_replay_in_a_cuda_graph(case: str) -> None:
    call = CALLS[case].on("cuda")
    logits = call.args[{"moe_fused_gate": 0, "grouped_topk": 1, "topk_softmax": 2}[call.name]]
    shape = call.expected()[0].shape  # which loads the kernel, as a capture cannot
    written = outputs(*shape, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = call.operator()(*call.args, **call.options) if call.results else None
        _operator_into(call, written)
    for seed in (5, 6):
        logits.copy_(floats(*logits.shape, seed=seed).to("cuda"))
        for tensor in (*written, *(returned or ())):
            tensor.fill_(-7)
        graph.replay()
        wanted = call.expected()
        _assert_same(written, wanted)
        if returned is not None:
            _assert_same(returned, wanted)


@pytest.mark.gpu
def test_operators_run_on_the_current_stream() -> None:
    call = gate().on("cuda")
    logits = call.args[0]
    wanted = call.expected()
    values = logits.clone()
    written = outputs(5, 8, "cuda")
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
    bias = gate().on("cuda").args[1]
    for seed in range(4):  # warm-up, recording, replays
        logits = floats(5, 256, seed=seed).to("cuda")
        torch.compiler.cudagraph_mark_step_begin()
        _assert_same(route(logits, bias), cukern.moe_fused_gate(logits * 2, bias, 8, 4, 8))
