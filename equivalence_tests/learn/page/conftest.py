"""The page, built once for all tests, however many processes run them."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from equivalence_tests.learn.page.building import build_page
from equivalence_tests.learn.page.reading import PageReader, read_page


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    file = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "attention.html"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(build_page(), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def html(page_file: Path) -> str:
    return page_file.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def page(html: str) -> PageReader:
    return read_page(html)
