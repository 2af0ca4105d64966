"""The documentation: what its build rests on. `make docs` builds it."""

from __future__ import annotations

import inspect
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

import cukern
from docs import __main__ as build
from docs import examples, family_pages, links, pages
from docs.docstrings import entries, inline, signature, to_rst, undocumented, undocumented_methods
from tests.specs import ALL, FUNCTIONS, calls_of


def test_every_public_argument_is_documented() -> None:
    assert build.problems_of_docstrings() == []


def test_an_argument_that_is_not_documented_is_found() -> None:
    def some(x: int, y: int, z: int = 0) -> None:
        """Does something with `z`.

        Args:
            x: a number.
        """

    assert undocumented(some) == ["y"]
    some.__doc__ = "As `cukern.silu_and_mul`, which has `x`; y and z are not said."
    assert undocumented(some) == ["y", "z"]


def test_arguments_of_methods_that_are_not_documented_are_found() -> None:
    class Base:
        """Of a `size`."""

        def one(self, size: int, x: int) -> None:
            """Takes one, of which the sentence speaks."""

        def two(self, x: int, y: int, size: int) -> None:
            """Says nothing."""

    class Derived(Base):
        def two(self, x: int, y: int, size: int) -> None:
            """Takes `x`."""

    Base.__module__ = Derived.__module__ = "cukern.test"
    for cls in (Base, Derived):
        for method in (cls.one, cls.two):
            method.__module__ = "cukern.test"
    assert undocumented_methods(Base) == {".two": ["x", "y"]}
    assert undocumented_methods(Derived) == {}
    vars(Derived)["two"].__doc__ = "Says nothing."
    assert undocumented_methods(Derived) == {".two": ["x", "y"]}


def test_a_docstring_becomes_markup() -> None:
    lines = ["With `x` * 2 and `cukern.softmax`:", "", "    a = b * c", "", "Args:", "    a, b: two."]
    lines += ["        And a_ more.", "    c_d, e,", "        f: others.", "", "Raises what |it| does."]
    text = "\n".join(to_rst(lines))
    assert "With ``x`` \\* 2 and :py:func:`~cukern.softmax`:" in text
    assert "::\n\n    a = b * c" in text
    assert "    ``a``, ``b``\n        two.\n        And a\\_ more." in text
    assert "Raises what \\|it\\| does." in text
    assert entries(["c_d, e,", "    f: others."]) == [(["c_d", "e", "f"], ["others."])]
    assert inline("arXiv:2412.19437") == "`arXiv:2412.19437 <https://arxiv.org/abs/2412.19437>`__"


def test_a_signature_is_as_it_is_written() -> None:
    arguments, returned = signature(cukern.silu_and_mul)
    assert arguments == "(x: AnyArray, *, out: AnyArray | None = None)" and returned == "AnyArray"


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a><a href="#top">t</a><a href="https://x.y/z">o</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><img src="c.png">')
    found = links.problems(tmp_path)
    assert len(found) == 3
    assert all(any(word in line for line in found) for word in ("b.html#here", "#top", "c.png"))
    (tmp_path / "c.png").touch()
    (tmp_path / "b.html").write_text('<p id="here"></p><img src="c.png">')
    (tmp_path / "a.html").write_text('<a id="top" href="b.html#here">b</a><a href="#top">t</a>')
    assert links.problems(tmp_path) == []


def test_a_test_that_is_named_and_not_there_is_found(tmp_path: Path) -> None:
    own = inspect.currentframe()
    assert own is not None
    (tmp_path / "a.md").write_text(f"`tests/test_docs.py::{own.f_code.co_name}` `tests/test_docs.py::test_none`")
    assert build.problems_of_tests(tmp_path) == ["a.md names tests/test_docs.py::test_none, which is not there"]


PAGES = {path.relative_to(build.ROOT).as_posix(): path for path in examples.pages()}


def _written(page: Path) -> str:
    """Return a page as `make pages` writes it, by a process of its own, since an example may specialize a kernel."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(examples.with_outputs, page.read_text(encoding="utf-8")).result()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if examples.has_any(path.read_text())])
def test_the_examples_of_a_page_run_and_print_its_outputs(page: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    text = PAGES[page].read_text(encoding="utf-8")
    assert _written(PAGES[page]) == text, "`make pages` writes the outputs of today"
    assert page not in ("README.md", "docs/tour.md") or not examples.without_output(text)


def test_an_output_that_is_not_printed_is_found() -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```python\nx = 2\n```\n"
    assert examples.with_outputs(page) == page.replace("3", "2")
    assert examples.without_output(page) == ["x = 2\n"]
    command = "```console\n$ cukern --version\nanother\n```\n"
    assert examples.with_outputs(command) == command.replace("another", f"cukern {cukern.__version__}")


def test_the_readme_is_one_screen_of_reading() -> None:
    assert len(PAGES["README.md"].read_text(encoding="utf-8").split()) <= 1200


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_links_of_a_page_lead_to_files(page: str) -> None:
    """Pages are read as files, too: a link leads to a file of the repository and to a heading in it."""
    path = build.ROOT / page
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{page} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", x).lower().replace(" ", "-") for x in headings], target


@pytest.mark.parametrize("stem", pages.FAMILIES)
def test_a_page_ends_with_signatures_speed_and_notebook(stem: str) -> None:
    text = (pages.DOCS / "families" / f"{stem}.md").read_text(encoding="utf-8")
    assert family_pages.with_sections(text, stem) == text, f"`make pages` writes the end of docs/families/{stem}.md"


def test_the_tools_list_the_sizes_of_each_family() -> None:
    text = (pages.DOCS / "tools.md").read_text(encoding="utf-8")
    assert pages.with_sizes(text) == text, "`make pages` writes the table of docs/tools.md"
    assert "`experts, groups=1, scoring_func='sigmoid', biased=True`" in text and "`head_dim, block_size`" in text


def test_each_family_has_a_page() -> None:
    assert {path.stem for path in (pages.DOCS / "families").glob("*.md")} == set(pages.FAMILIES)
    assert {name for name in cukern.__all__ if pages.family_of(name)} >= {*cukern.__all__} - {*pages.TOOLS}


def test_every_function_is_on_the_page_of_batch_invariance() -> None:
    text = (pages.DOCS / "batch_invariance.md").read_text(encoding="utf-8")
    assert pages.with_bits(text) == text, "`make pages` writes the tables of docs/batch_invariance.md"
    functions = {name for name in cukern.__all__ if inspect.isfunction(getattr(cukern, name))}
    assert functions - {*pages.TOOLS} - {*re.findall(r"`(\w+)`", text)} == set()


def test_rows_that_stand_for_themselves_are_those_that_are_tested() -> None:
    tables = {name: own.bits.table for name, own in FUNCTIONS.items() if own.bits}
    tested = {ALL[key].name for key in calls_of("rows")}
    assert tested >= {name for name, table in tables.items() if table == "row"}
    assert {tables[name] for name in tested} == {"row", "batch"}
