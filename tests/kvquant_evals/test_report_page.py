"""`kvquant report`: what its plots show, what its page holds, and that a browser shows it without a network."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from evaluation import evaluate
from matplotlib.image import imread
from matplotlib.text import Text

from kvquant import QuantCache
from kvquant.cli import main
from kvquant_evals import table
from kvquant_evals.report import label, verb
from kvquant_evals.report.ink import DARK, LIGHT, dress, new_figure, png
from kvquant_evals.report.meaning import meaning
from kvquant_evals.report.plot import chosen
from kvquant_evals.report.plots import attention, growth, quality, retrieval, tail
from kvquant_evals.report.plots.catalog import PLOTS
from kvquant_evals.report.rank import best_cells, classes, order_of
from kvquant_evals.report.saved import load
from kvquant_evals.settings import Settings
from kvquant_evals.task import discover
from kvquant_evals.tasks import needles, perplexity

pytestmark = pytest.mark.broad

HOSTILE = '<script src="https://example.org/x.js">alert("1")</script> & <b>bold</b>'


def column(title, score, spec=".4f", **flags):
    return {"title": title, "score": score, "spec": spec, "full": True, "is_relative": False, "is_cost": False, **flags}


COLUMNS = [
    column("perplexity", "perplexity"),
    column("change", "perplexity", "+.2%", full=False, is_relative=True),
    column("KL mean", "kl_mean", ".5f", full=False),
    column("top-1", "top1", ".1%", full=False),
    column("needles @512", "retrieval_512", ".2f"),
    column("bytes/token", "bytes_per_token", ",.0f", is_cost=True),
    column("bits", "effective_bits", ".2f", is_cost=True),
]


def answer(context, depth, score):
    return {"kind": "multi_key", "context": context, "depth": depth, "score": score, "correct": score == 1}


def items(size):
    """Of all tasks that plots are made of. size: what the values grow with."""
    documents = [
        (context, [answer(context, (i + 0.5) / 6, float(i % 3 > 0)) for i in range(6)]) for context in (512, 1024)
    ]
    return {
        "needles": [{"kind": "multi_key", "context": c, "index": 0, "answers": answers} for c, answers in documents],
        "memory": [{"context": c, "bytes": 1000 * size * c} for c in (512, 1024)],
        "speed": [
            {"context": c, "batch": 1, "decode_tokens_per_second": 50 / size + 100 / c, "is_noisy": c == 1024}
            for c in (512, 1024)
        ],
        "attention": [{"layers": [{"layer": i, "output": [0.01 * size, 0.03 * size]} for i in range(3)]}],
    }  # fmt: skip


def row(name, kl, bits, is_peer=False, **more):
    scores = {"perplexity": 10 * (1 + kl), "kl_mean": kl, "kl_mean_low": 0.9 * kl, "kl_mean_high": 1.2 * kl}
    scores |= {"kl_median": kl / 2, "kl_p99": 9 * kl, "kl_p999": 40 * kl, "top1": 1 - kl, "scored_tokens": 100}
    scores |= {"retrieval_512": 0.5, "questions": 12, "bytes_per_token": 1440 * bits, "effective_bits": bits}
    plain = {"label": name, "quant": None, "scores": scores, "items": items(bits), "failures": {}, "faults": {}}
    return plain | {"is_peer": is_peer} | more


def made():
    """A report with rows of every kind."""
    rows = [
        row("full precision", 0.0, 32.0),
        row("8 bit", 1e-5, 8.5),
        row("4 bit", 2e-3, 4.6),
        row("2 bit", 6e-2, 2.8),
        row("peer 4", 1e-2, 4.5, is_peer=True),
        row(HOSTILE, 4e-3, 4.9, is_peer=True, failures={"speed": f"RuntimeError: {HOSTILE}"}),
        row("broken", 1.5, 4.1, faults={"perplexity": "mean KL 1.50 nats"}),
    ]
    versions = {"kvquant": "0.1", "transformers": "5.4", "torch": "2.6", "python": "3.11"}
    settings = {"tokens": 200, "segments": 1, "chunk": 32, "seed": 0, "contexts": [512, 1024], "skip": 100}
    return {
        "model": "a <model>", "settings": settings, "versions": versions, "machine": {"processor": "x", "threads": 1},
        "tasks": ["perplexity", "needles"], "columns": COLUMNS, "is_complete": True, "rows": rows,
    }  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """Reads a report through a file, as a user would."""

    def read(plain=None):
        path = tmp_path / "given.json"
        path.write_text(json.dumps(plain or made()))
        return load("report", str(path))

    return read


class Page(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.styles = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.lasttag == "style":
            self.styles += data
        self.text += data

    def images(self):
        """Light and dark files of each plot, as bytes."""
        found = [
            attributes.get("srcset") or attributes.get("src")
            for tag, attributes in self.tags
            if tag in ("source", "img")
        ]
        return [base64.b64decode(uri.removeprefix("data:image/png;base64,")) for uri in found]


def colors(pixels):
    """The different colors of an array [..., channel] of values from 0 to 1, each as the number after CSS's `#`."""
    return set(np.unique(numbers(pixels)).tolist())


