"""What the shared suites know of models."""

from __future__ import annotations

from tests.spec import Spec

SPEC = Spec(notebooks=("encoder", "decoder"))
