"""Laws of the HTML report: its numbers are those of the result, it is one safe file, and a browser draws it."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from browsing import browse
from summaries import PIXEL, sample, speed_rows, summary

from basisprune.errors import MissingExtraError
from basisprune.report.figures import PALETTE
from basisprune.report.html import SweepPage, comparison, render_report, write_report, write_sweep_page
from basisprune.results import FrontPoint, RunSummary

VOID = {"meta", "br", "img", "link", "input", "hr", "path", "circle"}
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """The page as a browser sees it: the texts of its scripts and cells, and whether its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.tables: dict[str | None, list[list[list[float]]]] = {}
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = self.tables.setdefault(attributes.get("id"), [])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append([])
        if tag == "data" and "td" in self.open:
            self.rows[-1][-1].append(json.loads(attributes["value"] or ""))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self.tags[-1][1].get("id")] = data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.tags}


def test_the_page_is_balanced_html_and_holds_the_result_as_json():
    result = summary()
    text = render_report(result)
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert page.open == []
    assert json.loads(page.scripts["result"]) == result.as_dict()
    assert RunSummary.from_json(page.scripts["result"]) == result


def test_nothing_is_loaded_from_elsewhere():
    for tag, attributes in Page(render_report(summary())).tags:
        assert tag not in ("link", "iframe", "object")
        assert attributes.get("src") is None
        assert (attributes.get("href") or "#").startswith(("#", "./"))


def test_files_are_links_to_what_lies_beside_the_page():
    files = {"model.onnx": {"bytes": 1, "what": "ONNX"}, "javascript:alert(1)": {"bytes": 1, "what": "a trick"}}
    links = [attributes["href"] for tag, attributes in Page(render_report(summary(files=files))).tags if tag == "a"]
    assert {"./model.onnx", "./javascript%3Aalert%281%29"} <= set(links)


def test_the_tables_have_the_numbers_of_the_result():
    result = sample()
    tables = Page(render_report(summary())).tables
    shown = ("basis_ratio", "filter_ratio", "accuracy", "drop", "parameters", "macs", "latency_ms")
    rows = [[cell[0] for cell in row if cell] for row in tables["candidates"][1:]]
    assert rows == [[each[key] for key in shown] for each in result["candidates"]]
    channels = [row[3] for row in tables["layer-table"][1:]]
    assert channels == [[each["channels"], each["full_channels"]] for each in result["layers"]]
    ranks = [row[4] for row in tables["layer-table"][1:]]
    assert ranks == [[each["rank"], each["full_rank"]] if each["rank"] else [] for each in result["layers"]]
    before, after = result["test"]["before"], result["test"]["after"]
    assert [[cell[0] for cell in row if cell] for row in tables[None][1:6]] == [
        [before["accuracy"], after["accuracy"]],
        [result["reference"]["accuracy"], result["candidates"][3]["accuracy"]],
        [20.0, 8.0],
        [before["parameters"], after["parameters"]],
        [before["macs"], after["macs"]],
    ]


def test_the_deployed_form_comes_before_pytorch_and_only_it_is_a_headline():
    rows = speed_rows()
    for row in rows[4:]:
        row["seconds"] /= 4
    latency = sample()["latency"] | {"rows": rows, "threads": 2}
    found = summary(latency=latency)
    times = {row.label: (row.before, row.after) for row in comparison(found) if row.key == "latency_ms"}
    assert list(times.items()) == [("one image, ONNX Runtime, 2 threads", (5.0, 2.0))]
    page = Page(render_report(found))
    top = page.text[: page.text.index("Before and after")]
    assert "one image, ONNX Runtime" in top
    assert "PyTorch" not in top
    assert [row[0:2] for row in page.tables["speeds"][1:]]
    without = comparison(summary(latency=None, test=None))
    assert [row.label for row in without if row.key == "latency_ms"] == ["latency"]


