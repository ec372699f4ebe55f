"""Networks and data of other libraries: what they do differently, done here by small networks of our own."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_recipe, tiny_training
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessor,
)

import basisprune as bp
from basisprune.data import Loaders
from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.export.onnx import to_proto
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, LayerError
from basisprune.search import SearchConfig
from basisprune.tasks import CLASSIFICATION, multilabel, regression, segmentation
from basisprune.torchkit.running import loss_on
from basisprune.training.evaluation import evaluate, judge, predict

pytestmark = pytest.mark.usefixtures("one_thread")


def residual() -> PreTrainedModel:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[12, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config).eval()


def segformer() -> PreTrainedModel:
    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config).eval()


def pictures(seed: int = 0, batches: int = 2, side: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Noise of three colours."""
    generator, labels = torch.Generator().manual_seed(seed), torch.arange(12) % 3
    found = []
    for _ in range(batches):
        images = 0.3 * torch.randn(12, 3, side, side, generator=generator)
        images[torch.arange(12), labels] += 1
        found.append((images, labels))
    return found


def masked(seed: int = 0, batches: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [(x, (y[:, None, None] * (x[:, 0] * 0 + 1)).long()) for x, y in pictures(seed, batches)]


class Logits(nn.Module):
    """The same network without what is around its scores."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


def test_outputs_with_logits_are_evaluated_and_predicted_as_their_logits():
    model, data = residual(), pictures()
    plain = Logits(model)
    assert evaluate(model, data) == evaluate(plain, data)
    assert (predict(model, data).rows == predict(plain, data).rows).all()
    images, labels = data[0]
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(), CLASSIFICATION):
        assert torch.equal(loss_on(model, images, labels, loss), loss_on(plain, images, labels, loss))
    whole = loss_on(model, images, labels, lambda output, labels: F.cross_entropy(output.logits, labels))
    assert torch.equal(whole, loss_on(plain, images, labels, F.cross_entropy))


@pytest.mark.parametrize("task", [multilabel(), regression()])
def test_other_tasks_take_them_too(task):
    model = residual()
    data = [(images, F.one_hot(labels, 3).float()) for images, labels in pictures()]
    assert judge(model, data, task).value == judge(Logits(model), data, task).value


def test_a_default_loss_scores_outputs_with_logits():
    model, data = residual(), pictures()
    ours, plain = (bp.prune(each, 0.3, data, remove="basis") for each in (model, Logits(model)))
    with torch.no_grad():
        torch.testing.assert_close(ours(data[0][0]).logits, plain(data[0][0]))


def test_small_logits_are_enlarged_as_transformers_does():
    model, task = segformer(), segmentation()
    (images, masks), *_ = masked()
    with torch.no_grad():
        raw = model(images)
        assert raw.logits.shape[-2:] != masks.shape[-2:]
        wanted = SegformerImageProcessor().post_process_semantic_segmentation(raw, [masks.shape[-2:]] * len(masks))
        plain = F.interpolate(raw.logits, masks.shape[-2:], mode="bilinear", align_corners=False)
        assert torch.equal(plain.argmax(1), torch.stack(wanted))
        assert (task.rows(task.output(raw), masks, 12) == task.rows(task.output(plain), masks, 12)).all()
        assert torch.equal(task.output_loss(task.output(raw), masks), F.cross_entropy(plain, masks))
        assert task.distance(task.output(raw), task.output(raw)).item() == pytest.approx(0)


def test_a_loss_of_ones_own_gets_enlarged_logits():
    seen = []
    task = segmentation(loss=lambda scores, masks: (seen.append(scores.shape), F.cross_entropy(scores, masks))[1])
    (images, masks), *_ = masked()
    task.output_loss(task.output(segformer()(images)), masks)
    assert seen == [(12, 3, 16, 16)]


def test_of_several_heads_the_first_counts_and_all_are_trained():
    task, masks = segmentation("dice"), torch.randint(0, 2, (3, 1, 4, 4, 4))
    heads = torch.randn(3, 2, 2, 4, 4, 4, requires_grad=True)  # (N, heads, classes, ...)
    assert (task.rows(task.output(heads), masks, 3) == task.rows(heads[:, 0], masks, 3)).all()
    first, second = (F.cross_entropy(heads[:, place], masks[:, 0]) for place in (0, 1))
    torch.testing.assert_close(task.output_loss(heads, masks), (first + second / 2) / 1.5)
    assert task.distance(heads, heads[:, 0]).item() == pytest.approx(0, abs=1e-6)


def compressed(network: nn.Module, make, folder, **options):
    recipe = tiny_recipe(tiny_training(epochs=2, train="all", weight_lr=1.0, lr=0.02))
    data = Loaders(train=make(0), val=make(1), test=make(2))
    search = SearchConfig(framework="loss+basis", polish=False, tolerance=0.6)
    return bp.compress(network, data, output=folder, max_drop=0.5, recipe=recipe, search=search, **options)


def test_a_classifier_of_transformers_becomes_smaller_down_to_onnx(tmp_path):
    result = compressed(residual(), pictures, tmp_path / "out", onnx=True)
    assert isinstance(result.model, ResNetForImageClassification)
    assert result.summary.chosen.parameters < result.summary.reference.parameters
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    images = pictures(3)[0][0]
    (found,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), result.model(images).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_segformer_comes_back_from_its_bundle_whether_it_has_run_or_not(tmp_path, has_run):
    model, images = segformer(), torch.randn(2, 3, 16, 16)
    if has_run:  # transformers notes that as an attribute
        model(images, output_hidden_states=True)
    for network in (model, fold(model, images)):
        folder = save_pretrained(network, tmp_path / "b", factory=f"{__name__}:segformer", input_shape=(3, 16, 16))
        loaded = from_pretrained(folder, trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(loaded(images).logits, network(images).logits)


class Passing(nn.Module):
    """Takes whatever it is given, as YOLO's networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def inner(self, images, *, gain=1.0):
        return self.head(self.conv(images).relu() * gain)


def test_a_network_that_takes_any_arguments_is_traced_and_stands_alone(tmp_path):
    folded, images = fold(Passing().requires_grad_(False), torch.zeros(2, 3, 8, 8)), torch.randn(3, 3, 8, 8)
    loaded = from_pretrained(save_pretrained(folded, tmp_path / "b", input_shape=(3, 8, 8)))
    assert torch.equal(loaded(images), folded(images))


class Keeping(nn.Module):
    """Keeps a grid for the shape of its last input, as the heads of YOLO's networks do, and cannot be traced."""

    shape = None
    grid = torch.empty(0)

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.conv, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)

    def forward(self, images):
        features = self.conv(images).relu()
        if self.shape != features.shape:
            self.grid, self.shape = 0.5 + torch.arange(features.shape[-1], dtype=features.dtype), features.shape
        return {"scores": self.head(features * self.grid)}["scores" if images.mean() < 9 else "none"]


