"""The pinned versions go together, for every way to install."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hypermlp import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, version in (line.split("==") for line in LINES)}
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}

# What torch's wheel for Linux on the public index requires (torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl, its METADATA).
# A CPU build requires less, so an environment that has one cannot tell. After a bump of torch, copy its list here.
TORCH = "2.13.0"
TORCH_REQUIRES = """
filelock
typing-extensions>=4.10.0
setuptools>=77.0.3
sympy>=1.13.3
networkx>=2.5.1
jinja2
fsspec>=0.8.5
cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.3; platform_system == "Linux"
cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"
nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"
nvidia-cusparselt-cu13==0.8.1; platform_system == "Linux"
nvidia-nccl-cu13==2.29.7; platform_system == "Linux"
nvidia-nvshmem-cu13==3.4.5; platform_system == "Linux"
triton==3.7.1; platform_system == "Linux" and python_version < "3.15"
"""

OWN = [*PROJECT["dependencies"], *(text for group in PROJECT["optional-dependencies"].values() for text in group)]
REQUIRED = [("torch", text) for text in TORCH_REQUIRES.strip().splitlines()] + [
    ("hypermlp", text) for text in OWN if not text.startswith("hypermlp[")
]


def check(requirement: Requirement) -> None:
    assert canonicalize_name(requirement.name) in PINS, f"constraints.txt does not pin {requirement.name}"
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin, prereleases=True), f"constraints.txt pins {requirement.name}=={pin}"


def test_the_list_is_that_of_the_pinned_torch() -> None:
    assert PINS["torch"] == TORCH, f"bring TORCH_REQUIRES up to date with torch {PINS['torch']}"


@pytest.mark.parametrize("who, text", REQUIRED)
def test_a_pin_satisfies_each_requirement(who: str, text: str) -> None:
    requirement = Requirement(text)
    assert requirement.marker is None or requirement.marker.evaluate(LINUX)
    check(requirement)


def test_whatever_is_installed_for_the_project_is_pinned() -> None:
    """Dependencies of dependencies too, with the extras that they ask for."""
    todo = [Requirement(text) for text in OWN if not text.startswith("hypermlp[")]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            requires, version = metadata.requires(name) or [], metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue  # of an extra or a platform that is not installed here
        check(requirement)
        if version != PINS[name]:
            continue  # .ci/versions: what another version requires says nothing about the pins
        for extra in ["", *sorted(requirement.extras)]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                found = [Requirement(text) for text in requires]
                todo += [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra})]
    assert len(seen) > 50


def test_the_pins_are_sorted_and_exact() -> None:
    names = [canonicalize_name(line.split("==")[0]) for line in LINES]
    assert names == sorted(set(names))
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", line) for line in LINES)


def test_an_archive_of_the_source_holds_all_that_the_tests_read() -> None:
    """Whatever a test opens below the top of a checkout is in the archive, so that an unpacked one passes its own tests."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    kept = [*build["sdist"]["include"], "README.md", "LICENSE", "pyproject.toml"]  # the last three in any case
    read = re.compile(r'(?:ROOT|parents\[\d\]|parent\.parent)\)? / "([^"]+)"')
    opened = {name for path in (ROOT / "tests").rglob("*.py") for name in read.findall(path.read_text())}
    opened = {name for name in opened if (ROOT / name).exists()}
    assert {"results", ".ci", ".github", "docs"} <= opened
    assert not [name for name in sorted(opened) if not any(fnmatch(name, pattern) for pattern in kept)]
    assert build["wheel"]["only-include"] == ["src/hypermlp", "src/hyperglu.py"], "with the bundled models"


def test_the_version_has_one_source() -> None:
    assert PROJECT["dynamic"] == ["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_names_the_paper() -> None:
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    readme = (ROOT / "README.md").read_text()
    assert paper["title"] in readme
    assert paper["url"] in readme
    assert PROJECT["urls"]["Paper"] == paper["url"]


def test_the_guide_names_every_extra() -> None:
    guide = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", guide, re.M)) >= set(PROJECT["optional-dependencies"])


def test_the_files_for_github_are_sound() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    found = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert found["ci.yml"]["jobs"]["checks"]["steps"][-1]["run"] == ".ci/run"
    for name in ("bug.yml", "idea.yml"):
        assert all("id" in field and "label" in field["attributes"] for field in found[name]["body"])
    hooks = [hook["entry"].split()[0] for repo in found[".pre-commit-config.yaml"]["repos"] for hook in repo["hooks"]]
    assert set(hooks) == {"ruff", "mypy", "pytest"}


def test_the_oldest_torch_is_declared_once() -> None:
    (torch,) = (Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch"))
    oldest = str(torch.specifier).removeprefix(">=")
    assert f"PyTorch {oldest}" in (ROOT / "docs" / "install.md").read_text()
    assert f"The oldest is {oldest}," in (ROOT / "CONTRIBUTING.md").read_text()
    assert tuple(map(int, metadata.version("torch").split(".")[:2])) >= tuple(map(int, oldest.split(".")))
    listed = subprocess.run([ROOT / ".ci" / "versions", "--list"], capture_output=True, text=True, check=True).stdout.split()
    assert listed[:2] == [f"{oldest}.0", PINS["torch"]]