def test_every_runtime_has_a_row():
    table = Page(render_report(summary())).tables["runtime-table"]
    assert [row[2] for row in table[1:]] == [[8_050_000], [8_050_000]]
    assert [row[3] for row in table[1:]] == [[2e-6], []]
    assert [row[5] for row in table[1:]] == [[3.2], [8.1]]


def test_numbers_are_written_for_people():
    text = Page(render_report(summary())).text
    for written in ("97.1%", "2,010,345", "402,000,001", "\u22120.4 points", "\u221282.0%", "2.01 M"):
        assert written in text
    assert "Limit: lose at most 1 point of accuracy" in text


def test_the_figures_have_the_numbers_of_the_result():
    result = sample()
    figures = json.loads(Page(render_report(summary())).scripts["figures"])
    points = {
        (x, y) for trace in figures["search-parameters"]["data"] for x, y in zip(trace["x"], trace["y"], strict=True)
    }
    models = [result["reference"], *result["candidates"]]
    assert points == {(model["parameters"], model["accuracy"]) for model in models}
    kept = figures["kept"]["data"][0]["y"]
    assert kept == [each["rank"] / each["full_rank"] for each in result["layers"] if each["rank"]]
    taylor, scales = figures["importance-0"]["data"]
    assert (taylor["y"], scales["y"]) == ([0.5, 0.125, 1.0], [1.0, 0.4, 0.9])
    assert [trace["name"] for trace in figures["training-loss"]["data"]] == ["training", "validation"]


def test_the_tables_of_speeds_and_files_have_the_numbers_of_the_result():
    tables = Page(render_report(summary())).tables
    rows = [[cell[0] for cell in row if cell] for row in tables["speeds"][1:]]
    assert rows == [pytest.approx(row) for row in [[20, 8, 2.5], [10, 5, 2.0]] * 2]
    files = [[number for cell in row for number in cell] for row in tables["files"][1:]]
    assert files == [[8_049_000], [8_061_234], [0.969, 2_100_007]]


def test_the_matrices_of_very_many_classes_are_left_out_with_a_sentence():
    names = [f"class {number}" for number in range(101)]
    result = summary(classes=names, confusion={side: [[1] * 101] * 101 for side in ("before", "after")})
    page = Page(render_report(result))
    assert "101 classes are too large for this page" in page.text
    assert json.loads(page.scripts["result"]) == replace(result, confusion=None).as_dict()


OPTIONAL = {
    "importance": {},
    "test": None,
    "confusion": None,
    "changed": [],
    "latency": None,
    "files": {},
    "latency_by": "",
    "headline": "",
    "runtimes": [],
}
PLACES = {"files": "use", "latency": "speed"}


@pytest.mark.parametrize("part", OPTIONAL)
def test_a_part_that_is_not_there_is_left_out(part):
    page = Page(render_report(summary(**{part: OPTIONAL[part]})))
    assert page.open == []
    assert PLACES.get(part, part) not in page.ids()
    assert ("test accuracy" in page.text) == (part != "test")


@pytest.mark.parametrize("place", ["importance", "confusion", "changed", "use", "speed", "runtimes"])
def test_a_part_that_is_there_has_its_place(place):
    assert place in Page(render_report(summary())).ids()


def test_the_headline_is_what_is_read_first():
    assert "only half is left" in Page(render_report(summary(headline="only half is left"))).text


def test_without_latency_there_is_no_latency():
    result = sample()
    for model in (result["reference"], *result["candidates"]):
        model["latency_ms"] = None
    page = Page(render_report(summary(**result | {"latency": None, "runtimes": []})))
    assert "search-latency_ms" not in page.ids()
    assert "atency" not in page.text


def test_a_result_of_nothing_but_the_reference_is_a_page_too():
    page = Page(render_report(summary(candidates=[], layers=[], **OPTIONAL)))
    assert page.open == []
    assert "No candidate was tried." in page.text
    assert json.loads(page.scripts["figures"]) == {}


def test_a_search_that_chose_nothing_shows_what_it_tried():
    result = sample()
    for each in result["candidates"]:
        each.update(chosen=False, passed=False)
    page = Page(render_report(summary(candidates=result["candidates"], test=None)))
    assert "training-accuracy" in page.ids()
    assert "training-loss" not in page.ids()


