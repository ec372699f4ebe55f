"""Any task from end to end, on networks so small that nothing takes long."""

from __future__ import annotations

import re
import sys
import textwrap

import onnxruntime
import pytest
import torch
from commands import invoke
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training
from torch import Tensor, nn

from basisprune.data import Loaders, load_data
from basisprune.deploy.bundle import load_bundle
from basisprune.errors import CheckpointError, ConfigError, DataError, ModelError
from basisprune.method.pipeline import Pipeline
from basisprune.report.text import framework_table
from basisprune.results import RunSummary
from basisprune.runs.compress import compress
from basisprune.runs.exporter import Exporter
from basisprune.runs.finished import load_any, refuse_other_tasks
from basisprune.search import SearchConfig
from basisprune.tasks import Task, multilabel, regression, segmentation

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A network of the user's own, which says its scores in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(self.second(self.first(images)))}


def masks(seed: int, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(16, 1, 8, 8, generator=generator) for _ in range(count)]
    return [(each, (each[:, 0] > 0.3).long()) for each in images]


def loaders(**others) -> Loaders:
    return Loaders(train=masks(0), val=masks(1), test=masks(2), **others)


def settings(**changes):
    training = tiny_training(epochs=2, train="all", weight_lr=1.0)
    search = SearchConfig(framework="loss+basis", polish=False, tolerance=0.6)
    return {"recipe": tiny_recipe(training), "search": search, "onnx": False, **changes}


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("segmented") / "out"
    options = settings(max_drop=0.1, task=segmentation(), onnx=True)
    yield compress(Net(), loaders(confirm=masks(3, 6)), output=folder, **options), folder
    torch.set_num_threads(before)


def test_a_segmenter_becomes_smaller_and_its_budget_is_tested_in_mean_iou(segmented):
    result, _ = segmented
    summary = result.summary
    assert (summary.task, summary.metric, summary.classes) == ("segmentation", "mean IoU", ())
    assert summary.certificate.metric == "mean IoU"
    assert summary.certificate.images == 96
    assert "mean IoU" in summary.verdict
    assert "accuracy" not in summary.verdict + summary.headline
    assert summary.chosen.parameters < summary.reference.parameters
    assert summary.confusion is summary.class_losses is None
    assert RunSummary.from_json(summary.to_json()) == summary
    assert isinstance(result.model(torch.zeros(1, 1, 8, 8))["out"], Tensor)


def test_the_page_shows_masks_and_names_the_metric(segmented):
    result, folder = segmented
    page = (folder / "report.html").read_text()
    assert len(result.summary.masks) == 8
    assert "Masks before and after" in page
    assert result.summary.masks[0].after in page
    assert "test mean IoU" in page
    words = re.sub(r"<[^>]+>", " ", page.split("<script")[0].partition("<body")[2])
    assert "accuracy" not in words


def test_the_bundle_and_the_onnx_file_output_what_the_network_does(segmented):
    result, folder = segmented
    images = masks(5, 1)[0][0]
    with torch.no_grad():
        wanted = result.model(images)["out"]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert torch.allclose(torch.from_numpy(session.run(["out"], {"images": images.numpy()})[0]), wanted, atol=1e-4)
    bundle = load_bundle(folder / "model")  # without the class, which nobody else has
    assert bundle.classes is None
    assert bundle.metrics["task"] == "segmentation"
    assert torch.equal(bundle.model(images)["out"], wanted)
    loaded = load_any(folder)
    assert loaded.classes == ()
    with pytest.raises(ModelError, match="predict: this network is no classifier"):
        refuse_other_tasks(loaded, "predict")
    assert "image-segmentation" in (folder / "model" / "README.md").read_text()


def test_a_second_start_gives_the_same_result_and_other_examples_are_refused(segmented):
    result, folder = segmented
    options = settings(max_drop=0.1, task=segmentation(), onnx=True)
    torch.manual_seed(0)
    again = compress(Net(), loaders(confirm=masks(3, 6)), output=folder, **options)
    assert again.history == result.history
    assert again.summary.certificate == result.summary.certificate
    with pytest.raises(CheckpointError, match="images"):
        compress(Net(), loaders(confirm=masks(4, 6)), output=folder, **options)


def test_without_confirming_examples_the_result_is_estimated():
    torch.manual_seed(0)
    found = compress(Net(), loaders(), max_drop=0.3, task="segmentation", metric="dice", **settings()).summary
    assert found.metric == "mean Dice"
    assert found.certificate.status == "estimated"
    assert found.certificate.reason == "no images were set aside to confirm it"


def test_a_regression_has_its_budget_in_its_own_units_and_its_errors_on_the_page(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 8, 1))
    given = [[(x := torch.randn(16, 1, 8), 100 * x.mean(2)) for _ in range(2)] for _ in range(3)]
    parts = dict(zip(("train", "val", "test"), given, strict=True))
    found = compress(
        model, Loaders(**parts), max_drop=500.0, task=regression("mae"), output=tmp_path / "out", **settings()
    ).summary
    assert found.budget.value == 500.0
    assert not found.metric_is_share
    assert len(found.errors.before) == len(found.errors.after) == 32
    assert found.test.before.accuracy < 0  # a negative error
    assert "Errors before and after" in (tmp_path / "out" / "report.html").read_text()
    assert "%" not in found.verdict.split("went from")[1].split(". ")[0]


