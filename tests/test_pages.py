"""The pages of docs/ and the README: existing names and links, and up-to-date generated pages."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from hase.learned import target_files
from hase.recipes.figures import FIGURES, figure_pages, fill_figures, read_figures, update_figures
from hase.recipes.write_pages import COMMANDS_PAGE, all_commands, commands_page
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, SHIPPED

DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("[!.]*/README.md")])  # the README links to them
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCUMENTS, *sorted(ROOT.glob("docs/tables/*.md")),
         *sorted(ROOT.glob("recipes/*/*.md"))]
PYTHON = re.compile(r"^```python\n.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
SECTION = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
FILE = re.compile(r"(?<![\w/<>.…-])((?:\w+/)+[\w.]+\.(?:py|sh|yaml))\b")
# options that name what a command writes
WRITTEN = ("--out", "--raw", "--trace", "--markdown", "--plot", "--csv", "--html", "--output-dir", "--write")
MADE = {"resnet18.onnx", "resnet18_fp32_b16_224x224.json"}  # by the first phases, as the configs say
TARGET = "nvidia-h200-cuda-ort1.31-all"


def test_the_page_of_commands_is_up_to_date() -> None:
    assert COMMANDS_PAGE.read_text(encoding="utf-8") == commands_page(), "write it again: python recipes/write_pages.py"


def test_no_other_page_has_python() -> None:
    """The Python of these pages is run by tests/test_readme.py, test_adding_a_unit.py and test_estimators.py."""
    assert {path.name for path in PAGES if PYTHON.search(path.read_text(encoding="utf-8"))} == {
        "README.md", "predicting.md", "extending.md", "estimators.md"}


def test_the_readme_leads_to_every_page_and_names_targets_of_the_makefile() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {page.relative_to(ROOT).as_posix() for page in DOCUMENTS} <= set(LINK.findall(readme))
    targets = re.findall(r"^make (\w+)", readme, re.MULTILINE)
    assert len(targets) >= 3
    assert set(targets) <= set(re.findall(r"^(\w+): ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_pages_quote_the_figures_of_the_file() -> None:
    figures = read_figures()
    for path in figure_pages():
        text = path.read_text(encoding="utf-8")
        assert fill_figures(text, figures) == text, f"{path.name}: write the figures again: python recipes/write_pages.py"
        assert "\n<!-- fig:" not in text, f"{path.name}: Markdown does not render a line that begins with a comment"


def test_figures_are_those_of_the_shipped_predictors() -> None:
    """Errors that are saved with what was learned, and the rows of docs/sharing.md that have them."""
    sharing, energy = target_files.SHARING.needed(SHIPPED / TARGET), target_files.ENERGY.needed(SHIPPED / TARGET)
    assert sharing.probed and sharing.from_metrics and sharing.paired  # noqa: PT018
    assert energy.left_out and energy.left_out_with_latency  # noqa: PT018
    saved = {"sharing_mean": sharing.probed.mean, "sharing_p95": sharing.probed.p95,
             "sharing_metrics_mean": sharing.from_metrics.mean, "sharing_metrics_p95": sharing.from_metrics.p95,
             "energy_mape": energy.left_out_with_latency.mape, "energy_known_latency_mape": energy.left_out.mape}
    figures = read_figures()
    assert {name: figures[name].value for name in saved} == {name: f"{100 * error:.1f}" for name, error in saved.items()}
    page = re.sub("<!--.*?-->", "", (ROOT / "docs" / "sharing.md").read_text(encoding="utf-8"))
    for row, errors in (("the sharing probe (0.2 s) just before", sharing.probed),
                        ("the metrics just before, alone", sharing.from_metrics), ("in a loop", sharing.paired)):
        stated = " | ".join([str(errors.cases), *(f"{100 * error:.1f} %" for error in (errors.mean, errors.p50, errors.p95))])
        assert [line for line in page.splitlines() if row in line and stated in line], (row, stated)


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_what_a_page_names_exists(path: Path) -> None:
    """The files of its links, prose and commands (an example in Python may name a file that the reader makes), and the sections
    of its links."""
    page = path.read_text(encoding="utf-8")
    text = PYTHON.sub("", page)
    links = [path.parent / link for link in LINK.findall(text)]
    assert not [str(named) for named in (*links, *(ROOT / name for name in FILE.findall(text))) if not named.exists()]
    for linked, section in SECTION.findall(page):
        text = (path.parent / linked if linked else path).read_text(encoding="utf-8")
        headings = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        assert section in headings, f"{linked}#{section}"


def test_examples_name_existing_files() -> None:
    """In the repository, written by the phases or by an example; else a comment says what the example needs."""
    examples = [line for chosen in all_commands().values() for command in chosen for line in command.examples.splitlines()]
    words = [line.partition("  # needs ")[0].split() for line in examples]
    written = {path for line in words for word, path in itertools.pairwise(line) if word in WRITTEN}
    named = {(word, line) for line in examples if "  # needs " not in line for word in line.split()
             if re.search(r"\w\.(onnx|json|jsonl|yaml|txt|npz|pt2|csv|pkl|xz)$", word)}
    assert not sorted(line for word, line in named if not word.startswith("out/") and word not in written
                      and Path(word).name not in MADE and not any(ROOT.glob(word)))


@pytest.mark.parametrize(("group", "printed", "values"), [
    ("kinds", {"marks": {"models": 99, "marked": 3, "mape": 0.0712, "held": 0.917}}, ["99", "3", "7.1", "92"]),
    ("h100_sheet", {"summary": [{"predicted": "as on NVIDIA H200", "MAPE_%": 9.0, "median_%": 8.0},
                                {"predicted": "from the data sheet", "MAPE_%": 5.04, "median_%": 3.0}]}, ["5.0", "3.0"])])
def test_figures_are_taken_from_what_their_command_printed(group: str, printed: dict[str, Any], values: list[str]) -> None:
    """Those of the group alone change: their value, commit and date."""
    text = FIGURES.read_text(encoding="utf-8")
    lines = zip(text.splitlines(), update_figures(text, group, printed).splitlines(), strict=True)
    changed = [after for before, after in lines if before != after]
    assert [line.partition("value: ")[2].partition(",")[0] for line in changed] == values
    with pytest.raises(UserError, match=rf"{group}_\w+: the command's JSON has nothing at"):
        update_figures(text, group, {})
    with pytest.raises(UserError, match="no figure none_… says where"):
        update_figures(text, "none", printed)
