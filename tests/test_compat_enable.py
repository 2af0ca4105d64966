"""`cukern.compat.enable` and `disable`: without the library, with it, and with it imported before."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cukern import compat
from cukern.compat import flash_mla, flashinfer, sglang, vllm
from cukern.compat.flash_attn import flash_attn_3, vllm_flash_attn

#: A library with the names of FlashMLA: two whose calls are right for cukern's, and one more.
FLASH_MLA = {
    "flash_mla/__init__.py": """
        from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata, flash_mla_sparse_fwd
        """,
    "flash_mla/flash_mla_interface.py": """
        def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
            return "real"

        def flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits
        ):
            return "real"

        def flash_mla_sparse_fwd(q):
            return "real"
        """,
}
VLLM = {
    "vllm/__init__.py": "",
    "vllm/_custom_ops.py": """
        def rms_norm(out, input, weight, epsilon):
            return "real"

        def moe_sum(input, output):
            return "real"

        def grouped_topk(scores, scores_with_bias, num_expert_group):
            return "real"

        def rotary_embedding(positions):
            return "real"
        """,
    "vllm_user.py": "from vllm._custom_ops import moe_sum",
}


ROOTS = {name.partition(".")[0] for peer in compat.PEERS.values() for name in peer.modules}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Undo what a test enabled, and forget the libraries that it wrote."""
    before = set(sys.modules)
    yield
    compat.disable()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("vllm_user", *ROOTS):
            del sys.modules[name]
    importlib.invalidate_caches()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    importlib.invalidate_caches()


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("peer", compat.PEERS)
def test_without_the_library_modules_of_its_names_are_there(peer: str) -> None:
    modules = compat.PEERS[peer].modules
    root = next(iter(modules)).partition(".")[0]
    if installed(root):
        pytest.skip(f"{root} is installed")
    (line,) = compat.enable(peer)
    assert line.startswith(f"{root} is not installed: ")
    assert compat.enabled() == (peer,)
    for name, source in modules.items():
        found = importlib.import_module(name)
        own = importlib.import_module(f"cukern.compat.{source}")
        for each in own.__all__:
            if callable(getattr(own, each)):
                assert getattr(found, each) is getattr(own, each)
        assert found.__version__ == compat.PEERS[peer].release
        assert name in line
    with pytest.raises(
        ModuleNotFoundError, match=rf"^{root}\.nowhere is not covered by cukern\.compat: cukern stands in "
    ):
        importlib.import_module(f"{root}.nowhere")
    assert importlib.util.find_spec(f"{root}.nowhere") is None
    assert compat.enable(peer) == (f"{peer} is enabled already",)
    assert compat.disable(peer) == (f"{peer}: restored",)
    assert not any(name.partition(".")[0] == root for name in sys.modules)
    assert compat.disable(peer) == (f"{peer} is not enabled",)


@pytest.mark.skipif(any(map(installed, ROOTS)), reason="one is installed")
def test_imports_as_programs_write_them() -> None:
    compat.enable(*compat.PEERS)
    program = """
        import flashinfer.sampling
        import sgl_kernel
        import vllm.model_executor.layers.fused_moe.moe_permute_unpermute as permutation
        from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
        from flashinfer import rmsnorm, sampling
        from sgl_kernel.flash_mla import get_mla_metadata as plan
        from flash_attn_interface import flash_attn_func
        from sgl_kernel.moe import topk_softmax
        from vllm import _custom_ops as ops
        from vllm.vllm_flash_attn import flash_attn_varlen_func
        """
    names: dict[str, object] = {}
    exec(textwrap.dedent(program), names)
    assert names["flash_mla_with_kvcache"] is flash_mla.flash_mla_with_kvcache
    assert names["sampling"] is names["flashinfer"].sampling  # type: ignore[attr-defined]
    assert names["rmsnorm"] is flashinfer.rmsnorm
    assert names["topk_softmax"] is sglang.topk_softmax
    assert names["plan"] is sglang.flash_mla.get_mla_metadata
    assert names["ops"].rms_norm is vllm.rms_norm  # type: ignore[attr-defined]
    assert names["flash_attn_func"] is flash_attn_3.flash_attn_func
    assert names["flash_attn_varlen_func"] is vllm_flash_attn.flash_attn_varlen_func
    for statement, says in (
        (
            "from flashinfer import rmsnorm, BatchDecodeWithPagedKVCacheWrapper",
            "BatchDecodeWithPagedKVCacheWrapper is not covered by cukern.compat.flashinfer: cukern stands in for "
            "flashinfer here. cukern.paged_attention does this with other arguments. docs/differences.md lists what it "
            "covers.",
        ),
        (
            "from vllm import LLM",
            "LLM is not covered by cukern.compat: cukern stands in for vllm here. docs/differences.md lists what it "
            "covers.",
        ),
        (
            "from sgl_kernel import no_such",
            "no_such is not covered by cukern.compat.sglang: cukern stands in for sgl_kernel here. "
            "docs/differences.md lists what it covers.",
        ),
    ):
        with pytest.raises(ImportError) as refused:
            exec(statement)
        assert str(refused.value) == says
    # Libraries ask what a release has.
    library = importlib.import_module("flashinfer")
    assert not hasattr(library, "decode") and importlib.util.find_spec("flashinfer.decode") is None
    with pytest.raises(
        AttributeError, match=r"decode is not covered by cukern\.compat\.flashinfer: cukern stands in for"
    ):
        _ = library.decode
    with pytest.raises(NotImplementedError, match="flash_mla_sparse_fwd is not covered"):
        names["flash_mla_sparse_fwd"]()  # type: ignore[operator]
    assert set(compat.enabled()) == set(compat.PEERS)
    assert len(compat.disable()) == len(compat.PEERS)
    assert compat.enabled() == ()