@pytest.mark.parametrize(
    ("config", "order"),
    [
        ({}, "largest first"),
        ({"optimize": "params"}, "largest first"),
        ({"optimize": "macs"}, "most multiply-adds first"),
        ({"optimize": "latency"}, "slowest first"),
    ],
)
def test_the_order_of_the_tests_is_by_what_the_result_is_to_have_least_of(config, order):
    test = {
        "index": 1,
        "name": "half",
        "before": 0.9,
        "after": 0.9,
        "bound": 0.01,
        "p_value": 0.01,
        "lost": 5,
        "won": 3,
    }
    given = {"status": "certified", "confidence": 0.95, "metric": "accuracy", "images": 800, "computed_by": "PyTorch"}
    certificate = {**given, "tests": [{**test, "passed": True}]}
    whole = {**summary().config, **config}
    assert order in " ".join(Page(render_report(summary(certificate=certificate, config=whole))).text.split())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "measured for one image in a laptop"),
        ({"device": "d.json"}, "on a laptop, summed from its file of times"),
    ],
)
def test_the_runtime_of_latencies_is_named_once(config, said):
    given = {"latency_by": "a laptop", "config": {**summary().config, **config}}
    known = summary(**given, latency=None, test=None)
    for result in (known, summary(**given)) if config else (known,):
        assert " ".join(Page(render_report(result)).text.split()).count(said) == 1


def test_latencies_of_another_runtime_are_left_out():
    other = summary(latency_by="PyTorch")
    page = Page(render_report(other))
    assert "search-latency_ms" not in page.ids()
    assert json.loads(page.scripts["result"]) == other.as_dict()
    assert "search-latency_ms" in Page(render_report(summary())).ids()
    limited = summary(latency_by="PyTorch", budget={"kind": "target_latency", "value": 9.0})
    assert "search-latency_ms" in Page(render_report(limited)).ids()


@pytest.mark.parametrize(
    ("passed", "budget", "said"),
    [
        (True, "max_drop", "The delivered model is worse than the unpruned one on 9 images, and better on 7. With 95%"),
        (True, "max_drop", "95% confidence, its true loss is at most 0.9 points of accuracy: within the budget."),
        (False, "max_drop", "The first model is worse than the unpruned one on 9 images"),
        (False, "max_drop", "its true loss is at most 0.9 points of accuracy: not within the budget."),
        (True, "min_accuracy", "its true accuracy is at least 0.9%: within the budget."),
    ],
)
def test_the_certificate_is_a_sentence_first(passed, budget, said):
    test = {"index": 3, "name": "half", "before": 0.97, "after": 0.968, "bound": 0.009, "p_value": 0.02}
    tests = [test | {"lost": 9, "won": 7, "passed": passed}]
    given = {"confidence": 0.95, "metric": "accuracy", "images": 4000, "computed_by": "PyTorch", "tests": tests}
    found = summary(certificate={**given, "status": "certified"}, budget={"kind": budget, "value": 0.01})
    assert said in " ".join(Page(render_report(found)).text.split())


def test_the_certificate_and_its_tests_are_on_the_page():
    test = {"index": 3, "name": "half", "before": 0.97, "after": 0.968, "bound": 0.009, "p_value": 0.02}
    tests = [test | {"lost": 9, "won": 7, "passed": True}]
    given = {"confidence": 0.95, "metric": "balanced", "images": 4000, "computed_by": "ONNX Runtime"}
    page = Page(render_report(summary(certificate={**given, "status": "certified", "tests": tests})))
    assert {"certified", "certificate", "tests"} <= set(page.ids())
    assert "95% confidence on 4,000 images" in page.text
    assert "lose at most 1 point of balanced accuracy" in page.text
    page = Page(render_report(summary(certificate={**given, "status": "estimated", "reason": "so few images"})))
    assert "Estimated, not certified: so few images." in page.text
    assert "certificate" not in page.ids()


