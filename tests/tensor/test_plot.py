"""Figures of what the ranks have, where matplotlib is installed; and what is said where it is not."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import trimesh
from trimesh import ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


@pytest.fixture(scope="module")
def fonts() -> None:
    """Let matplotlib open its fonts, which it keeps open, so that none is taken for one that a test has left."""
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is needed for plots only")
    figure = figures.Figure()
    figure.suptitle("text")
    figure.savefig(io.BytesIO())


@pytest.mark.usefixtures("fonts")
async def test_figures(tmp_path: Path) -> None:
    async with this_host().spawn_procs({"hosts": 2, "gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.arange(6.0).view(2, 3)
            place = 2.0 * procs.rank_tensor("hosts") + procs.rank_tensor("gpus")
        await check_images(t + place, tmp_path)
        await check_lines(t[0] + place)
        await check_one_picture_of_what_is_the_same(t, procs)
        await check_numbers_of_every_kind(t)
        await check_what_no_figure_shows(t)
    assert "matplotlib.pyplot" not in sys.modules, "nothing that could open a window"


async def check_images(differs: Any, folder: Path) -> None:
    for target in (folder / "t.png", str(folder / "u.svg")):
        figure = await trimesh.show(differs, plot=target)
    assert (folder / "t.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "u.svg").read_bytes()
    *panels, _ = figure.axes  # and the scale of the colours
    names = [f"[hosts={host},gpus={gpu}]" for host in range(2) for gpu in range(2)]
    assert [panel.get_title() for panel in panels] == names
    assert [panel.get_subplotspec().get_geometry()[:3] for panel in panels] == [(2, 2, index) for index in range(4)]
    for index, panel in enumerate(panels):
        [image] = panel.images
        assert image.get_array().tolist() == [[index, index + 1, index + 2], [index + 3, index + 4, index + 5]]
        assert image.get_clim() == (0, 8), "a colour is the same number everywhere"


async def check_lines(differs: Any) -> None:
    figure = await trimesh.show(differs, plot=True)
    [axes] = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[n, n + 1, n + 2] for n in range(4)]
    assert [text.get_text() for text in axes.get_legend().get_texts()][1] == "[hosts=0,gpus=1]"


async def check_one_picture_of_what_is_the_same(t: Any, procs: ProcMesh) -> None:
    figure = await trimesh.show(t, plot=True)
    panel, _ = figure.axes
    assert panel.images[0].get_array().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert figure.get_suptitle() == f"{t!r}, the same on every rank"
    whole = trimesh.distribute(torch.arange(8.0), procs, ["gpus"])
    figure = await trimesh.show(whole, plot=True)
    [line] = figure.axes[0].lines
    assert line.get_ydata().tolist() == list(range(8))
    assert figure.get_suptitle() == repr(whole)


async def check_numbers_of_every_kind(t: Any) -> None:
    for changed in (t > 2, t.long(), t.bfloat16(), t * float("nan"), t / 0, t[:1, :1]):
        figure = await trimesh.show(changed, plot=True)
        figure.savefig(io.BytesIO())  # a warning would be an error here
        values = (await trimesh.inspect(changed)).double().flatten().tolist()
        drawn = figure.axes[0].images[0].get_array().flatten().tolist()
        assert drawn == [value if math.isfinite(value) else None for value in values]  # None is left blank


async def check_what_no_figure_shows(t: Any) -> None:
    for refused in (t.sum(), t[:, :, None], t[:, :0]):
        with pytest.raises(ShapeError, match="one or two dimensions, with elements, got <tensor"):
            await trimesh.show(refused, plot=True)
    with pytest.raises(TypeError, match=r"plot needs real numbers.*t\.abs\(\)"):
        await trimesh.show(torch.complex(t, t), plot=True)


async def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.ones(2)
        assert await trimesh.show(t) == str(t)
        assert capsys.readouterr().out == f"{t}\n"
        with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
            await trimesh.show(t, plot=True)
