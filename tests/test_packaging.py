"""The folder ``passes/`` ships as ``cgcompile.passes``; these are the ways in which that breaks."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (ROOT / "pyproject.toml").read_text()


def listed_packages() -> set[str]:
    line = next(line for line in SETTINGS.splitlines() if line.startswith("packages = "))
    return {name.strip(' "') for name in line.split("[")[1].rstrip("]").split(",")}


def test_every_package_is_listed() -> None:
    on_disk = {"cgcompile"}
    for parent, prefix in (
        (ROOT / "cgcompile", "cgcompile"),
        (ROOT / "passes", "cgcompile.passes"),
    ):
        for init in parent.rglob("__init__.py"):
            below = init.parent.relative_to(parent).parts
            if below[:1] != ("passes",):
                on_disk.add(".".join((prefix, *below)))
    assert on_disk == listed_packages()


def test_passes_is_never_a_top_level_module() -> None:
    import cgcompile.passes

    assert cgcompile.passes.__name__ == "cgcompile.passes"
    assert "passes" not in sys.modules


def test_the_link_is_committed_as_a_link() -> None:
    link = ROOT / "cgcompile" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as a system without links sees it: the link is a small text file."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "cgcompile", "passes"):
        source = ROOT / name
        command = ["cp", "-r", "--no-dereference", str(source), str(copy / name)]
        subprocess.run(command, check=True)
    link = copy / "cgcompile" / "passes"
    link.unlink()
    link.write_text("../passes")
    return copy


def build(tree: Path, *hook: str) -> Path:
    """Build a wheel or sdist with setuptools, as pip does but without the network."""
    out = tree / "dist"
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.{hook[0]}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


WANTED = ("cgcompile/__init__.py", "cgcompile/py.typed", "cgcompile/passes/split.py")
TEMPLATES = ROOT / "cgcompile" / "debug" / "templates"


@pytest.mark.slow
def test_wheel_holds_everything(tree: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    wheel = build(tree, "build_wheel")
    names = zipfile.ZipFile(wheel).namelist()
    assert set(WANTED) <= set(names)
    templates = {f"cgcompile/debug/templates/{each.name}" for each in TEMPLATES.iterdir()}
    assert len(templates) > 4
    assert templates <= set(names)
    assert not [name for name in names if name.startswith("passes")]
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "[torch_dynamo_backends]\ncgcompile = cgcompile.backend:backend" in text
    assert [name for name in names if name.endswith("licenses/LICENSE")]


@pytest.mark.slow
def test_sdist_holds_everything(tree: Path) -> None:
    import tarfile

    pytest.importorskip("setuptools", minversion="77")
    with tarfile.open(build(tree, "build_sdist")) as archive:
        names = archive.getnames()
    assert [name for name in names if name.endswith("/passes/split.py")]
    assert [name for name in names if name.endswith("/LICENSE")]


@pytest.mark.slow
def test_wheel_and_editable_install_import(tree: Path, tmp_path: Path) -> None:
    """Import ``cgcompile.passes`` from elsewhere, from a wheel and from an editable wheel."""
    pytest.importorskip("setuptools", minversion="77")
    outer = subprocess.run(
        [sys.executable, "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for number, hook in enumerate(("build_wheel", "build_editable")):
        environment = tmp_path / f"env{number}"
        venv.create(environment, with_pip=False)
        site = next(environment.glob("lib/python*/site-packages"))
        zipfile.ZipFile(build(tree, hook)).extractall(site)
        (site / "outer.pth").write_text(outer + "\n")  # torch, from the environment of the tests
        code = "import cgcompile.passes as p; print(p.split_graph.__module__, p.__file__)"
        done = subprocess.run(
            [str(environment / "bin" / "python"), "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("cgcompile.passes.pipeline ")
        where = done.stdout.split()[1]
        page = "from cgcompile.debug.pages import render; print(render('diagnosis', {'model': 'm', "
        page += "'device': 'cpu', 'ok': True, 'findings': []})[-7:])"
        done = subprocess.run(
            [str(environment / "bin" / "python"), "-c", page],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "</html>\n"
        expected = str(site) if hook == "build_wheel" else str(tree)
        assert where.startswith(expected), where


@pytest.mark.slow
def test_name_works_without_importing_the_package() -> None:
    code = (
        "import sys, torch\n"
        "assert 'cgcompile' not in sys.modules\n"
        "assert 'cgcompile' in torch.compiler.list_backends()\n"
        "assert 'cgcompile' not in sys.modules\n"
        "model = torch.compile(torch.nn.Linear(4, 4), backend='cgcompile',\n"
        "                      options={'compiler': 'eager'})\n"
        "with torch.no_grad():\n"
        "    print(tuple(model(torch.ones(2, 4)).shape))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert done.stdout.strip() == "(2, 4)"
