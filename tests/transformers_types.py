"""Every text model type of transformers: whether `generate` of cukern gives the tokens of stock.

    python -m tests.transformers_types [TYPE ...]

builds a tiny random model of each type, compares the tokens for 1, 2 and 5 prompts of different lengths with those that
stock gives for one prompt at a time, greedily in float32, and writes `docs/model_types.md`. With names of types it
prints their rows alone.

Two different tokens count as the same where the model gives both logits within TIE of each other.
"""

from __future__ import annotations

import collections
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUKERN_COMPILE", "lazy")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import cukern.integrations.transformers as ck
from tests import tiny_models

PAGE = Path(__file__).parents[1] / "docs" / "model_types.md"
#: The largest distance of two logits that rounding may swap.
TIE = 1e-3
LENGTHS = 5, 19, 3, 14, 8
BATCHES = 1, 2, 5
NEW_TOKENS = 8
#: Seconds of a core that a type may take.
LIMIT = 60
#: The outcomes, from the best one on.
SAME, REFUSED, DIFFERS, FAILS, UNBUILT = "same tokens", "refused", "differs", "fails", "not built"
#: How the steps of a type run that a session serves.
GRAPH = "one CUDA graph"

#: Small numbers by the names that configurations have for them, beside those of `tiny_models`.
SIZES: dict[str, Any] = {
    **tiny_models.SIZES,
    "d_model": 32, "n_embd": 32, "n_embed": 32, "n_layer": 2, "n_layers": 2, "n_head": 4, "n_heads": 4,
    "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "max_position": 128, "n_inner": 48, "ffn_dim": 48,
    "ffn_hidden_size": 48, "d_ff": 48, "dff": 48, "d_kv": 8, "d_head": 8, "d_inner": 48, "rotary_dim": 4,
    "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "decoder_hidden_size": 32,
    "embedding_size": 32, "input_embedding_size": 32, "output_embedding_size": 32, "emb_dim": 32, "attention_heads": 4,
    "is_decoder": True, "intermediate_size_mlp": 24, "mamba_d_ssm": 64, "encoder_hash_byte_group_vocab": 96,
    "decoder_vocab_size": 96, "max_target_positions": 128, "state_size": 8, "lru_width": 32,
    "num_hidden_groups": 1, "dim_model": 32, "dim_head": 8, "dim_ff": 48,
}  # fmt: skip
#: The names of the number of layers.
_LAYERS = "num_hidden_layers", "num_layers", "n_layer", "n_layers"
#: What some configurations need besides, by the folder of their model.
OF_MODEL: dict[str, dict[str, Any]] = {
    **tiny_models.OF_MODEL,
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass": {
        "rope_parameters": {
            x: {"rope_type": "default", "rope_theta": 1e4} for x in ("full_attention", "sliding_attention")
        }
    },
    "gemma3n": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "moshi": {"audio_vocab_size": 96},
    "recurrent_gemma": {"block_types": ("recurrent", "attention")},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16), "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
}
#: The arguments without which a default configuration is refused.
NEEDED = {"hidden_size_per_layer_input"}


class Row(NamedTuple):
    """A type, and what became of it."""

    name: str
    outcome: str
    replaced: str  # the parts that `enable` replaces
    how: str  # how steps run, or which statement stops the type
    seconds: float