def numbers(pixels):
    whole = (255 * pixels[..., :3]).round().astype(int)
    return whole @ np.array([2**16, 2**8, 1])


def rgb(color):
    return int(color.removeprefix("#"), 16)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a report on the made evaluation."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "report.json").write_text(json.dumps(made()))
    assert main(["report", str(folder)]) == 0
    return folder


class TestWhatPlotsShow:
    def test_cells_are_means_over_answers_at_a_depth_and_context(self, saved):
        plain = made()
        answers = [answer(512, 0.0, 1.0), answer(512, 0.19, 0.5), answer(512, 0.2, 0.25), answer(512, 1.0, 1.0)]
        answers += [answer(1024, 0.5, 0.0), answer(1024, None, 1.0), {"context": 1024, "depth": 0.5, "correct": True}]
        plain["rows"][1]["items"]["needles"] = [{"answers": answers[:3]}, {"answers": answers[3:]}]
        found = retrieval.grid(saved(plain).rows[1])
        assert found.contexts == [512, 1024]
        assert found.cells == [[0.75, None], [0.25, None], [None, 0.5], [None, None], [1.0, None]]
        assert found.mean == (0.75 + 0.25 + 0.5 + 1.0) / 4

    def test_answers_without_a_depth_make_no_map(self, saved):
        plain = made()
        plain["rows"][1]["items"]["needles"] = [{"answers": [answer(512, None, 1.0)]}]
        assert retrieval.grid(saved(plain).rows[1]) is None

    def test_points_have_their_intervals_and_those_without_divergence_are_no_points(self, saved):
        plain = made()
        plain["rows"].append(row("16 bit", 0.0, 32.0))
        del plain["rows"][4]["scores"]["kl_mean_low"]
        found = {point.label: point for point in quality.points(saved(plain))}
        assert list(found) == ["8 bit", "4 bit", "2 bit", "peer 4", HOSTILE, "broken"]
        four = found["4 bit"]
        assert (four.bits, four.kl, four.low, four.high, four.is_peer) == (4.6, 2e-3, 0.9 * 2e-3, 1.2 * 2e-3, False)
        assert (found["peer 4"].low, found["peer 4"].high, found["peer 4"].is_peer) == (1e-2, 1e-2, True)

    def test_the_line_leaves_out_what_another_beats_in_both_ways(self):
        points = [quality.Point(str(i), bits, kl, kl, kl, False) for i, (bits, kl) in enumerate(
            [(8, 0.1), (4, 0.3), (5, 0.4), (4, 0.2), (9, 0.1)])]  # fmt: skip
        assert [(point.bits, point.kl) for point in quality.frontier(points)] == [(4, 0.2), (8, 0.1)]

    def test_tails_are_in_the_order_of_the_mean_and_without_zeros(self, saved):
        plain = made()
        plain["rows"][1]["scores"]["kl_median"] = 0.0
        found = tail.tails(saved(plain))
        assert [entry.mean for entry in found] == [1e-5, 2e-3, 4e-3, 1e-2, 6e-2, 1.5]
        assert found[0].quantiles == {"kl_mean": 1e-5, "kl_p99": 9 * 1e-5, "kl_p999": 40 * 1e-5}

    def test_curves_average_what_was_measured_again_and_keep_batches_apart(self, saved):
        plain = made()
        plain["rows"][1]["items"]["speed"] = [
            {"context": 512, "batch": 1, "decode_tokens_per_second": 10.0},
            {"context": 512, "batch": 1, "decode_tokens_per_second": 20.0},
            {"context": 256, "batch": 1, "decode_tokens_per_second": 40.0, "is_noisy": True},
            {"context": 512, "batch": 4, "decode_tokens_per_second": 33.0},
            {"context": 512, "batch": 4, "decode_tokens_per_second": None},
        ]
        report = saved(plain)
        assert growth.batches(report, growth.SPEED) == [1, 4]
        curve = growth.curves(report, growth.SPEED, 1)[1]
        assert (curve.row.label, curve.values, curve.noisy) == ("8 bit", {256: 40.0, 512: 15.0}, {256})
        assert [curve.values for curve in growth.curves(report, growth.SPEED, 4)] == [{512: 33.0}]
        assert growth.curves(report, growth.MEMORY)[0].values == {512: 16.384, 1024: 32.768}  # 32 kB a token, in MB

    def test_errors_of_heads_are_means_over_items_with_gaps_for_heads_that_are_not_there(self, saved):
        plain = made()
        plain["rows"][1]["items"]["attention"] = [
            {"layers": [{"layer": 1, "output": [0.5]}, {"layer": 0, "output": [0.1, 0.3]}]},
            {"layers": [{"layer": 0, "output": [0.3, 0.5]}]},
        ]
        found = attention.head_errors(saved(plain).rows[1])
        assert found.layers == [0, 1]
        assert found.errors[0] == pytest.approx([0.2, 0.4])
        assert found.errors[1][0] == 0.5
        assert found.errors[1][1] != found.errors[1][1]  # NaN

    def test_peers_make_room_first(self, saved):
        plain = made()
        plain["rows"] += [row(f"peer {i}", 0.1, 4.0, is_peer=True) for i in range(20)] + [row("3 bit", 0.1, 3.9)]
        labels = [found.label for found in chosen(saved(plain).rows, 7)]
        assert labels == ["full precision", "8 bit", "4 bit", "2 bit", "peer 4", "broken", "3 bit"]


