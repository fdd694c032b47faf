"""What pyproject.toml cannot say: tests stand beside what they test, and stay out of the wheel."""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithoutTests(build_py):
    """Collects the modules of a package, but not its tests."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Leave out ``test_*.py``, and what only those use."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        used_by_tests = ("conftest", "helpers_for_tests")
        return [entry for entry in found if entry[1] not in used_by_tests and not entry[1].startswith("test_")]


setup(cmdclass={"build_py": WithoutTests})
