"""What the cases of the peers' test files came to: a line of JSON for each case, and tables of them by file."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

#: What a case may come to. "differs": it fails, where cukern has another result on purpose; "refused": cukern says that
#: it does not have what is asked for; "skipped": by the file itself, or because it needs what only the peer has.
OUTCOMES = ("passed", "failed", "differs", "refused", "skipped")
#: Of a case that a process has begun and not ended.
BEGUN = "begun"
#: Of no case: how many cases a file has (the reason), or those of them that match a pattern (the name).
COUNTED = "counted"
#: Of no case: how many of those are to be run, and that they are one in so many of each test (the reason, two numbers).
SAMPLED = "sampled"


class Difference(NamedTuple):
    """Why a test that asks for another result fails, and by how much at most: one of the two bounds holds."""

    reason: str
    relative: float = math.inf
    absolute: float = math.inf
    cases: str = ""  # a pattern of the cases that it is about

    def is_in(self, name: str, message: str) -> bool:
        """Whether a message of `torch.testing.assert_close` about a case is of this difference."""
        found = {kind: float(number) for kind, number in _GREATEST.findall(message)}
        is_other = message.startswith("AssertionError: Tensor-likes are not") and len(found) == 2
        if not is_other or not re.search(self.cases, name):
            return False
        return found["relative"] <= self.relative or found["absolute"] <= self.absolute


_GREATEST = re.compile(r"Greatest (absolute|relative) difference: (nan|inf|[0-9.e+-]+)")
#: Tests that ask for results which are others on purpose (see docs/differences.md); more in `tests.peers.again`.
DIFFERENT = {
    "test_grouped_topk_single_group_nonfinite_scores": Difference("infinite and NaN logits of a gate"),
    "test_moe_permute_unpermute": Difference("rows of pairs without an expert here", cases=r"[\[-](4|16)-dtype"),
    # A step of the 16-bit formats.
    "test_act_and_mul": Difference("rounded once, and not before the product too", 2**-7, 2**-4),
}
#: Tests of what is in the peer alone, or in programs of their own in which there are no adapters, and what those need.
PROGRAMS = {
    "test_w8a8_block_fp8_clamp_skips_fused_silu_quant": "counts calls inside vllm's layer",
    "test_host_resident_weights_take_sorted_path": "counts calls inside vllm's layer",
    "test_norm_compilation_without_fp8": "compiles flashinfer's own sources",
    "test_nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_cuda_graph_bad_scale": "needs flashinfer in a program",
}
_MOST_REASONS = 12


class Case(NamedTuple):
    """A case of a test file, which is named from the folder of its peer on."""

    file: str
    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0


def append(path: Path | None, case: Case) -> None:
    """Add a case at once, so that it counts even if the process ends in the next one."""
    if path is not None:
        with path.open("a") as lines:
            lines.write(json.dumps(case) + "\n")


def read(path: Path) -> Iterator[Case]:
    """The cases of a file, without those that were only begun."""
    return (case for case in lines(path) if case.outcome in OUTCOMES)


def counted(paths: Mapping[str, Iterable[Path]]) -> dict[tuple[str, str], int]:
    """How many cases there are, by file, which is named from its folder on, and pattern."""
    return {
        (f"{folder}/{case.file}", case.name): int(case.reason)
        for folder, of_folder in paths.items()
        for path in of_folder
        for case in lines(path)
        if case.outcome == COUNTED
    }


class Sample(NamedTuple):
    """Cases that are to be run: how many, and that they are one in so many of each test."""

    size: int
    every: int


def sampled(paths: Mapping[str, Iterable[Path]]) -> dict[tuple[str, str], Sample]:
    """What was to be run in the last run, by file, which is named from its folder on, and pattern."""
    return {
        (f"{folder}/{case.file}", case.name): Sample(*map(int, case.reason.split()))
        for folder, of_folder in paths.items()
        for path in of_folder
        for case in lines(path)
        if case.outcome == SAMPLED
    }


def unended(path: Path) -> Case | None:
    """The case that the writer of a file was in, if it did not come to its end."""
    last = None
    for case in lines(path):
        last = case if case.outcome == BEGUN else None
    return last


def lines(path: Path) -> Iterator[Case]:
    """All that was written about cases, in its order."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield Case(*json.loads(line))
            except ValueError:
                continue  # cut off, where the writer was killed