@pytest.mark.parametrize("batch", [None, 1, 2, 3])
def test_a_network_that_keeps_what_suits_its_last_input_has_a_free_batch_in_onnx(batch):
    class Kept(Keeping):
        def forward(self, images):
            features = self.conv(images).relu()
            if self.shape != features.shape:
                self.grid, self.shape = 0.5 + torch.arange(features.shape[-1], dtype=features.dtype), features.shape
            return self.head(features * self.grid)

    network = Kept().eval()
    if batch is not None:
        network(torch.rand(batch, 3, 16, 16))
    size = to_proto(network, torch.rand(2, 3, 16, 16)).graph.input[0].type.tensor_type.shape.dim[0]
    assert size.dim_param == "batch"


def test_a_network_that_was_judged_can_be_scored():
    task, network = segmentation(), Keeping().eval()
    judge(network, masked(), task)
    (images, masks), *_ = masked()
    loss_on(network, images, masks, task).backward()
    assert network.conv.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("has_run", [False, True])
def test_a_network_that_cannot_be_traced_is_built_by_the_class_that_it_is(tmp_path, has_run):
    network, images = Keeping(6), torch.randn(2, 3, 16, 16)
    if has_run:
        network(images)
    small = fold(bp.prune(network.eval(), 0.4, masked(), loss=segmentation(), remove="filters"), images)
    folder = save_pretrained(small, tmp_path / "b", input_shape=(3, 16, 16))
    with pytest.raises(BundleError, match=r"is built by '[\w.]*test_stacks:Keeping\(width=6\)'"):
        from_pretrained(folder)
    assert torch.equal(from_pretrained(folder, trust_remote_code=True)(images), small(images))


def test_the_error_of_a_network_that_no_class_builds_is_that_of_its_graph(tmp_path):
    network = Keeping(6).eval()
    network.built_by = f"{__name__}:Passing"  # which is another
    with pytest.raises((BundleError, LayerError), match="Keeping"):
        save_pretrained(fold(network, torch.zeros(2, 3, 8, 8)), tmp_path / "b", input_shape=(3, 8, 8))
    assert not (tmp_path / "b").exists()


def test_such_a_network_is_compressed_to_a_bundle_without_a_word(tmp_path):
    result = compressed(Keeping(12), masked, tmp_path / "out", onnx=False, task="segmentation")
    assert "model" in result.summary.files
    loaded = from_pretrained(tmp_path / "out" / "model", trust_remote_code=True)
    images = masked(3)[0][0]
    assert torch.equal(loaded(images), result.model(images))