class TestLabels:
    def test_labels_of_crowded_points_cover_neither_each_other_nor_points(self):
        figure = new_figure(8.4, 5.4, LIGHT)
        axes = figure.subplots()
        dress(axes, LIGHT)
        axes.set(yscale="log", xlim=(2, 12), ylim=(1e-5, 1))
        spots = [(4.51 + 0.02 * (i % 3), 0.0097 * 1.03**i) for i in range(9)] + [(8, 1e-3), (8.1, 1.1e-3)]
        label.place(figure, axes, [label.Label(x, y, f"a cache of somebody {x}", LIGHT.peer) for x, y in spots])
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines to their points
        assert len(boxes) == len(spots)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        points = axes.transData.transform(spots)
        assert not any(box.contains(*point) for box in boxes for point in points)
        assert all(axes.bbox.contains(*corner) for box in boxes for corner in box.corners())

    def test_ends_of_lines_are_moved_apart_in_their_order(self):
        assert label.spread([0.5, 0.1, 0.52, 0.9], 0.1, 0.0, 1.0) == pytest.approx([0.46, 0.1, 0.56, 0.9])
        placed = label.spread([0.99, 0.98, 0.97], 0.1, 0.0, 1.0)
        assert placed == pytest.approx([1.0, 0.9, 0.8])
        crowded = label.spread([0.5] * 21, 0.1, 0.0, 1.0)
        assert crowded == pytest.approx([i / 20 for i in range(21)])


