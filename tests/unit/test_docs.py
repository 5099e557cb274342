"""What README.md and docs/ say, held against the code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import QueueSection, example, load
from router import core, outbound
from router.front import Status
from shard import machine, process, ready, turns

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for package in ("common", "router", "shard") for path in sorted((ROOT / package).glob("*.py"))]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def table_rows(text: str) -> list[list[str]]:
    """The cells of all tables, without their heads."""
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    heads = [index - 1 for index, row in enumerate(rows) if set(row[0]) == {"-"}]
    return [row for index, row in enumerate(rows) if index not in heads and index - 1 not in heads]


def documented_keys() -> list[list[str]]:
    """Section, key, default, allowed, live and description of each key in docs/configuration.md."""
    keys = []
    for section in re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## )", page("docs/configuration.md"), re.MULTILINE | re.DOTALL):
        keys += [[section[0], *row] for row in table_rows(section[1])]
    return keys


def keys_of_the_example() -> Iterator[list[str]]:
    """The same, from the example file, which is made from the model."""
    section, comments = "", [""]
    for line in example().splitlines():
        if line.startswith("# Declared queues"):
            return
        if head := re.fullmatch(r"\[(\w+)\]", line):
            section = head[1]
        elif line.startswith(("# Example: ", "#")) and not re.match(r"# (?!Example: )", line):
            name, value = line.removeprefix("# Example: ").removeprefix("#").split(" = ", 1)
            default = "unset" if line.startswith("# Example: ") else f"`{value}`"
            about, allowed = (comment.removeprefix("# ") for comment in comments[-2:])
            live = "yes" if about.endswith(" (live)") else ""
            allowed = allowed.removeprefix("Allowed: ").removesuffix(".")
            yield [section, f"`{name}`", default, allowed, live, about.removesuffix(" (live)")]
        comments.append(line)


def texts_of_the_code() -> list[str]:
    """Every text constant, those between the braces of f-strings among them."""
    return [
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_the_table_of_keys_is_that_of_the_model() -> None:
    assert documented_keys() == list(keys_of_the_example())


def test_the_table_of_queue_keys_is_that_of_the_model() -> None:
    rows = table_rows(page("docs/configuration.md").split("## [[queues]]")[1])
    assert {row[0].strip("`") for row in rows} == set(QueueSection.model_fields)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_toml_block_loads_without_a_warning(path: Path, tmp_path: Path) -> None:
    for block in blocks(path.read_text(), "toml"):
        file = tmp_path / "sepp.toml"
        file.write_text(block)
        assert load(file, {}).warnings == []
        assert tomllib.loads(block)


def test_the_readme_shows_a_configuration_and_a_client() -> None:
    readme = page("README.md")
    assert (len(blocks(readme, "toml")), len(blocks(readme, "python"))) == (1, 1)


def test_the_scripts_of_the_quick_start_can_be_run() -> None:
    scripts = set(re.findall(r"\./(scripts/\w+\.sh)", page("README.md")))
    assert scripts == {"scripts/run.sh", "scripts/test.sh"}
    assert all((ROOT / script).stat().st_mode & 0o111 for script in scripts)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_of_the_project_that_is_named_exists(path: Path) -> None:
    named = re.findall(r"`((?:[\w.-]+/)*\w+\.(?:py|sh|proto|md))`", path.read_text())
    bare = {source.name for source in SOURCES}
    assert [name for name in named if not (ROOT / name).exists() and name not in bare] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_method_that_is_named_exists(path: Path) -> None:
    classes = {
        node.name: {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    named = re.findall(r"`([A-Z][A-Za-z]+)\.([a-z_]+)`", path.read_text())
    assert [f"{owner}.{method}" for owner, method in named if method not in classes.get(owner, set())] == []


def test_every_error_line_is_one_that_the_code_can_write() -> None:
    section = page("docs/operations.md").split("## When it does not start")[1].split("\n## ")[0]
    lines = [row[0].strip("`") for row in table_rows(section)]
    texts = texts_of_the_code()
    unknown = [line for line in lines for part in line.split("…") if part and not any(part in text for text in texts)]
    assert len(lines) >= 20
    assert unknown == []


def test_every_status_that_the_server_answers_with_is_explained() -> None:
    explained = " ".join(row[0] for row in table_rows(page("docs/protocol.md").split("## Statuses")[1]))
    assert {status.name for status in Status} - set(re.findall(r"`(\w+)`", explained)) == {"OK"}


@pytest.mark.parametrize(
    "text, value",
    [
        ("blocks of 65 536", machine.SEQUENCE_BLOCK),
        ("64 MiB for all lanes", ready.ALL_WINDOWS_BYTES >> 20),
        ("then 4 KiB each", ready.SMALL_WINDOW_BYTES >> 10),
        ("256 MiB of jobs", outbound.WAITING_BYTES_MAX >> 20),
        ("at most 2 048 jobs", outbound.ENVELOPE_JOBS),
        ("about 8 MiB", outbound.ENVELOPE_BYTES >> 20),
        ("4 096 operations in a turn", process.TURN_OPERATIONS),
        ("ends after 2 048 changes", turns.TURN_CHANGES),
        ("256 timers of a kind", machine.TICK_LIMIT),
        ("deadline less 50 ms", core.DEADLINE_MARGIN_MS),
        ("or 30 s; then", core.HOLD_MS // 1000),
    ],
)
def test_a_limit_in_the_architecture_is_the_real_one(text: str, value: int) -> None:
    assert text in " ".join(page("docs/architecture.md").split())
    found = re.search(r"\d+(?: \d{3})*", text)
    assert found is not None and int(found[0].replace(" ", "")) == value
