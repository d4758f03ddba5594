"""Pages in a real browser, where there is one: no complaints, all headings, something to see."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from lib.command_line import Page
from lib.debug import Decoder, Reads, inputs
from lib.manager import manager, requests
from lib.patience import PATIENCE

import cgcompile

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome"),
]
LIGHT, DARK = (), ("--blink-settings=preferredColorScheme=0",)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = cgcompile.compile(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()),
        compiler="eager",
        capture_device="host",
        dynamic_dims={"input": 0},
    )
    with torch.inference_mode():
        for size in (2, 2, 2, 5, 5):
            model(torch.randn(size, 4))
    path = tmp_path_factory.mktemp("page") / "report.html"
    cgcompile.debug.report(model, path)
    return path


def browse(page: Path, tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Open a page; what it complains about stands in the errors of the process."""
    assert BROWSER is not None
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    told = ("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}")
    command = [BROWSER, *quiet, *told, *words, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done


def test_a_page_with_a_mistake_is_noticed(tmp_path: Path) -> None:
    """Else the tests below could not fail."""
    bad = tmp_path / "bad.html"
    bad.write_text("<script>throw new Error('oh')</script>")
    with pytest.raises(AssertionError, match="oh"):
        browse(bad, tmp_path, "--dump-dom")


def test_the_browser_reads_what_was_written(page: Path, tmp_path: Path) -> None:
    shown = Page(browse(page, tmp_path, "--dump-dom").stdout)
    written = Page(page.read_text(encoding="utf-8"))
    assert shown.headings == written.headings
    assert [text for level, text in shown.headings if level == 1] == ["Sequential"]
    assert shown.numbers == written.numbers
    assert {name: len(rows) for name, rows in shown.tables.items()} == {
        name: len(rows) for name, rows in written.tables.items()
    }


# All pages at once, each in a frame of a width: a browser takes a second to start.
FRAMES = """\
<!DOCTYPE html>{frames}<script>
onload = () => {{
  const sizes = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, root = page.documentElement;
    page.querySelectorAll("details").forEach(each => {{ each.open = true; }});
    const cut = [...page.querySelectorAll(frame.dataset.boxes)].filter(
      each => each.scrollWidth > each.clientWidth);
    const rows = [...page.querySelectorAll("tbody tr")].map(each => each.offsetHeight);
    return [root.scrollWidth, cut.length, Math.max(...rows)];
  }});
  document.title = JSON.stringify(sizes);
}};
</script>"""
FRAME = """<iframe src="{page}" data-boxes="{boxes}" style="border: 0; width: {width}px; height: 900px">
</iframe>"""
BOXES = {1280: ".wide, .figures dd", 400: ".figures dd"}  # a telephone is as narrow: tables scroll
KINDS = ("report", "manager", "explain", "verify", "doctor")


def write_page(kind: str, path: Path) -> None:
    model, x = Decoder(3).eval(), inputs()
    if kind == "manager":
        served = manager(kind="compiled")
        served.capture()
        with cgcompile.debug.profile(served) as measured:
            for count in (3, 9, 30):
                served.run(requests(count - 2, 2))
        cgcompile.debug.report(served, path, profile=measured)
    elif kind == "explain":
        cgcompile.explain(model, x, dynamic_dims={"x": 0}, sizes=[8, 16]).to_html(path)
    elif kind == "verify":
        cgcompile.verify(model, x, sets=1, config={"compiler": "eager"}).to_html(path)
    elif kind == "doctor":
        cgcompile.debug.doctor(Reads(), x, torch.ones(3)).to_html(path)


@pytest.fixture(scope="module")
def sizes(page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[int]]:
    """Width of each page in each frame, how many boxes are cut, and the highest row."""
    frames = {}
    for kind in KINDS:
        path = page.parent / f"{kind}.html"
        write_page(kind, path)
        for width, boxes in BOXES.items():
            frames[kind, width] = FRAME.format(page=path.as_uri(), width=width, boxes=boxes)
    folder = tmp_path_factory.mktemp("frames")
    file = folder / "frames.html"
    file.write_text(FRAMES.format(frames="".join(frames.values())))
    done = browse(file, folder, "--allow-file-access-from-files", "--hide-scrollbars", "--dump-dom")
    title = re.search(r"<title>(.*)</title>", done.stdout)
    assert title is not None, done.stdout
    return dict(zip(frames, json.loads(title[1]), strict=True))


@pytest.mark.parametrize("width", BOXES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cut(sizes: dict[tuple[str, int], list[int]], kind: str, width: int) -> None:
    wide, cut, highest = sizes[kind, width]
    assert (wide, cut) == (width, 0)
    assert 20 < highest < 500


@pytest.mark.parametrize(("width", "scheme"), [(1200, LIGHT), (500, DARK)], ids=["wide", "narrow"])
def test_there_is_something_to_see(
    page: Path, tmp_path: Path, width: int, scheme: tuple[str, ...]
) -> None:
    image = pytest.importorskip("PIL.Image")
    shot = tmp_path / "shot.png"
    browse(
        page,
        tmp_path,
        "--hide-scrollbars",
        f"--screenshot={shot}",
        f"--window-size={width},1600",
        *scheme,
    )
    with image.open(shot) as opened:
        picture = opened.convert("RGB")
    assert picture.size == (width, 1600)
    colours = sorted(picture.getcolors(maxcolors=1 << 24), reverse=True)
    share, paper = colours[0][0] / (width * 1600), colours[0][1]
    assert 0.5 < share < 0.98  # neither blank nor covered
    assert (sum(paper) < 150) == bool(scheme)
    accent = (98, 196, 203) if scheme else (11, 107, 116)
    assert accent in {colour for _, colour in colours}  # a drawing is there
    right = picture.crop((width - 12, 0, width, 1600)).getcolors(maxcolors=1 << 24)
    assert right == [(12 * 1600, paper)]  # nothing runs out of the page
