"""What `enable` replaces in small models of transformers, as `transformers_reports.json` records it.

    python -m tests.transformers_reports

adds the reports that differ from the record, of the installed version. A report holds from the version that it was
recorded with, up to the next one of the same model.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import cukern.integrations.transformers as ck
from cukern.integrations.transformers._versions import numbers
from tests import tiny_models

PATH = Path(__file__).with_suffix(".json")
#: Models without experts.
DENSE = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
VERSION = ".".join(map(str, numbers(transformers.__version__)))
#: Lines by model, and by the version from which they hold.
RECORD: dict[str, dict[str, list[str]]] = json.loads(PATH.read_text()) if PATH.exists() else {}


def models() -> list[str]:
    """The names of all models that the installed version has."""
    return sorted((*DENSE, *(f"{folder}.{name}" for folder, name in tiny_models.experts_classes())))


def _made(model: str) -> Any:
    folder, _, experts = model.partition(".")
    if experts:
        return tiny_models.tiny(folder, experts)
    config_class = type(AutoConfig.for_model(folder))
    return AutoModelForCausalLM.from_config(config_class(**tiny_models.small(config_class, folder))).eval()


def report(model: str) -> list[str]:
    """What `enable` says it has replaced in a small model in bfloat16."""
    made = ck.enable(_made(model).to(torch.bfloat16))
    return sorted(f"{x.part}: {x.count} x {x.what}: {x.how}" for x in made.replaced)


def recorded(model: str) -> list[str]:
    """The lines of a model that hold for the installed version; none where it has no record."""
    known = [x for x in RECORD.get(model, {}) if numbers(x) <= numbers(VERSION)]
    return RECORD[model][max(known, key=numbers)] if known else []


def main() -> None:
    from tests.test_integrations_transformers import LEFT_OUT

    warnings.simplefilter("ignore")
    for model in models():
        if tuple(model.split(".")) in LEFT_OUT:
            continue
        found = report(model)
        if found != recorded(model):
            RECORD.setdefault(model, {})[VERSION] = found
            print(f"{model} from {VERSION}")
    PATH.write_text(json.dumps(RECORD, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