def _count(cases: Iterable[Case]) -> str:
    counts = Counter(case.outcome for case in cases)
    return "  ".join(f"{counts[outcome]:7}" for outcome in OUTCOMES)


def _reasons(cases: Iterable[Case], outcome: str) -> Iterator[str]:
    """The reasons of an outcome, the most frequent first."""
    counts = Counter((case.file, case.reason) for case in cases if case.outcome == outcome)
    for (file, reason), count in counts.most_common():
        yield f"  {count:5}  {file}: {reason}"


def table(
    cases: Iterable[Case], left: Mapping[str, int | None] | None = None, totals: Mapping[str, int | None] | None = None
) -> str:
    """The counts of each file, the reasons of what was refused or skipped, and the failures.

    `left` is by file how many cases were not run in time, and `totals` how many there are, None where nobody has
    counted them.
    """
    cases, left, totals = list(cases), left or {}, totals or {}
    by_file: dict[str, list[Case]] = defaultdict(list, {name: [] for name in left})
    for case in cases:
        by_file[case.file].append(case)
    width = max((len(name) for name in by_file), default=0)
    lines = [f"{'':{width}}  {'  '.join(f'{outcome:>7}' for outcome in (*OUTCOMES, 'left', 'of', 'seconds'))}"]
    for name, of_file in sorted(by_file.items()):
        rest = left.get(name, 0)
        words = "all" if rest is None else str(rest)
        total, seconds = totals.get(name), sum(case.seconds for case in of_file)
        lines.append(f"{name:{width}}  {_count(of_file)}  {words:>7}  {total or '?':>7}  {seconds:7.1f}")
    sums = [sum(x or 0 for x in of_all.values()) for of_all in (left, totals)]
    lines.append(f"{'all':{width}}  {_count(cases)}  {sums[0]:7}  {sums[1] or '?':>7}")
    for outcome in ("differs", "refused", "skipped"):
        reasons = list(_reasons(cases, outcome))
        lines += ["", outcome, *reasons] if reasons else []
    for name, of_file in sorted(by_file.items()):
        failed = [case for case in of_file if case.outcome == "failed"]
        if failed:
            lines += ["", f"failed in {name}"]
            lines += [f"  {count:5}  {reason}" for reason, count in _first_words(failed)]
            lines += [f"         {case.name}: {case.reason}" for case in failed[:_MOST_REASONS]]
    return "\n".join(lines)


class Whole(NamedTuple):
    """What there is of a file beside what its cases came to; None where nobody has counted."""

    total: int | None = None  # cases
    left: int | None = None  # of those to be run, what was not run in time
    every: int | None = None  # one case of each test in so many was to be run


def markdown(cases: Iterable[Case], wholes: Mapping[str, Whole], folders: Iterable[str]) -> str:
    """A table in Markdown of the counts of the files of folders with these names."""
    by_file = defaultdict(Counter[str], {name: Counter[str]() for name in wholes})
    for case in cases:
        by_file[case.file][case.outcome] += 1
    lines = [
        "| file | passed | failed | differs | refused | skipped | left | of | one in |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name, counts in sorted(by_file.items()):
        if name.partition("/")[0] in folders:
            whole = wholes.get(name, Whole())
            numbers = [counts[outcome] if counts else None for outcome in OUTCOMES]
            numbers += [whole.left if counts else None, whole.total or None, whole.every]
            lines.append(f"| `{name}` | {' | '.join('' if x is None else str(x) for x in numbers)} |")
    return "\n".join(lines)


_MARKS = re.compile(r"(<!-- counts of ([^>]*) -->\n).*?(\n<!-- end of counts -->)", re.DOTALL)


def fill(page: Path, cases: Iterable[Case], wholes: Mapping[str, Whole]) -> None:
    """Write the tables of a page of Markdown, between the marks that name their folders."""
    text, cases = page.read_text(), list(cases)

    def filled(marks: re.Match[str]) -> str:
        return f"{marks[1]}\n{markdown(cases, wholes, marks[2].split())}\n{marks[3]}"

    page.write_text(_MARKS.sub(filled, text))


def _first_words(failed: list[Case]) -> list[tuple[str, int]]:
    """Failures by test and kind of error."""
    counts = Counter(f"{case.name.partition('[')[0][:80]}: {case.reason[:60]}" for case in failed)
    return counts.most_common(_MOST_REASONS)