class TestRanking:
    def test_caches_are_held_against_those_of_their_size(self, saved):
        plain = made()
        plain["rows"] += [row("three", 1e-3, 3.0), row("nine", 1e-6, 9.01)]
        del plain["rows"][4]["scores"]["effective_bits"]
        found = {group.title: [entry.label for entry in group.rows] for group in classes(saved(plain))}
        assert found == {
            "up to 3 bits per number": ["2 bit", "three"],
            "up to 5 bits per number": ["4 bit", HOSTILE, "broken"],
            "up to 9 bits per number": ["8 bit"],
            "more than 9 bits per number": ["nine"],
            "bits unknown": ["peer 4"],
        }

    def test_the_best_of_a_class_is_marked_unless_broken_or_all_are_alike(self, saved):
        best = best_cells(saved())
        # perplexity, change, KL and top-1 of 4 bit; "broken" is smallest, but only of the others is one the best.
        assert best == {("4 bit", 1), ("4 bit", 2), ("4 bit", 3), ("4 bit", 4), ("peer 4", 6), ("peer 4", 7)}

    def test_a_perplexity_below_that_of_full_precision_is_no_merit(self, saved):
        plain = made()
        plain["rows"][5]["scores"]["perplexity"] = 9.9
        assert {name for name, number in best_cells(saved(plain)) if number in (1, 2)} == {"4 bit"}

    def test_what_looks_the_same_is_as_good(self, saved):
        plain = made()
        plain["rows"][5]["scores"]["kl_mean"] = plain["rows"][2]["scores"]["kl_mean"] + 1e-9
        assert {name for name, number in best_cells(saved(plain)) if number == 3} == {"4 bit", HOSTILE}

    def test_leaders_are_sound(self, saved):
        plain = made()
        plain["rows"][2] |= {"quant": {"sinks": 4}}
        plain["rows"][2]["is_untested"] = True
        plain["rows"][3]["scores"]["kl_mean"] = float("nan")
        leaders = [group.leader() for group in classes(saved(plain))]
        assert [leader and leader.label for leader in leaders] == [None, HOSTILE, "8 bit"]

    def test_every_column_of_every_task_is_explained_and_ranked(self):
        settings = Settings(budget=10**9, retrieval=("all",))
        scores = [column.score for task in discover() for column in task.columns(settings)]
        assert [score for score in scores if meaning(score) is None] == []
        assert [score for score in scores if order_of(score) is None] == []

    def test_the_longest_name_decides(self):
        found = [
            order_of(name) for name in ("speed_ratio_512_1", "speed_step_512_1", "memory_mb_512", "memory_longest")
        ]
        assert found == ["more is better", "less is better", "less is better", "more is better"]
        assert order_of("klout") is None