def test_a_classifier_of_ones_own_keeps_its_head_on_loaders_of_ones_own():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 2),
    )
    given = [[(x, (y.float().mean((1, 2)) > 0.4).long()) for x, y in masks(seed)] for seed in range(3)]
    parts = Loaders(train=given[0], val=given[1], test=given[2], classes=("few", "many"))
    result = compress(model, parts, max_drop=0.3, **settings())
    assert result.summary.classes == ("few", "many")
    assert result.summary.task == "classification"
    assert result.summary.confusion is not None
    assert result.model(torch.zeros(1, 1, 8, 8)).shape == (1, 2)


def test_wrong_tasks_and_metrics_are_refused_before_anything_is_trained():
    for options, said in (
        ({"task": "segmentaton"}, "Did you mean 'segmentation'"),
        ({"task": "segmentation", "metric": "f1"}, "allowed for segmentation are iou, dice"),
        ({"task": multilabel(), "metric": "f1"}, "the task multilabel has its own, mean AP; omit it"),
        ({"task": "segmentation", "max_drop": 1.5}, "max_drop: 1.5 given; it is a fraction"),
        ({"task": 3}, "task: 3 given; a name or a Task is needed"),
    ):
        with pytest.raises(ConfigError, match=said):
            compress(Net(), loaders(), **options)
    with pytest.raises(DataError, match="val is missing"):
        compress(Net(), Loaders(train=masks(0)), task="segmentation")
    with pytest.raises(ConfigError, match="'resnet18' given with loaders of your own"):
        compress("resnet18", loaders(), task="segmentation")


def test_a_metric_that_is_no_number_ends_the_run_with_its_name():
    known = segmentation()
    odd = Task("odd", known.loss, known.outcome, lambda rows: float("nan"), metric_name="luck", output=known.output)
    with pytest.raises(ConfigError, match=r"task odd: the metric luck returned nan for 48 examples"):
        compress(Net(), loaders(), task=odd, **settings())


def test_the_command_line_takes_a_network_loaders_and_a_task_by_name(tmp_path, monkeypatch):
    code = """
    import torch
    from torch import nn
    import basisprune as bp

    class Net(nn.Sequential):
        pass

    def network():
        torch.manual_seed(0)
        wide = nn.Conv2d(16, 32, 3, padding=1)
        return Net(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), wide, nn.ReLU(), nn.Conv2d(32, 2, 1))

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        images = [torch.randn(16, 1, 8, 8, generator=generator) for _ in range(2)]
        return [(each, (each[:, 0] > 0.3).long()) for each in images]

    loaders = bp.Loaders(train=batches(0), val=batches(1), test=batches(2))
    task = bp.segmentation("dice")
    """
    (tmp_path / "own_segmenter.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    names = ["--model", "own_segmenter:network", "--data", "own_segmenter:loaders", "--task", "own_segmenter:task"]
    try:
        options = ["--epochs", "1", "--basis-ratio", "0.3", "--framework", "basis", "--no-onnx"]
        done = invoke("compress", *names, *options, "--output", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
        assert "test mean Dice" in done.output
        summary = RunSummary.read(tmp_path / "out" / "summary.json")
        assert summary.config["task"] == "own_segmenter:task"
        assert load_bundle(tmp_path / "out" / "model").model(torch.zeros(1, 1, 8, 8)).shape == (1, 2, 8, 8)  # untrusted
        planned = invoke("compress", *names, *options, "--dry-run", "--output", str(tmp_path / "none"))
        assert planned.exit_code == 0, planned.output
        assert "train: 32 examples" in planned.output
        refused = invoke("compress", *names[:4], "--task", "own_segmenter:loaders", "--output", str(tmp_path / "other"))
        assert refused.exit_code == 1
        assert "a Task, or a function that returns one, is needed" in refused.output
    finally:
        sys.modules.pop("own_segmenter", None)


def test_a_loss_and_a_metric_of_ones_own_work_on_images_that_are_read_here(tmp_path):
    def focal(logits, labels):
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    task = Task(
        "rare things",
        focal,
        lambda logits, labels: logits.softmax(1).gather(1, labels[:, None]),
        metric_name="trust",
        is_share=True,
    )
    data = load_data(tiny_images(90), val_fraction=0.3, test_fraction=0.2, confirm_fraction=0.5)
    training = tiny_training(epochs=2)
    options = {"recipe": tiny_recipe(training), "basis_ratio": 0.3, "framework": "basis", "onnx": True}
    found = compress(tiny_model(), data, task=task, output=tmp_path / "out", **options)
    assert (found.summary.metric, found.summary.classes) == ("trust", ("0", "1", "2"))
    assert 0 < found.summary.test.after.accuracy < 1
    exporter = Exporter(data, task=task)
    in_torch = exporter.outcomes(found.model, data.test)
    in_file = exporter.file_outcomes(tmp_path / "out" / "model.onnx", found.model, data.test)
    assert in_file.rows == pytest.approx(in_torch.rows, abs=0.02)  # pixels are rounded for the file
    assert in_torch.value == pytest.approx(found.summary.test.after.accuracy)


def test_a_pipeline_runs_frameworks_for_any_task():
    torch.manual_seed(0)
    model = Net()
    pipeline = Pipeline(model, loaders(), settings()["recipe"], task=segmentation())
    results = [pipeline.run(name, basis_ratio=0.3, filter_ratio=0.2) for name in ("baseline", "taylor")]
    assert results[1].stages[-1].parameters < results[0].stages[-1].parameters
    assert "mean IoU" in framework_table(results).splitlines()[0]
    assert not hasattr(model, "input_spec")  # the one given is not changed
