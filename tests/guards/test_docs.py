"""The map stays true: every module has its line, and every link of the documents leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shm", "workers", "engine", "cluster", "launch")


def test_the_map_names_every_module_and_nothing_else() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set()
    for folder in FOLDERS:
        section = re.search(rf"^\*\*{folder}/\*\*.*?(?=^\*\*)", text, re.MULTILINE | re.DOTALL)
        assert section, f"no section for {folder}/"
        named |= {
            f"{folder}/{name}" for name in re.findall(r"^\| (\S+\.py) \|", section.group(), re.MULTILINE)
        }

    modules = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert named == modules


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert "://" in target or (ROOT / target).exists(), f"{name}: {target}"