def test_the_page_of_another_task_has_nothing_that_is_for_classifiers_only():
    test = {"index": 3, "name": "half", "before": 0.93, "after": 0.92, "bound": 0.02, "p_value": 0.02, "passed": True}
    given = {"confidence": 0.95, "metric": "mean IoU", "images": 100, "computed_by": "ONNX Runtime"}

    def shown(lost: int, **parts: object) -> str:
        certificate = {**given, "status": "certified", "tests": [test | {"lost": lost, "won": 0}]}
        return Page(render_report(summary(certificate=certificate, **parts))).text

    own = {"task": "segmentation", "classes": [], "confusion": None}
    assert "basisprune predict" in shown(0)
    assert "basisprune predict" not in shown(0, **own)
    assert "95% confidence on 100 examples" in shown(0, **own)
    assert "only before right" in shown(0)
    assert "worse" not in shown(0, **own)  # of a metric of all examples, none is worse by itself
    assert "worse" in shown(3, **own)


def test_what_each_class_lost_is_on_the_page():
    row = {"name": "rare", "images": 9, "before": 0.9, "after": 0.1, "loss_interval": [0.4, 0.9], "beyond": True}
    page = Page(render_report(summary(class_losses={"part": "test", "rival": 0.95, "classes": [row]})))
    assert "Some classes exceed the overall budget: rare." in page.text
    assert "class-losses" in page.ids()


def test_what_users_name_is_never_markup():
    result = sample()
    result.update(classes=[EVIL, "&", '"', "'"], title=EVIL, verdict=EVIL, command=EVIL, config={EVIL: EVIL})
    result["changed"][0].update(label=EVIL, before=EVIL, after='" onerror="alert(1)')
    result["candidates"][0]["name"] = result["layers"][0]["name"] = EVIL
    result["importance"] = {EVIL: result["importance"]["layer1.0.conv1"]}
    text = render_report(summary(**result))
    page = Page(text)
    assert EVIL not in text
    assert EVIL in page.text
    assert json.loads(page.scripts["result"]) == summary(**result).as_dict()
    assert [tag for tag, _ in page.tags].count("script") == 5
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_numbers_that_are_not_finite_are_null():
    result = summary()
    first, *others = result.candidates
    start, *later = first.history
    first = replace(first, history=(replace(start, train_loss=math.nan), *later))
    result = replace(result, candidates=(first, *others))
    raw = json.loads(Page(render_report(result)).scripts["result"], parse_constant=pytest.fail)
    assert raw["candidates"][0]["history"][0]["train_loss"] is None


def test_a_large_matrix_is_cut_to_the_classes_most_often_confused():
    count = 50
    matrix = [[10 * (i == j) for j in range(count)] for i in range(count)]
    matrix[30][40] = 5
    names = [f"class {index}" for index in range(count)]
    text = Page(render_report(summary(classes=names, confusion={"before": matrix, "after": matrix}))).text
    assert "Showing the 20 most often confused of 50 classes." in text
    assert "class 30" in text
    assert "class 40" in text
    assert "class 39" not in text