def types() -> list[str]:
    """The text model types of the installed version."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# --- tiny models ----------------------------------------------------------------------------------------


def _spread(values: Sequence[Any]) -> list[Any]:
    """Two values of a list, or all distinct ones of few."""
    distinct = list(dict.fromkeys(map(str, values)))
    if len(distinct) > 4:
        return list(values[:2])
    firsts = [next(x for x in values if str(x) == text) for text in distinct]
    return firsts if len(firsts) > 1 else firsts * 2


def _default(config: Any, name: str) -> Any:
    """An attribute of a default configuration; None where it has none, or several."""
    try:
        return getattr(config, name, None)
    except Exception:  # of a name that the layers have each
        return None


def small(config_class: Any, folder: str) -> dict[str, Any]:
    """The arguments of a small configuration: known sizes, and a layer of each kind from its lists of layers."""
    own = OF_MODEL.get(folder, {})
    alias = getattr(config_class, "attribute_map", {})
    names = {
        x
        for x in tiny_models._accepted(config_class)
        if not isinstance(getattr(config_class, alias.get(x, x), None), property)
    }
    made = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # each head has its own keys, made of the latents
        made["num_key_value_heads"] = made["num_attention_heads"]
    default = config_class(**{name: value for name, value in own.items() if name in names and name in NEEDED})
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        kind = type(_default(default, name)) if part.__name__ == "AutoConfig" else part
        if hasattr(kind, "model_type"):
            made[name] = small(kind, folder)
            if part.__name__ == "AutoConfig":
                made[name]["model_type"] = kind.model_type
    # An alias of another name would overwrite what that one is given.
    made |= _lists({x for x in names if alias.get(x, x) == x}, default)
    return made | {name: value for name, value in own.items() if name in tiny_models._accepted(config_class)}


def _lists(names: set[str], default: Any) -> dict[str, Any]:
    """The lists with a value of each layer, with the layers that they name, and the number of layers."""
    layers = _default(default, "num_hidden_layers")
    found = {
        name: _spread(value)
        for name in sorted(names)
        if isinstance(value := _default(default, name), (list, tuple)) and len(value) == layers
    }
    count = max(map(len, found.values()), default=2)
    made: dict[str, Any] = {name: (value * count)[:count] for name, value in found.items()}
    return made | ({name: count for name in _LAYERS if name in names} if found else {})


def build(name: str) -> Any:
    """A tiny random model of a type, in float32 on the CPU."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]
    model = model[0] if isinstance(model, tuple) else model
    config_class = model.config_class
    config = config_class(**small(config_class, config_class.__module__.split(".")[2]))
    torch.manual_seed(0)
    model = model(config).eval()
    generator = torch.Generator().manual_seed(1)
    for x in model.parameters():
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=generator)
            x.data = noise * 0.3 if x.dim() > 1 else x.data.float() + noise * 0.05
    return model.float()


# --- the comparison -------------------------------------------------------------------------------------


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 90, (count,), generator=generator) for count in LENGTHS]