def test_functions_of_an_installed_library_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FLASH_MLA)
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = compat.enable("flash_mla")
    assert lines == (
        "flash_mla: replaced flash_mla_with_kvcache, get_mla_metadata",
        "flash_mla.flash_mla_interface: replaced flash_mla_with_kvcache, get_mla_metadata",
    )
    real, inner = sys.modules["flash_mla"], sys.modules["flash_mla.flash_mla_interface"]
    for module in (real, inner):
        assert module.get_mla_metadata is flash_mla.get_mla_metadata
        assert module.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
        assert module.flash_mla_sparse_fwd(1) == "real"
    compat.disable("flash_mla")
    for module in (real, inner):
        assert module.get_mla_metadata(1, 2, 3) == "real"
        assert module.flash_mla_with_kvcache(*range(7)) == "real"


def test_functions_that_share_a_plan_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict(FLASH_MLA)
    name = "flash_mla/flash_mla_interface.py"
    files[name] = files[name].replace("q, k_cache, block_table", "q, cache, table")
    write(tmp_path, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    left = "left as they were, for arguments are others: flash_mla_with_kvcache, get_mla_metadata"
    assert compat.enable("flash_mla") == (
        "flash_mla: replaced nothing",
        f"flash_mla: {left}",
        "flash_mla.flash_mla_interface: replaced nothing",
        f"flash_mla.flash_mla_interface: {left}",
    )
    assert sys.modules["flash_mla"].get_mla_metadata(1, 2, 3) == "real"


def test_a_library_that_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    user, real = importlib.import_module("vllm_user"), importlib.import_module("vllm._custom_ops")
    with pytest.warns(UserWarning, match="imported by name before are still its own in vllm_user"):
        lines = compat.enable("vllm")
    assert lines == (
        "vllm was imported before",
        "vllm._custom_ops: replaced moe_sum, rms_norm",
        "vllm._custom_ops: left as they were, for arguments are others: grouped_topk",
        "vllm.model_executor.layers.fused_moe.moe_permute_unpermute is not in this release",
        "functions imported by name before are still its own in vllm_user",
    )
    assert (real.moe_sum, real.rms_norm) == (vllm.moe_sum, vllm.rms_norm)
    assert user.moe_sum(1, 2) == "real"
    assert real.rotary_embedding(1) == "real"
    assert not hasattr(real, "topk_softmax")
    mine = real.rms_norm = lambda: "another's"
    assert compat.disable("vllm") == ("vllm: restored, but for rms_norm, changed since",)
    assert real.rms_norm is mine
    assert real.moe_sum(1, 2) == "real"


def test_an_installed_library_that_does_not_import_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict(FLASH_MLA)
    files["flash_mla/flash_mla_interface.py"] = "import a_module_that_nobody_has"
    write(tmp_path, files)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        compat.enable("flash_mla")
    assert compat.enabled() == ()


def test_an_unknown_name_changes_nothing() -> None:
    for function in (compat.enable, compat.disable):
        with pytest.raises(ValueError, match="name must be one of 'vllm', 'sglang', 'flashinfer', 'flash_mla', '"):
            function("flash_mla", "flashmla")
    assert compat.enabled() == ()
    assert compat.enable() == ()


def test_the_module_itself_imports_neither_torch_nor_the_peers() -> None:
    program = "import sys, cukern.compat; print(sorted({'torch', 'vllm', 'flashinfer'} & {*sys.modules}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