def test_a_large_result_stays_under_five_megabytes(tmp_path):
    path = write_report(summary(**sample(candidates=200, layers=160)), tmp_path / "deep" / "report.html")
    assert path.stat().st_size < 5_000_000
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"basisprune\[report\]"):
        render_report(summary())


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("max_drop", 0.02, "at most 2 points"),
        ("min_accuracy", 0.95, "at least 95.0%"),
        ("target_params", 2e6, "at most 2.00 M parameters"),
        ("target_macs", 1e9, "at most 1.00 G multiply-adds"),
        ("target_latency", 0.8, "a latency of at most 0.800 ms"),
        ("fixed", None, "The ratios were fixed."),
    ],
)
def test_every_budget_is_said(kind, value, said):
    assert said in Page(render_report(summary(budget={"kind": kind, "value": value}))).text


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_every_plot_without_a_complaint(theme, tmp_path):
    result = sample()
    result["candidates"][0]["name"] = result["layers"][0]["name"] = EVIL
    path = write_report(summary(**result), tmp_path / "report.html")
    scheme = f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}"
    dom, log = browse(path, tmp_path / "profile", scheme)
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
    page = Page(dom)
    plots = [attributes["id"] for _, attributes in page.tags if "js-plotly-plot" in (attributes.get("class") or "")]
    figures = json.loads(page.scripts["figures"])
    assert plots == list(figures)
    assert len(re.findall(r'<svg class="main-svg"', dom)) >= len(plots)
    marks = {"light": PALETTE["accent"][0], "dark": PALETTE["accent"][1]}
    rgb = {name: "rgb({}, {}, {})".format(*bytes.fromhex(colour[1:])) for name, colour in marks.items()}
    assert (rgb[theme] in dom, rgb["dark" if theme == "light" else "light"] in dom) == (True, False)
    assert json.loads(page.scripts["result"]) == summary(**result).as_dict()
    assert page.tables["candidates"] == Page(path.read_text()).tables["candidates"]
    assert [attributes["src"] for tag, attributes in page.tags if tag == "img"] == [PIXEL]


def test_the_page_of_a_sweep_holds_all_and_names_do_no_harm(tmp_path):
    rows = (("<script>alert(1)</script>", "done"),)
    points = (FrontPoint("<b>", "50% of the filters", 0.9, (0.0, 1.0), 100, 1000, 2.0, front=True, chosen=True),)
    points += (FrontPoint("a", "50% of the filters", 0.7, (0.0, 1.0), 120, 1000, 3.0),)
    content = {"cells": [1, "</script>"]}
    page = SweepPage("sweep", "1 of 1 cells are done.", ("model", "outcome"), rows, {"cifar10": points}, content)
    text = write_sweep_page(page, tmp_path / "sweep.html").read_text()
    assert "<script>alert" not in text
    assert "front-0-parameters" in text
    assert "front-0-latency_ms" in text
    found = re.search(r'id="result">(.*?)</script>', text, re.DOTALL)
    assert json.loads(found[1]) == {"cells": [1, "</script>"]}


FRAME = """<!doctype html><body><iframe id="f" src="report.html" style="width:%dpx;height:9000px"></iframe>
<pre id="o"></pre><script>onload = () => setTimeout(() => {
  const page = f.contentDocument, wide = [];
  for (const each of page.querySelectorAll("details")) each.open = true;
  for (const each of page.querySelectorAll(".table")) {
    if (each.scrollWidth > each.clientWidth) wide.push(each.querySelector("table").id || each.textContent);
  }
  o.textContent = JSON.stringify([page.querySelectorAll(".table").length, wide, page.documentElement.scrollWidth]);
}, 2000);</script>"""


@pytest.mark.parametrize("width", [390, 1280])
def test_tables_fit_a_phone_and_a_laptop(width, tmp_path):
    result = sample()
    for number, each in enumerate(result["candidates"]):
        each["name"] = f"without {12 * number}% of the basis, {11 * number}% of the filters, polished"
    test = {"index": 3, "name": result["candidates"][3]["name"], "before": 0.97, "after": 0.968, "bound": 0.009}
    test |= {"p_value": 0.02, "lost": 9, "won": 7, "passed": True}
    given = {"status": "certified", "confidence": 0.95, "metric": "accuracy", "images": 4000, "tests": [test]}
    row = {"name": "rare", "images": 9, "before": 0.9, "after": 0.8, "loss_interval": [-0.1, 0.3]}
    losses = {"part": "test", "rival": 0.25, "classes": [row]}
    write_report(summary(**result | {"certificate": given, "class_losses": losses}), tmp_path / "report.html")
    (tmp_path / "frame.html").write_text(FRAME % width)
    dom, _ = browse(
        tmp_path / "frame.html", tmp_path / "profile", "--allow-file-access-from-files", "--hide-scrollbars"
    )
    count, wide, whole = json.loads(re.search(r'<pre id="o">(.*?)</pre>', dom)[1])
    assert count >= 9
    assert wide == []
    assert whole <= width