@torch.no_grad()
def stock(model: Any, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The tokens that stock gives for a prompt, and its logits [tokens, vocab]."""
    torch.manual_seed(0)
    out = model.generate(
        prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def _unlike(got: list[int], wanted: list[int], logits: torch.Tensor) -> str:
    """Where two rows of tokens part, if it is no tie; empty: they are the same."""
    if len(got) != len(wanted):
        return f"{len(got)} tokens for {len(wanted)}"
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one != other:
            gap = float(logits[i, other] - logits[i, one])
            return "" if gap < TIE else f"token {i} is {one} for {other}, {gap:.2g} below"
    return ""


def compare(name: str) -> Row:
    """Build a type, and compare its tokens."""
    begin = time.perf_counter()

    def row(outcome: str, how: Any, replaced: str = "") -> Row:
        said = " ".join(str(how).split())
        error = f"{type(how).__name__}: " if isinstance(how, Exception) and outcome != REFUSED else ""
        return Row(name, outcome, replaced, error + said, time.perf_counter() - begin)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build(name)
            rows = prompts()
            wanted = [stock(model, x) for x in rows]
        except Exception as error:
            return row(UNBUILT, error)
        report = ck.enable(model)
        replaced = ", ".join(x for x in ck.PARTS if x in report.parts())
        for count in BATCHES:
            try:
                out = ck.generate(model, rows[:count], max_new_tokens=NEW_TOKENS, eos_token_id=None)
            except Exception as error:
                is_sentence = isinstance(error, ValueError) and str(error).startswith(("model must", "prompts must"))
                return row(REFUSED if is_sentence else FAILS, error, replaced)
            for i, (tokens, own) in enumerate(zip(out.tokens, wanted, strict=False)):
                if unlike := _unlike(tokens, *own):
                    return row(DIFFERS, f"prompt {i} of {count}: {unlike}", replaced)
    return row(SAME, GRAPH if out.why == "the model is on the CPU" else out.why, replaced)


def _child(name: str, sender: Any) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    sender.send(compare(name))


def compared(names: Sequence[str], workers: int = 2) -> Iterator[Row]:
    """The rows of types, each in a process of its own that LIMIT bounds."""
    context = multiprocessing.get_context("fork")
    waiting = collections.deque(names)
    running: dict[str, tuple[Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, sender))
            process.start()
            sender.close()
            running[name] = process, receiver, time.monotonic()
        multiprocessing.connection.wait([x[1] for x in running.values()], timeout=1)
        for name, (process, receiver, begun) in list(running.items()):
            if not receiver.poll() and process.is_alive():
                continue
            try:
                row = receiver.recv()
            except EOFError:
                process.join()
                why = f"it takes more than {LIMIT} s" if process.exitcode == -signal.SIGXCPU else "its process ended"
                row = Row(name, FAILS, "", why, time.monotonic() - begun)
            process.join()
            del running[name]
            yield row


# --- the page -------------------------------------------------------------------------------------------


def _shown(how: str) -> str:
    """A statement on one line of a table."""
    short = how if len(how) <= 110 else how[:110].rsplit(" ", 1)[0] + " ..."
    return short.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("`", "'").replace("*", "\\*")


def page(rows: Sequence[Row]) -> str:
    """The page of the docs."""
    of = collections.Counter(x.outcome for x in rows)
    table = [f"| `{x.name}` | {x.outcome} | {x.replaced} | {_shown(x.how)} |" for x in sorted(rows)]
    counts = (
        f"Of {len(rows)} types: {of[SAME]} same tokens, {of[REFUSED]} refused, {of[DIFFERS] + of[FAILS]} with other "
        f"tokens or an error, {of[UNBUILT]} not built\n"
        "(the tiny configuration does not build, or stock does not run it)."
    )
    intro = (
        "`python -m tests.transformers_types` writes this page. It builds a tiny random model of each text model type\n"
        f"of transformers {transformers.__version__}, and compares `generate` of `cukern.integrations.transformers` "
        "with stock. It\nruns 1, 2 and 5 prompts of different lengths, and stock one prompt at a time, greedily in "
        f"float32. Each prompt\ngets {NEW_TOKENS} new tokens. Two different tokens count as the same where their "
        f"logits differ by less than {TIE:g}."
    )
    column = (
        "The last column says how steps run on a GPU: each as one CUDA graph, or why there is no graph. For a type\n"
        "that is refused or not built it has the statement that stops it."
    )
    head = "| type | result | replaced | steps |\n| --- | --- | --- | --- |"
    return "\n\n".join(("# Model types", intro, counts, column, "\n".join((head, *table)))) + "\n"


def recorded() -> tuple[str, dict[str, str]]:
    """The version of the page, and the outcome of each type."""
    text = PAGE.read_text()
    version = re.search(r"transformers ([\d.]+\d)", text)
    assert version
    return version[1], dict(re.findall(r"^\| `([^`]+)` \| ([^|]+?) \|", text, re.MULTILINE))


def main() -> None:
    begin = time.perf_counter()
    names, rows = sys.argv[1:], []
    for row in compared(names or types()):
        rows.append(row)
        print(f"{row.name:28} {row.outcome:12} {row.seconds:5.1f} s  {row.replaced}; {row.how[:200]}", flush=True)
    print(dict(collections.Counter(x.outcome for x in rows)), f"{time.perf_counter() - begin:.0f} s")
    if not names:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
