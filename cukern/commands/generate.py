"""`cukern generate`: continue prompts with a transformers model on cukern's kernels."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

from cukern.commands import UserError, check_device, no_directory, texts

_DTYPES = ("bfloat16", "float16", "float32")
_RANDOM_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="the directory of a decoder with its tokenizer, as transformers writes it",
    )
    add("--config", metavar="NAME", help="with --random-weights: the shape of a well-known model, or a directory")
    add("--random-weights", action="store_true", help="make the model with random weights: for its speed alone")
    add("--prompt", action="append", metavar="TEXT", help="what to continue; several times for a batch")
    add(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help=f"of random prompts without a tokenizer (default: {_RANDOM_TOKENS})",
    )
    add("--batch-size", type=int, default=1, metavar="N", help="random prompts at once (default: 1)")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="for each prompt (default: 64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="of the draws; 0, the default, takes the likeliest")
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest that have this share together")
    add("--seed", type=int, default=0, metavar="N", help="of the draws, and of random weights (default: 0)")
    add(
        "--dtype",
        choices=_DTYPES,
        help="of the weights (default: bfloat16 on a GPU, float32 on the CPU; of packed "
        "weights the dtype in config.json)",
    )
    add("--device", metavar="NAME", help="of torch (default: cuda where there is one)")
    add("--stock", action="store_true", help="leave the model as it is, for a comparison")
    parser.epilog = "What runs on what, and tokens per second, are said on stderr; stdout has the texts alone."


def _check(args: argparse.Namespace) -> None:
    if args.random_weights != (args.config is not None):
        raise UserError("--config NAME and --random-weights go together")
    if (args.model is None) == (args.config is None):
        raise UserError("one of --model DIR and --config NAME --random-weights is needed")
    if args.model is not None and not args.prompt:
        raise UserError("--prompt is needed with --model")
    if args.config is not None and args.prompt:
        raise UserError("--prompt needs a tokenizer, which --random-weights has none of: give --prompt-tokens N")
    if args.model is not None and not args.model.is_dir():
        raise no_directory("--model", args.model)
    if args.model is not None and not (args.model / "config.json").is_file():
        raise UserError(f"--model: {args.model} has no config.json")
    if not 0 <= args.seed < 1 << 63:
        raise UserError(f"--seed must be in [0, 2**63), got {args.seed}")
    if not 0 <= args.temperature < float("inf"):
        raise UserError(f"--temperature must be a finite number of at least 0, got {args.temperature}")
    for name in ("batch_size", "max_new_tokens", "prompt_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")


def _load(args: argparse.Namespace) -> tuple[Any, Any, list[list[int]]]:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if torch.device(device).type == "cuda" else "float32"))
    if args.config is not None:
        from cukern.integrations.transformers._shapes import configuration, random_model

        config = configuration(args.config)
        count = args.prompt_tokens or _RANDOM_TOKENS
        generator = torch.Generator().manual_seed(args.seed)
        ids = torch.randint(config.vocab_size, (args.batch_size, count), generator=generator)
        return random_model(config, dtype=dtype, device=device, seed=args.seed), None, ids.tolist()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from cukern.integrations.transformers._formats import quantization_of
    from cukern.integrations.transformers._load import load

    config = AutoConfig.from_pretrained(args.model)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise UserError(f"--model: {args.model} has a model of type {config.model_type}, which is no decoder")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if quantization_of(config) and not args.stock:
        model: Any = load(args.model, device=device, dtype=None if args.dtype is None else dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        model = model.to(device).eval()
    ids = [list(tokenizer(text)["input_ids"]) for text in args.prompt]
    for text, own in zip(args.prompt, ids, strict=True):
        if not own:
            raise UserError(f"--prompt {text!r} has no tokens")
    return model, tokenizer, ids


def run(args: argparse.Namespace) -> int:
    _check(args)
    try:
        import torch  # noqa: F401
        import transformers

        import cukern.integrations.transformers as ck
        from cukern.integrations.transformers._state import report_of
    except ImportError as error:
        raise UserError(f'torch and transformers are needed ({error}): pip install "cukern[transformers]"') from None
    transformers.logging.set_verbosity_error()

    with texts.refusing(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, tokenizer, ids = _load(args)
        said = f"{type(model).__name__} as it is" if args.stock else str(report_of(model) or ck.enable(model))
        print(said, file=sys.stderr)
        options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
        stop: Any = "model" if tokenizer is not None else None
        out = ck.generate(model, ids, max_new_tokens=args.max_new_tokens, eos_token_id=stop, progress=None, **options)
    for message in dict.fromkeys(str(x.message) for x in caught if x.category is UserWarning):
        print(f"cukern generate: {message}", file=sys.stderr)
    for tokens in out.tokens:
        print(
            tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else " ".join(map(str, tokens))
        )
    how = "each step one CUDA graph" if out.captured else f"no graph: {out.why}"
    print(
        f"{len(ids)} x {out.steps} tokens: ready in {out.ready_s * 1e3:.1f} ms, "
        f"{out.prefill_s * 1e3:.1f} ms to the first, then "
        f"{out.tokens_per_s:.1f} tokens/s ({how})",
        file=sys.stderr,
    )
    return 0