class TestPage:
    def test_nothing_lies_elsewhere_and_nothing_runs(self, written):
        page = Page((written / "report.html").read_text())
        names = {tag for tag, _ in page.tags}
        assert not names & {"script", "link", "iframe", "object", "embed", "base", "b>bold"}
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on") or name in ("href", "action", "style")], (
                tag
            )
            for name in ("src", "srcset"):
                assert attributes.get(name, "data:image/png;base64,").startswith("data:image/png;base64,")
        assert "url(" not in page.styles
        assert "@import" not in page.styles
        assert ("meta", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in [
            (tag, attributes.get("content")) for tag, attributes in page.tags
        ]

    def test_labels_and_reasons_are_text(self, written):
        page = Page((written / "report.html").read_text())
        assert HOSTILE in page.text
        assert f"{HOSTILE} has no speed: RuntimeError: {HOSTILE}" in page.text
        assert "broken is broken, says perplexity: mean KL 1.50 nats" in page.text
        assert "KV caches of a <model>" in page.text

    def test_plots_are_files_of_many_colors_on_light_and_dark_paper(self, written):
        names = [plot.name for plot in PLOTS]
        assert sorted(path.stem for path in written.glob("*.png")) == sorted(names)
        images = Page((written / "report.html").read_text()).images()
        assert len(images) == 2 * len(names)
        for name, dark, light in zip(names, images[::2], images[1::2], strict=True):
            assert (written / f"{name}.png").read_bytes() == light
            for image, ink in ((light, LIGHT), (dark, DARK)):
                found = colors(imread(io.BytesIO(image)))
                assert rgb(ink.paper) in found
                assert len(found) > 50  # lines and letters have blended edges

    def test_the_same_report_gives_the_same_files(self, written):
        again = png(quality.PLOT.draw(load("report", str(written)), LIGHT))
        assert again == (written / "quality.png").read_bytes()

    def test_best_cells_are_marked(self, written):
        page = Page((written / "report.html").read_text())
        assert sum(attributes.get("class") == "best" for tag, attributes in page.tags if tag == "td") == 6

    def test_what_a_report_does_not_hold_is_left_out_and_named(self, tmp_path, capsys):
        plain = made()
        for entry in plain["rows"]:
            entry["items"] = {}
        (tmp_path / "report.json").write_text(json.dumps(plain))
        assert main(["report", str(tmp_path)]) == 0
        assert sorted(path.name for path in tmp_path.glob("*.png")) == ["quality.png", "tail.png"]
        text = Page((tmp_path / "report.html").read_text()).text
        reason = "Memory against context: the report lacks the items of memory"
        assert reason in text
        assert f"kvquant report: left out {reason}\n" in capsys.readouterr().err

    def test_a_single_context_gets_bars(self, saved):
        plain = made()
        for entry in plain["rows"]:
            entry["items"]["memory"] = entry["items"]["memory"][:1]
        figure = growth.MEMORY_PLOT.draw(saved(plain), LIGHT)
        assert len(figure.axes[0].patches) == len(plain["rows"])
        assert [patch.get_width() for patch in figure.axes[0].patches][:2] == pytest.approx([16.384, 4.352])

    def test_an_unfinished_report_says_so(self, tmp_path, capsys):
        plain = made() | {"is_complete": False}
        for entry in plain["rows"]:
            entry["items"] = {}
        (tmp_path / "report.json").write_text(json.dumps(plain))
        assert main(["report", str(tmp_path)]) == 0
        assert "The evaluation is not finished" in Page((tmp_path / "report.html").read_text()).text


class TestVerb:
    def test_a_real_evaluation(self, tiny, tmp_path, capsys):
        settings = Settings(tokens=200, chunk=32, skip=40, offset=100, needles=2, contexts=(160, 224), documents=2)
        pages = {"sinks": 2, "residual_length": 5, "page_size": 8}
        caches = {f"{bits} bit": partial(QuantCache, bits=bits, **pages) for bits in (8, 4, 2)}
        plain = evaluate(tiny, [perplexity.TASK, needles.TASK], settings, caches).to_dict()
        (tmp_path / "report.json").write_text(json.dumps(plain))
        assert main(["report", str(tmp_path), "--out", str(tmp_path / "new" / "folder")]) == 0
        plain = json.loads(json.dumps(plain))
        assert capsys.readouterr().out == f"{table.markdown(plain)}\n\n{table.caption(plain)}\n"
        page = Page((tmp_path / "new" / "folder" / "report.html").read_text())
        for line in table.cells(plain):
            assert all(cell in page.text for cell in line)
        assert (tmp_path / "new" / "folder" / "quality.png").exists()

    def test_a_folder_tells_also_on_what_it_ran(self, written, tmp_path):
        shutil.copy(written / "report.json", tmp_path / "report.json")
        (tmp_path / "run.json").write_text(json.dumps({"dtype": "torch.bfloat16", "device": "cuda", "settings": {}}))
        assert load("report", str(tmp_path)).run == {"dtype": "torch.bfloat16", "device": "cuda"}
        assert load("report", str(written)).run == {}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "No such file or directory"),
            ("{", "cannot be read: Expecting property name"),
            ("[1]", "is no report of kvquant eval: it holds no object"),
            ('{"model": "x"}', "is no report of this version of kvquant eval: it has no settings"),
            (json.dumps(made() | {"rows": []}), "has no rows: nothing was finished for all caches yet"),
            (json.dumps(made() | {"settings": {"tokens": 1}}), "it has no settings.segments"),
            (json.dumps(made() | {"rows": [{"label": "x"}]}), "it has no rows.scores"),
        ],
    )
    def test_what_is_no_report_is_one_line(self, tmp_path, capsys, content, message):
        path = tmp_path / "given.json"
        if content is not None:
            path.write_text(content)
        assert main(["report", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"kvquant report: report '{path}' ")
        assert message in err
        assert err.count("\n") == 1

    def test_a_folder_that_cannot_be_made_is_one_line(self, written, capsys):
        assert main(["report", str(written), "--out", "/dev/null/x"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("kvquant report: out '/dev/null/x' cannot be made: ")
        assert err.count("\n") == 1

    def test_a_file_that_cannot_be_written_is_one_line(self, tmp_path, capsys):
        plain = made()
        for entry in plain["rows"]:
            entry["items"] = {}
        (tmp_path / "report.json").write_text(json.dumps(plain))
        (tmp_path / "report.html").mkdir()
        assert main(["report", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith(f"kvquant report: out '{tmp_path}' cannot be written: ")

    def test_without_matplotlib_it_says_what_to_install(self, written, capsys, monkeypatch):
        monkeypatch.setattr(verb, "find_spec", lambda name: None)
        assert main(["report", str(written)]) == 2
        assert capsys.readouterr().err == "kvquant report: plots need matplotlib: pip install 'kvquant-cache[eval]'\n"

    def test_importing_the_verbs_loads_nothing_heavy(self):
        code = (
            "import sys, kvquant_evals.report.verb, kvquant_evals.compare.verb; "
            "print({'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout == "set()\n"


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")


def find_browser():
    """A Chromium of the system or of playwright; None if there is none."""
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    own = sorted(
        str(path) for path in cache.glob("chromium*/chrome-linux*/*") if path.name in (*BROWSERS, "headless_shell")
    )
    return next((found for name in BROWSERS if (found := shutil.which(name))), own[-1] if own else None)


def screenshot(browser, page, folder, scheme="light"):
    """What a browser shows of a file, as an array [height, width, channel]; no network can be reached."""
    path = folder / f"{page.stem}-{scheme}.shot.png"
    subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            f"--user-data-dir={folder / 'profile'}", "--proxy-server=127.0.0.1:9",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1100,6400", "--force-device-scale-factor=1",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", f"--screenshot={path}",
            page.resolve().as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return imread(path)[..., :3]


def plain_png(width, height, color):
    """A picture of one color."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = (b"\0" + bytes(color) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def browser():
    found = find_browser()
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return found


@pytest.fixture(scope="module")
def places(written, browser, tmp_path_factory):
    """Where on the page each plot is, as masks: the page with plots of one color each tells it."""
    text = (written / "report.html").read_text()
    images = Page(text).images()
    markers = [(255, 20 + 30 * i, 250) for i in range(len(images) // 2)]
    for color, pair in zip(markers, zip(images[::2], images[1::2], strict=True), strict=True):
        for image in pair:
            height, width = imread(io.BytesIO(image)).shape[:2]
            blank = base64.b64encode(plain_png(width, height, color)).decode()
            text = text.replace(base64.b64encode(image).decode(), blank)
    folder = tmp_path_factory.mktemp("marked")
    (folder / "marked.html").write_text(text)
    shown = numbers(screenshot(browser, folder / "marked.html", folder))
    return [shown == int("{:02x}{:02x}{:02x}".format(*color), 16) for color in markers]


@pytest.mark.parametrize(("scheme", "ink"), [("light", LIGHT), ("dark", DARK)])
def test_a_browser_without_a_network_shows_every_plot(written, browser, places, tmp_path, scheme, ink):
    shown = screenshot(browser, written / "report.html", tmp_path, scheme)
    assert colors(shown[:5]) == {rgb(ink.paper)}
    assert len(places) == len(PLOTS)
    for place in places:
        assert place.sum() > 100_000  # a plot is some 1,000 pixels wide
        is_drawn = numbers(shown[place]) != rgb(ink.paper)
        assert 0.01 < is_drawn.mean() < 1
        assert len(colors(shown[place])) > 50
